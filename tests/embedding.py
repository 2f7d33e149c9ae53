"""A model of a user's, by the name `tests.embedding:embed`."""

import numpy as np


def embed(texts):
    """Return row N of embedded.npy, in the folder of this process, for "text N"."""
    return np.load("embedded.npy")[[int(text.split()[1]) for text in texts]]
