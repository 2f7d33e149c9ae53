from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

DATA = Path(__file__).parent.parent / "examples" / "data"

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append("cuda")
if torch.backends.mps.is_available():
    DEVICES.append("mps")


@pytest.fixture(scope="session")
def real() -> dict[str, np.ndarray]:
    """The example set: bank_queries, bank_targets, test_queries, test_targets, each [rows, 384] float16."""
    return {path.stem: np.load(path) for path in DATA.glob("*.npy")}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
