# Both commands need python3 (3.10 or newer), pip and make, and create their own environment in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint unit levels lowest ratios integration bench clean

demo: $(VENV)/installed
	$(BIN)/hubplugin demo

test: lint unit levels ratios

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: $(VENV)/installed
	$(BIN)/python -m pytest

# A part of the numerical tests under each instruction set that this machine has; says which it lacks.
levels: $(VENV)/installed
	$(BIN)/python -m tests.levels

# The lowest versions that pyproject.toml allows, with the tests that need no server. Gigabytes: torch is installed anew.
lowest: $(VENV)/installed
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv venv --clear --python $(PYTHON) .lowest
	$(BIN)/uv pip install --python .lowest --resolution lowest-direct --editable '.[all]' 'scikit-learn>=1.4' 'pytest>=8.2' 'hypothesis>=6.100'
	.lowest/bin/python -m pytest tests/core tests/query_dependent tests/tuning tests/evaluation tests/faiss

# Every scenario on every backend that is there; see docs/integration.md. REQUIRE="docker cluster" makes absence fail.
integration: $(VENV)/installed
	$(BIN)/python -m pytest integration_tests --kills 50 --budget inf $(REQUIRE:%=--require-backend %)

# Ratios to the bare product, against those stored in benchmarks/results.
ratios: $(VENV)/installed
	$(BIN)/python -m benchmarks.check

# The peers are installed for this alone.
bench: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[benchmarks]'
	$(BIN)/python -m benchmarks

# Constraints pin every direct dependency; torch comes first, so that nothing else chooses its build.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable examples/lancedb_adapter
	touch $@

clean:
	rm -rf $(VENV) .lowest .demo dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
