import numpy as np
import pytest

from tests.galleries import flat_index, unit


@pytest.fixture
def here(real, tmp_path, monkeypatch):
    """The folder of this process: photos.faiss, of real vectors, and bank.npy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    flat_index("photos.faiss", unit(real["test_targets"]))
    np.save("bank.npy", real["bank_queries"])
    return tmp_path
