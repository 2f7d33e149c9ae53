"""What the public types take and what they refuse: read by mypy in `make lint`, and never run.

Each line below "refused" has to be an error: mypy's strict mode reports an ignored error that is none.
"""

from pathlib import Path

import numpy as np
import torch

import hubplugin
import hubplugin_faiss
from hubplugin.vectors import as_vectors

array, tensor, numbers = np.eye(3, dtype=np.float16), torch.eye(3), [1.0, 2.0, 3.0]


def vectors() -> None:
    for given in (
        array,
        np.memmap("bank.bin"),
        tensor,
        "bank.npy",
        Path("bank.npy"),
        hubplugin.open_store("faiss:x"),
    ):
        as_vectors(given)
    as_vectors([[1, 0], [0.5, 2.0]])
    as_vectors((numbers, [np.float32(1)]))
    as_vectors([array[0], array[1]])
    as_vectors([tensor[0], tensor[1]])
    as_vectors(hubplugin_faiss.open_store("photos.faiss"))
    # refused
    as_vectors(42)  # type: ignore[arg-type]
    as_vectors(None)  # type: ignore[arg-type]
    as_vectors({"a": array})  # type: ignore[arg-type]
    as_vectors(["a text"])  # type: ignore[list-item]
    as_vectors([1.0])  # type: ignore[list-item]


def truth() -> None:
    hubplugin.evaluate(array, queries=array, truth="pairs.qrels")
    hubplugin.evaluate(array, queries=array, truth=np.arange(3))
    hubplugin.evaluate(array, queries=array, truth=[0, 1, 2])
    hubplugin.evaluate(array, queries=array, truth=[[0], [1, 2], []])
    hubplugin.evaluate(
        array, queries=array, truth=[np.array([0]), np.array([1, 2]), np.array([2])]
    )
    # refused
    hubplugin.evaluate(array, queries=array, truth=3.5)  # type: ignore[arg-type]


def offsets() -> None:
    hubplugin_faiss.upgrade(None, hubplugin.fit(array, array))
    hubplugin_faiss.upgrade(None, array[0])
    hubplugin_faiss.upgrade(None, numbers)
    # refused
    hubplugin_faiss.upgrade(None, "offsets.npy")  # type: ignore[arg-type]
