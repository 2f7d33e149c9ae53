# Both commands need python3 (3.10 or newer), pip and make, and create their own environment in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOUD   := $(BIN)/python -m pip install --constraint constraints.txt
PIP    := $(LOUD) --quiet

# The CPU build of torch on Linux without an NVIDIA GPU: the default wheel brings gigabytes of CUDA.
CPU_TORCH := $(if $(and $(filter Linux,$(shell uname)),$(if $(shell command -v nvidia-smi),,none)),https://download.pytorch.org/whl/cpu)
WORKERS ?= 2

# Without these files each worker and each process that a test starts compiles everything anew: twenty seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test lint fast slow light lowest ratios gpu integration bench docs clean
.NOTPARALLEL:

demo: $(VENV)/demo
	@$(BIN)/python examples/demo.py

# What to run before every commit: no network, some three minutes on two idle cores.
check: lint fast

# Everything that needs no server, each test once, and the site; what fails in minutes comes first.
test: check docs slow light

# Format, lint, spelling, layers and types.
lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs hubplugin adapters tests integration_tests
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

fast: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --durations=20 -m "not slow and not network and not server" tests

# A file in one process, since its tests share what they make. What measures memory does so in a process of its own.
slow: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20 \
	  -m "(slow or network) and not server"

# A service's environment, without torch: its size, what it costs to import, and the adapters' tests. Where one asks for
# a device of torch it is left out, with the reason.
light: $(VENV)/installed
	$(BIN)/python -m venv --clear .light
	.light/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[qdrant]'
	.light/bin/python -m benchmarks.serving --environment .light
	.light/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[qdrant,faiss]' pytest pytest-xdist hypothesis scipy
	OMP_NUM_THREADS=1 .light/bin/python -m pytest -n $(WORKERS) -m "not slow and not network and not server" tests/serving tests/qdrant tests/faiss

# The lowest versions that pyproject.toml allows, with the tests that need no server. Gigabytes: torch is installed anew.
# Of Qdrant the jobs: the local mode of a client below 1.20 cannot search by id within prefetches.
lowest: $(VENV)/installed
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv venv --clear --python $(PYTHON) .lowest
	$(BIN)/uv pip install --python .lowest --resolution lowest-direct --editable '.[all]' 'ranx>=0.3.20' 'scikit-learn>=1.4' 'pytest>=8.2' 'hypothesis>=6.100'
	.lowest/bin/python -m pytest tests/core tests/query_dependent tests/tuning tests/evaluation tests/faiss tests/qdrant/test_plain_client.py tests/qdrant/test_jobs.py tests/qdrant/test_calibration.py

# Every scenario on every backend that is there; see docs/integration.md. REQUIRE="docker cluster" makes absence fail.
integration: $(VENV)/installed
	$(BIN)/python -m pytest integration_tests --kills 50 $(REQUIRE:%=--require-backend %)

# Ratios to the bare product, against those stored in benchmarks/results. Fails on the processor they were stored on only.
ratios: $(VENV)/installed
	$(BIN)/python -m benchmarks.fit --check

# The numerical tests and the benchmark on a CUDA card.
ifneq ($(shell command -v nvidia-smi),)
gpu: $(VENV)/installed
	$(BIN)/python -m pytest tests/core/test_numerical_truth.py tests/core/test_kernels.py tests/core/test_largest.py tests/core/test_sampled.py
	$(BIN)/python -m benchmarks.gpu
else
gpu:
	@echo "gpu: nvidia-smi finds no card here, so nothing is run; python -m benchmarks.gpu counts what a card would wait for"
endif

# The peers are installed for this alone.
bench: $(VENV)/installed
	$(PIP) --editable '.[benchmarks]'
	$(BIN)/python -m benchmarks

# The site, in site/; a warning fails. What is generated from the program is written first.
docs: $(VENV)/installed
	$(BIN)/python -m pages
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.:adapters $(BIN)/python -m mkdocs build --strict

$(VENV)/bin/python:
	@echo "Making an environment in $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

# Constraints pin every direct dependency; torch comes first, so that nothing else chooses its build.
$(VENV)/torch: $(VENV)/bin/python constraints.txt
ifdef CPU_TORCH
	@echo "Downloading torch without CUDA, which fits are tested on, some 200 MB, once. Nothing is shown until it is there ..."
	@$(PIP) --retries 0 --timeout 15 --index-url $(CPU_TORCH) torch 2> /dev/null || echo "$(CPU_TORCH) cannot be reached."
endif
	@$(BIN)/python -m pip --quiet show torch 2> /dev/null || \
	  { echo "Downloading torch from the package index, which fits are tested on: on Linux with CUDA, 5 GB on disk, once."; \
	    echo "That can take ten minutes, with a bar for each package ..."; $(LOUD) torch; }
	@touch $@

# The stores that the demo corrects, which the blocks of the README use, too: 226 MB. Pictures and plans are the extra evaluation.
$(VENV)/demo: $(VENV)/bin/python pyproject.toml
	@echo "Downloading Faiss and Qdrant's client, which the demo corrects, 48 MB, once ..."
	@$(PIP) --editable '.[faiss,qdrant]'
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	@echo "Downloading every store and framework that the tests use, some 1 GB, once, with a bar for each package ..."
	@$(LOUD) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .lowest .light .demo dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
