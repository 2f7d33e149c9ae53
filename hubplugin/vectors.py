"""Vectors from anywhere (arrays, tensors, tables, files, stores), in checked blocks.

`as_vectors` is the only function that reads vectors passed by a user.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np

from hubplugin.errors import EmptyInput, InputError, Parameter, install
from hubplugin.metric import Metric, normalise

Progress: TypeAlias = Callable[[str, int, int], None]
"""A callback: long work calls progress(what, done, total), with total 0 if unknown."""

BLOCK_ROWS = 16_384
"""The default rows of a block."""

BLOCK_NUMBERS = 1 << 18
"""Numbers in a block that a CPU computes with: 1 MiB, which stays in the cache of a
core. This halves the time to normalise a bank of 15,000 x 384."""


@runtime_checkable
class Scannable(Protocol):
    """A store whose `scan` yields batches with `.vectors` [b, d], each vector once."""

    def scan(self) -> Iterator[Any]: ...


class Vectors(ABC):
    """A set of `rows` vectors of `dim` dimensions, read in blocks as often as needed.

    name: The name used in error messages.
    left_out: The number of zero vectors of the source that these vectors leave out.
    """

    left_out = 0

    def __init__(self, name: str, rows: int, dim: int):
        if rows == 0 or dim == 0:
            raise EmptyInput(
                f"{name} is empty: shape is [{rows}, {dim}]; at least one vector is needed"
            )
        self.name = name
        self.rows = rows
        self.dim = dim

    @abstractmethod
    def raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        """Yield blocks [b, dim], b <= `size`, in order and of any numeric type."""

    def shaped_blocks(self, size: int) -> Iterator[np.ndarray]:
        """Yield `raw_blocks`. Raises InputError if they do not form [rows, dim]."""
        rows_read = 0
        for raw in self.raw_blocks(size):
            rows_read += len(raw)
            if raw.ndim != 2 or raw.shape[1] != self.dim:
                raise InputError(
                    f"{self.name}: mixed dimensions: expected {self.dim}, "
                    f"found shape {raw.shape}"
                )
            if rows_read > self.rows:
                break
            yield raw
        if rows_read != self.rows:
            raise InputError(
                f"{self.name}: expected {self.rows} rows, read {rows_read}; the source "
                "changed while being read"
            )

    def blocks(
        self, size: int = BLOCK_ROWS, metric: Metric | None = None
    ) -> Iterator[np.ndarray]:
        """Yield checked blocks [b, dim], b <= `size`: finite float32 in C order.

        If `metric` is cosine, the rows come at unit length. Raises InputError at the
        first row that cannot be used, and if the source has changed.
        """
        start = 0
        for raw in self.shaped_blocks(size):
            numbers = range(start, start + len(raw))
            block = self._check(raw, numbers)
            if metric is Metric.COSINE:
                block = normalise(block, self.name, numbers)
            yield block
            start += len(raw)

    def select(self, rows: np.ndarray) -> np.ndarray:
        """Return the vectors in the ascending `rows`: float32 [len(rows), dim].

        The source is read once. Only these rows are kept and checked.
        """
        parts = []
        start = 0
        for raw in self.shaped_blocks(BLOCK_ROWS):
            block_rows = rows[(rows >= start) & (rows < start + len(raw))]
            parts.append(self._check(raw[block_rows - start], block_rows))
            start += len(raw)
        return np.concatenate(parts)

    def _check(self, raw: np.ndarray, numbers: range | np.ndarray) -> np.ndarray:
        """Return `raw` [b, dim] as finite float32 in C order.

        Raises InputError with the number, from `numbers` [b], of the first bad row.
        """
        with np.errstate(over="ignore"):  # too large a value becomes infinite
            block = np.ascontiguousarray(raw, dtype=np.float32)
        is_finite = np.isfinite(block).all(axis=1)
        if not is_finite.all():
            raise InputError(
                f"{self.name}: row {numbers[int(np.argmin(is_finite))]} holds a value "
                "that is NaN, infinity or too large for float32; remove or repair it"
            )
        return block

    def array(self) -> np.ndarray:
        """Return all rows as one array, for banks: float32 [rows, dim]."""
        return np.concatenate(list(self.blocks()))


class Sliceable(Vectors):
    """Vectors in a source that can be sliced: an array, a memory map or a tensor."""

    def __init__(
        self,
        name: str,
        source: Any,
        shape: tuple[int, ...],
        to_numpy: Callable[[Any], np.ndarray],
    ):
        if len(shape) != 2:
            raise InputError(
                f"{name} has {len(shape)} dimension(s), shape {tuple(shape)}; expected "
                "[rows, d], one vector per row"
            )
        super().__init__(name, *map(int, shape))
        self._source = source
        self._to_numpy = to_numpy

    def raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        for start in range(0, self.rows, size):
            yield self._to_numpy(self._source[start : start + size])

    def take(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return the unchecked vectors of `rows`, a slice or row numbers."""
        return self._to_numpy(self._source[rows])

    def select(self, rows: np.ndarray) -> np.ndarray:
        return self._check(self.take(rows), rows)  # reads no other rows


class Directed(Vectors):
    """The vectors of `source` that have a direction: all except zero vectors.

    numbers: The row of each vector in the source, ascending.
    """

    def __init__(self, source: Vectors, numbers: np.ndarray):
        if not len(numbers):
            raise EmptyInput(
                f"{source.name}: all {source.rows} rows are zero vectors, which have no "
                "cosine similarity"
            )
        super().__init__(source.name, len(numbers), source.dim)
        self._source = source
        self.numbers = numbers
        self.left_out = source.rows - self.rows

    @staticmethod
    def of(vectors: Vectors, metric: Metric) -> Vectors:
        """Return `vectors`, without zero vectors if `metric` is cosine."""
        if metric is not Metric.COSINE or isinstance(vectors, Directed):
            return vectors
        has_direction = np.concatenate(
            [block.any(axis=1) for block in vectors.blocks()]
        )
        if has_direction.all():
            return vectors
        return Directed(vectors, np.flatnonzero(has_direction))

    def raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        start = 0
        for raw in self._source.raw_blocks(size):
            # `numbers[first:stop]` are the rows in this block of the source.
            first, stop = np.searchsorted(self.numbers, (start, start + len(raw)))
            if stop > first:
                yield raw[self.numbers[first:stop] - start]
            start += len(raw)

    def select(self, rows: np.ndarray) -> np.ndarray:
        return self._source.select(self.numbers[rows])

    def for_source(self, values: np.ndarray) -> np.ndarray:
        """Return `values` [rows] for every row of the source, 0 for zero vectors."""
        with_zeros = np.zeros(self._source.rows, values.dtype)
        with_zeros[self.numbers] = values
        return with_zeros


def original_rows(vectors: Vectors) -> np.ndarray:
    """Return each vector's row in the source, where zero vectors count: int [n]."""
    if isinstance(vectors, Directed):
        return vectors.numbers
    return np.arange(vectors.rows)


def locate_rows(vectors: Vectors, source_rows: np.ndarray) -> np.ndarray:
    """Convert row numbers of the source to positions in `vectors`: int [n].

    -1 stays -1, and a zero vector that `vectors` leaves out becomes -1.
    """
    if not isinstance(vectors, Directed):
        return source_rows
    position = np.searchsorted(vectors.numbers, source_rows)
    position = np.minimum(position, vectors.rows - 1)
    return np.where(vectors.numbers[position] == source_rows, position, -1)


def prepare(vectors: Vectors, metric: Metric) -> np.ndarray:
    """Return a bank's vectors [m, d], checked, and at unit length for cosine."""
    size = max(BLOCK_NUMBERS // vectors.dim, 1)
    return np.concatenate(list(vectors.blocks(size, metric)))


def draw_sample(
    vectors: Vectors, count: int, metric: Metric, rng: np.random.Generator
) -> np.ndarray:
    """Draw rows at random, and return them in their original order.

    Args:
        vectors: The vectors, [n, d].
        count: The maximum number of rows.
        metric: If it is cosine, zero vectors are left out and the others normalised.
        rng: The random number generator.

    Returns:
        The drawn rows, float32 [s, d], s <= min(count, n).
    """
    rows = vectors.select(np.sort(rng.permutation(vectors.rows)[:count]))
    if metric is Metric.COSINE:
        rows = normalise(rows[rows.any(axis=1)], vectors.name)
    return rows


def take_rows(vectors: Vectors, rows: np.ndarray, metric: Metric) -> np.ndarray:
    """Return the vectors in the ascending `rows`: float32 [len(rows), d].

    They have unit length if `metric` is cosine. No other row is read if the source
    allows access by row number.
    """
    selected = vectors.select(rows)
    if metric is Metric.COSINE:
        return normalise(selected, vectors.name, rows)
    return selected


def to_tempfile(
    blocks: Iterable[np.ndarray], name: str, expected: int = 0
) -> Sliceable:
    """Copy blocks that can be read only once to a temporary file.

    The file has no name, and disappears with the returned object or with the process.
    Memory holds one block at a time, whatever the number of rows.

    Args:
        blocks: The blocks, [b, d] each.
        name: The name used in error messages.
        expected: The approximate number of rows, for the error about a full disk.

    Raises:
        InputError: There are no blocks, their dimensions differ, or the disk is full.
    """
    rows = dim = 0
    # No `with`: closing the file after a full disk would flush once more, and fail.
    file = tempfile.TemporaryFile()  # noqa: SIM115
    for block in blocks:
        if block.ndim != 2 or (dim and block.shape[1] != dim):
            raise InputError(
                f"{name}: mixed dimensions: expected [rows, {dim}], "
                f"found shape {block.shape}"
            )
        rows += len(block)
        dim = block.shape[1]
        try:
            file.write(np.ascontiguousarray(block, dtype=np.float32).tobytes())
            file.flush()
        except OSError as error:
            raise cannot_keep(name, error, 4 * dim * max(rows, expected)) from None
    if not rows:
        raise EmptyInput(
            f"{name} is empty: no vectors were found; at least one is needed"
        )
    mapped = np.memmap(file, np.float32, "r", shape=(rows, dim))
    file.close()  # the map stays valid
    return Sliceable(name, mapped, mapped.shape, np.asarray)


def cannot_keep(name: str, error: OSError, needed: int) -> InputError:
    """Return the error for a disk that lacks room for a file of `needed` bytes."""
    folder = tempfile.gettempdir()
    return InputError(
        f"{name}: cannot be kept in {folder!r}: {error.strerror or error}; at least "
        f"{needed:,} bytes are needed and {shutil.disk_usage(folder).free:,} are free; "
        "set TMPDIR to a folder with room"
    )


def fingerprint(*arrays: np.ndarray | None) -> str:
    """Return a fingerprint of the arrays' content: 16 hex digits of a SHA-256 hash."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(repr((array.shape, array.dtype.str)).encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


def one_line(error: BaseException) -> str:
    """Return an error's text on one line, or the name of its type if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


class SupportsArray(Protocol):
    """An object that numpy.asarray reads.

    It is an array, a tensor, or a column or table of Arrow, pandas or polars.
    """

    def __array__(self) -> np.ndarray: ...


Number: TypeAlias = float | np.number[Any]

VectorLike: TypeAlias = (
    SupportsArray
    | Sequence[SupportsArray | Sequence[Number]]
    | Vectors
    | Scannable
    | str
    | os.PathLike[str]
)
"""A numpy array, a torch tensor, a memory map, nested lists, a table column with one
vector per row, `Vectors`, a store with `scan()`, or the path of a .npy or .parquet
file; `file#name` selects one of several columns. An object of another package X, such
as a Faiss index, is accepted if `hubplugin_X.vectors_in(source, name)` reads it."""

OffsetsLike: TypeAlias = SupportsArray | Sequence[Number]
"""One number per target [n], in an array, a tensor or a list."""


def as_vectors(source: VectorLike, name: str = "vectors") -> Vectors:
    """Return `source` as `Vectors`, which check the values as they read blocks.

    Args:
        source: The object or the file that holds the vectors.
        name: The name used in error messages ("query bank", "targets").

    Raises:
        InputError: The source is empty, not a matrix, not numeric, an object array or
            a pickle (never unpickled), truncated, or of mixed dimensions.
    """
    if isinstance(source, Vectors):
        return source
    if isinstance(source, (str, os.PathLike)):
        return from_file(os.fspath(source), name)
    torch = sys.modules.get("torch")  # not None if `source` is a tensor
    if torch is not None and isinstance(source, torch.Tensor):
        dtype = source.dtype
        if not dtype.is_floating_point and "int" not in str(dtype):
            raise no_numbers(name, f"a tensor of {dtype}")
        return Sliceable(name, source.detach(), tuple(source.shape), numpy)
    if isinstance(source, Scannable):
        return to_tempfile((batch.vectors for batch in source.scan()), name)
    if np.ma.is_masked(source):
        raise InputError(
            f"{name} is a masked array with masked values; remove or fill those rows"
        )
    try:
        array = np.asarray(source)
    except Exception as error:  # a foreign object may raise anything
        raise InputError(
            f"{name}: {type(source).__name__} is not a matrix [rows, d]: "
            f"{one_line(error)}"
        ) from None
    # numpy puts an object that it cannot read into an array without dimensions.
    if array.dtype.kind == "O" and array.ndim == 0:
        return from_adapter(source, name)
    if array.dtype.kind == "O" and array.ndim == 1 and array.size:
        array = stack_rows(array, name)
    if array.dtype.kind in "UST":
        raise only_texts(name, "is made of texts")
    if array.dtype.kind not in "fiu":
        raise no_numbers(name, f"an array of {array.dtype}")
    return Sliceable(name, array, array.shape, np.asarray)


def from_adapter(source: Any, name: str) -> Vectors:
    """Return the vectors in an object of a package that has an adapter."""
    adapter = f"hubplugin_{type(source).__module__.partition('.')[0]}"
    reader = None
    if find_spec(adapter):
        reader = getattr(import_module(adapter), "vectors_in", None)
    if reader is None:
        raise InputError(f"{name}: {type(source).__name__} is not a matrix [rows, d]")
    return cast(Vectors, reader(source, name))


def stack_rows(column: np.ndarray, name: str) -> np.ndarray:
    """Return the vectors in an object array [n], one in each row, as a matrix [n, d]."""
    try:
        return np.stack([np.asarray(row) for row in column])
    except ValueError as error:
        raise InputError(
            f"{name} is an object array; expected a vector of the same length in "
            f"each row ({one_line(error)})"
        ) from None


def no_numbers(name: str, description: str) -> InputError:
    """Return the error for values that are not numbers."""
    return InputError(
        f"{name} is {description}; expected floats or integers in a matrix [rows, d]"
    )


def only_texts(name: str, problem: str) -> InputError:
    """Return the error for texts passed instead of vectors."""
    return InputError(
        f"{name} {problem}; embed texts with the model that embedded the gallery: "
        "pass it as ",
        Parameter("embed"),
        " for a query bank, or pass vectors",
    )


def numpy(tensor: Any) -> np.ndarray:
    """Convert a tensor to a numpy array of float32, or float64 if it has that type.

    numpy lacks bfloat16. float64 is kept, so that values too large for float32 are
    found.
    """
    plain = tensor if str(tensor.dtype) == "torch.float64" else tensor.float()
    array: np.ndarray = plain.cpu().numpy()
    return array


class _Parquet(Vectors):
    """A list column of a parquet file, read batch by batch."""

    def __init__(self, name: str, path: Path, column: str | None):
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise InputError(
                f"{name}: reading {path.name} needs pyarrow; {install('tables')}"
            ) from None
        try:
            self._file = pq.ParquetFile(path)
        except Exception as error:  # pyarrow has many errors for damaged files
            raise _not_parquet(name, error) from None
        schema = self._file.schema_arrow
        vector_columns = []
        for field in schema:
            values = getattr(field.type, "value_type", pa.null())
            if pa.types.is_floating(values) or pa.types.is_integer(values):
                vector_columns.append(field.name)
        if not vector_columns:
            raise only_texts(name, "has no column of vectors")
        if column is None and len(vector_columns) == 1:
            column = vector_columns[0]
        if column not in vector_columns:
            raise InputError(
                f"{name}: the columns of vectors are {', '.join(vector_columns)}; "
                f"select one with {path.name}#NAME"
            )
        self._column = column
        self.name = name  # for errors of `raw_blocks`
        first_row = next(self.raw_blocks(1), np.empty((0, 0)))
        super().__init__(name, self._file.metadata.num_rows, first_row.shape[1])

    def raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        batches = self._file.iter_batches(batch_size=size, columns=[self._column])
        while True:
            try:
                column = next(batches).column(0)
            except StopIteration:
                return
            except Exception as error:  # a damaged page
                raise _not_parquet(self.name, error) from None
            lengths = column.value_lengths().to_numpy(zero_copy_only=False)
            if column.null_count or len(np.unique(lengths)) > 1:
                raise InputError(
                    f"{self.name}: mixed dimensions: rows of column {self._column!r} "
                    "have different lengths or are null; every row must hold one vector "
                    "of the same length"
                )
            values = column.flatten().to_numpy(zero_copy_only=False)
            yield values.reshape(len(column), -1)


def _not_parquet(name: str, error: Exception) -> InputError:
    """Return the error for a file that pyarrow cannot read."""
    return InputError(f"{name}: cannot be read as .parquet: {one_line(error)}")


def require_file(path: Path, name: str, expected: str = "a file") -> None:
    """Raise InputError about `name` if `path` is not a file, as `expected`."""
    if os.path.isdir(path):
        raise InputError(f"{name}: {str(path)!r} is a folder; expected {expected}")
    if not os.path.isfile(path):
        raise InputError(f"{name}: there is no file {str(path)[-200:]!r}")


def from_file(text: str, name: str) -> Vectors:
    """Return the vectors in a .npy or .parquet file.

    Args:
        text: PATH or, to select one of the file's columns, PATH#COLUMN.
        name: The name used in error messages.

    Raises:
        InputError: The file or the column does not exist or cannot be read, or `text`
            is a URL.
    """
    path = Path(text)
    column = None
    if "#" in text and not os.path.exists(path):
        head, _, column = text.rpartition("#")
        path = Path(head)
    if not os.path.exists(path) and (url := re.match(r"[a-z][a-z0-9+-]+:", text)):
        # The rest of the URL may hold a password.
        raise InputError(
            f"{name}: there is no file '{url[0]}...'; "
            "open a store with hubplugin.open_store(URL)"
        )
    require_file(path, name, "a file, .npy or .parquet")
    name = f"{name} ({path.name})"
    if path.suffix == ".npy":
        return as_vectors(open_npy(path, name), name)
    if path.suffix == ".parquet":
        return _Parquet(name, path, column)
    raise InputError(
        f"{name}: unknown kind of file {path.suffix!r}; expected one of .npy, .parquet; "
        "for a file of texts name the model, ",
        Parameter("embed"),
    )


def open_npy(path: Path, name: str) -> np.ndarray:
    """Return the array in the .npy file `path` as a memory map.

    Raises InputError about `name` for other files, and for pickled objects, which are
    never loaded.
    """
    require_file(path, name)
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name}: cannot be read as .npy: {one_line(error)}; "
            "write numbers with numpy.save"
        ) from None
