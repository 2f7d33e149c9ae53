import numpy as np
import pytest

from tests.galleries import normal


@pytest.fixture
def queries():
    return normal(np.random.default_rng(0), 300, 8)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "photos.queries"
