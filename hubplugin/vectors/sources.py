"""`as_vectors`: whatever a user passes as vectors. The only reader of user arrays."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias

import numpy as np

from hubplugin.errors import InputError
from hubplugin.vectors.arrays import from_array, from_tensor
from hubplugin.vectors.base import Scannable, Vectors, one_line, spool
from hubplugin.vectors.files import from_file


class SupportsArray(Protocol):
    """What numpy.asarray reads: an array, a memory map, a tensor, a column or a table of Arrow, pandas or polars."""

    def __array__(self) -> np.ndarray: ...


Number: TypeAlias = float | np.number[Any]

VectorLike: TypeAlias = (
    SupportsArray | Sequence[SupportsArray | Sequence[Number]] | Vectors | Scannable | str | os.PathLike[str]
)
"""numpy array, torch tensor, memory map, nested lists, a table's column with one vector a row, `Vectors`, a store with
`scan()`, or a path (.npy, .npz, .safetensors, .parquet; `file#name` names one array or column of several)."""

OffsetsLike: TypeAlias = SupportsArray | Sequence[Number]
"""One number a target [n], in an array, a tensor or a list."""


def as_vectors(source: VectorLike, name: str = "vectors") -> Vectors:
    """`source` as checked `Vectors`; `name` is what errors call it ("query bank", "targets").

    Raises InputError for what is empty, not a matrix, not numeric, an object array or pickle (never
    unpickled), truncated, or of mixed dimensions. Values are checked as the blocks are read.
    """
    if isinstance(source, Vectors):
        return source
    if isinstance(source, (str, os.PathLike)):
        return from_file(os.fspath(source), name)
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and isinstance(source, torch.Tensor):
        return from_tensor(source, name)
    if isinstance(source, Scannable):
        return spool((batch.vectors for batch in source.scan()), name)
    if np.ma.is_masked(source):
        raise InputError(f"{name} is a masked array with values that are masked; remove those rows or fill them")
    try:
        array = np.asarray(source)
    except ValueError:
        raise InputError(
            f"{name}: mixed dimensions: rows have different lengths; expected a matrix [rows, d]"
        ) from None
    except Exception as error:  # whatever the conversion of a foreign object raises
        raise InputError(f"{name}: {type(source).__name__} is no matrix [rows, d]: {one_line(error)}") from None
    if array.ndim == 0 and array.dtype.kind == "O":
        adapter = f"hubplugin_{type(source).__module__.partition('.')[0]}"
        mend = f"; {adapter} can read its vectors" if find_spec(adapter) else ""
        raise InputError(f"{name}: {type(source).__name__} is no matrix [rows, d]{mend}")
    return from_array(array, name)
