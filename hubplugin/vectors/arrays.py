"""Arrays and tensors in memory, as `Vectors`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hubplugin.errors import InputError, Parameter
from hubplugin.vectors.base import Sliceable, Vectors


def from_array(array: np.ndarray, name: str) -> Vectors:
    if array.dtype.kind in "UST" or (array.dtype.kind == "O" and array.size and isinstance(array.flat[0], str)):
        raise only_texts(name, "is made of texts")
    if array.dtype.kind == "O" and array.ndim == 1 and array.size:  # the column of a table: one vector a row
        array = _stacked(array, name)
    if array.dtype.kind not in "fiu":
        what = "an object array" if array.dtype.kind == "O" else f"an array of {array.dtype}"
        raise InputError(f"{name} is {what}; expected floats or integers in a matrix [rows, d]")
    return Sliceable(name, array, array.shape, np.asarray)


def _stacked(rows: np.ndarray, name: str) -> np.ndarray:
    """The vectors that are the elements of `rows` [n], as a matrix [n, d]."""
    try:
        vectors = [np.asarray(row) for row in rows]
    except ValueError:
        raise InputError(f"{name} is an object array of nested rows; expected a vector in each") from None
    for number, vector in enumerate(vectors):
        if vector.ndim != 1 or vector.shape != vectors[0].shape:
            raise InputError(
                f"{name} is an object array: row {number} has shape {vector.shape}, row 0 {vectors[0].shape}; "
                "expected a vector in each, all of the same length"
            )
    return np.stack(vectors)


def only_texts(name: str, what: str) -> InputError:
    return InputError(
        f"{name} {what}; embed texts with the model that embedded the gallery: pass it as ",
        Parameter("embed"),
        " for a query bank, or pass vectors, as of numpy.save('bank.npy', model.encode(texts))",
    )


def from_tensor(tensor: Any, name: str) -> Vectors:
    dense = not tensor.is_nested and tensor.layout is sys.modules["torch"].strided
    if tensor.is_complex() or tensor.is_meta or not dense or str(tensor.dtype) == "torch.bool":
        kind = "a meta tensor" if tensor.is_meta else f"a tensor of {tensor.dtype}" if dense else "a sparse tensor"
        raise InputError(f"{name} is {kind}; expected floats or integers in a dense matrix [rows, d]")
    return Sliceable(name, tensor.detach(), tuple(tensor.shape), numpy)


def numpy(tensor: Any) -> np.ndarray:
    # numpy knows no bfloat16; a double stays one, so that what float32 cannot hold is seen.
    plain = tensor if str(tensor.dtype) == "torch.float64" else tensor.float()
    array: np.ndarray = plain.cpu().resolve_neg().numpy()
    return array
