import numpy as np
import pytest

from tests.galleries import flat_index, unit


@pytest.fixture
def here(real, cwd):
    """The folder of this process: photos.faiss, of real vectors, and bank.npy."""
    flat_index("photos.faiss", unit(real["test_targets"]))
    np.save("bank.npy", real["bank_queries"])
    return cwd
