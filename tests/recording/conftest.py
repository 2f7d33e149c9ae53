import numpy as np
import pytest


@pytest.fixture
def queries():
    return np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "photos.queries"
