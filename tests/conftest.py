from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).parent.parent / "examples" / "data"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the frameworks out where slow tests are: to import them takes longer than all that is fast."""
    return True if collection_path.name == "frameworks" and "not slow" in config.getoption("markexpr") else None


@pytest.fixture(scope="session")
def real() -> dict[str, np.ndarray]:
    """The example set: bank_queries, bank_targets, test_queries, test_targets, each [rows, 384] float16."""
    return {path.stem: np.load(path) for path in DATA.glob("*.npy")}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
