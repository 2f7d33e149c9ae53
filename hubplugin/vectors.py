"""Vectors from anywhere (arrays, tensors, tables, files, stores), in checked blocks.

`as_vectors` is the only reader of what a user passes as vectors.
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
"""Called as progress(what, done, total) during long work; total is 0 if unknown."""

BLOCK_ROWS = 16_384


@runtime_checkable
class Scannable(Protocol):
    """A store: it yields batches with `.vectors` [b, d], every vector once."""

    def scan(self) -> Iterator[Any]: ...


class Vectors(ABC):
    """A readable set of vectors, `rows` x `dim`, read in blocks and as often as needed.

    name: What errors call it.
    """

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
        """Yield blocks [b, dim] in order, b <= size, of any numeric type."""

    def shaped_blocks(self, size: int) -> Iterator[np.ndarray]:
        """Yield `raw_blocks`. Raises InputError if their shapes do not make up this."""
        row = 0
        for raw in self.raw_blocks(size):
            row += len(raw)
            if raw.ndim != 2 or raw.shape[1] != self.dim:
                raise InputError(
                    f"{self.name}: mixed dimensions: expected {self.dim}, "
                    f"found shape {raw.shape}"
                )
            if row > self.rows:
                break
            yield raw
        if row != self.rows:
            raise InputError(
                f"{self.name}: expected {self.rows} rows, read {row}; the source changed "
                "while being read"
            )

    def blocks(self, size: int = BLOCK_ROWS) -> Iterator[np.ndarray]:
        """Yield blocks [b, dim], b <= size, float32, C order, finite.

        Raises InputError for the first row that is not finite, and if the source
        changed.
        """
        row = 0
        for raw in self.shaped_blocks(size):
            yield self._check(raw, range(row, row + len(raw)))
            row += len(raw)

    def select(self, rows: np.ndarray) -> np.ndarray:
        """Return the vectors of `rows`, which ascend: float32 [len(rows), dim].

        One pass, which keeps and checks these alone.
        """
        parts = []
        start = 0
        for raw in self.shaped_blocks(BLOCK_ROWS):
            inside = rows[(rows >= start) & (rows < start + len(raw))]
            parts.append(self._check(raw[inside - start], inside))
            start += len(raw)
        return np.concatenate(parts)

    def _check(self, raw: np.ndarray, numbers: range | np.ndarray) -> np.ndarray:
        """Return rows as `blocks` gives them; errors call them by their `numbers`."""
        with np.errstate(over="ignore"):
            block = np.ascontiguousarray(raw, dtype=np.float32)
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            raise InputError(
                f"{self.name}: row {numbers[int(np.argmin(finite))]} holds a value that "
                "is NaN, infinity or too large for float32; remove or repair it"
            )
        return block

    def array(self) -> np.ndarray:
        """Return all rows at once, for banks: float32 [rows, dim]."""
        return np.concatenate(list(self.blocks()))

    def for_source(self, values: np.ndarray) -> np.ndarray:
        """Return `values` [rows] for all rows of the source, 0 for those left out."""
        return values


class Sliceable(Vectors):
    """Anything that answers source[a:b]: an array, a memory map or a tensor."""

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
                "[rows, d], one vector a row"
            )
        super().__init__(name, *map(int, shape))
        self._source = source
        self._to_numpy = to_numpy

    def raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        for start in range(0, self.rows, size):
            yield self.take(slice(start, start + size))

    def take(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return a slice of the rows, or rows by number, unchecked."""
        return self._to_numpy(self._source[rows])

    def select(self, rows: np.ndarray) -> np.ndarray:
        return self._check(self.take(rows), rows)  # without reading the others


class Directed(Vectors):
    """The rows `numbers` of `source`: those that are no zero vectors."""

    def __init__(self, source: Vectors, numbers: np.ndarray):
        if not len(numbers):
            raise EmptyInput(
                f"{source.name}: all {source.rows} rows are zero vectors, which have no "
                "cosine similarity"
            )
        super().__init__(source.name, len(numbers), source.dim)
        self._source = source
        self.numbers = numbers

    @staticmethod
    def of(vectors: Vectors, metric: Metric) -> Vectors:
        """Return `vectors` without zero vectors if the `metric` is cosine."""
        if metric is not Metric.COSINE or isinstance(vectors, Directed):
            return vectors
        has_direction = np.concatenate(
            [block.any(axis=1) for block in vectors.blocks()]
        )
        if has_direction.all():
            return vectors
        return Directed(vectors, np.flatnonzero(has_direction))

    @property
    def left_out(self) -> int:
        """The number of zero vectors."""
        return self._source.rows - self.rows

    def raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        start = 0
        for raw in self._source.raw_blocks(size):
            first, last = np.searchsorted(self.numbers, (start, start + len(raw)))
            if last > first:
                yield raw[self.numbers[first:last] - start]
            start += len(raw)

    def select(self, rows: np.ndarray) -> np.ndarray:
        return self._source.select(self.numbers[rows])

    def for_source(self, values: np.ndarray) -> np.ndarray:
        whole = np.zeros(self._source.rows, values.dtype)
        whole[self.numbers] = values
        return whole


def original_rows(vectors: Vectors) -> np.ndarray:
    """Return the row of each vector in the source, with its zero vectors: int [n]."""
    return vectors.numbers if isinstance(vectors, Directed) else np.arange(vectors.rows)


def locate_rows(vectors: Vectors, rows: np.ndarray) -> np.ndarray:
    """Return the places in `vectors` of `rows` of its source: int [n].

    -1 for zero vectors, which `vectors` may lack, and for -1.
    """
    if not isinstance(vectors, Directed):
        return rows
    place = np.minimum(np.searchsorted(vectors.numbers, rows), vectors.rows - 1)
    return np.where(vectors.numbers[place] == rows, place, -1)


def prepare_blocks(
    vectors: Vectors, metric: Metric, size: int = BLOCK_ROWS
) -> Iterator[np.ndarray]:
    """Yield checked blocks of at most `size` rows, of unit length by cosine."""
    row = 0
    for block in vectors.blocks(size):
        if metric is Metric.COSINE:
            numbers = range(row, row + len(block))
            block = normalise(block, vectors.name, numbers)
        yield block
        row += len(block)


def prepare(vectors: Vectors, metric: Metric) -> np.ndarray:
    """Return a bank checked, at unit length if the metric is cosine: float32 [m, d]."""
    return np.concatenate(list(prepare_blocks(vectors, metric)))


def draw_sample(
    vectors: Vectors, count: int, metric: Metric, rng: np.random.Generator
) -> np.ndarray:
    """Draw rows at random, in order, but for zero vectors if the metric is cosine.

    Args:
        vectors: [n, d].
        count: How many at most.
        metric: Says how they are prepared.
        rng: Draws.

    Returns:
        float32 [min(count, n), d].
    """
    rows = vectors.select(np.sort(rng.permutation(vectors.rows)[:count]))
    if metric is Metric.COSINE:
        rows = normalise(rows[rows.any(axis=1)], vectors.name)
    return rows


def take_rows(vectors: Vectors, rows: np.ndarray, metric: Metric) -> np.ndarray:
    """Return the vectors of `rows`, which ascend, prepared: float32 [len(rows), d].

    The others are not read if the source can be read row by row.
    """
    block = vectors.select(rows)
    return normalise(block, vectors.name, rows) if metric is Metric.COSINE else block


def to_tempfile(
    blocks: Iterable[np.ndarray], name: str, expected: int = 0
) -> Sliceable:
    """Keep blocks that can be read only once in a temporary file.

    The file has no name and goes with the returned object, or with the process. Memory
    holds one block whatever the number of rows.

    Args:
        blocks: [b, d] each.
        name: What errors call them.
        expected: About how many rows there are.

    Raises:
        InputError: There are no blocks, they differ in dimensions, or the disk is full.
    """
    rows = dim = 0
    # Closing it would flush again what a full disk has refused.
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
    file.close()  # the map keeps what it maps
    return Sliceable(name, mapped, mapped.shape, np.asarray)


def cannot_keep(name: str, error: OSError, needed: int) -> InputError:
    """Return the error for a disk that refuses `needed` bytes of a temporary file."""
    folder = tempfile.gettempdir()
    return InputError(
        f"{name}: cannot be kept in {folder!r}: {error.strerror or error}; at least "
        f"{needed:,} bytes are needed and {shutil.disk_usage(folder).free:,} are free; "
        "set TMPDIR to a folder with room"
    )


def fingerprint(*arrays: np.ndarray | None) -> str:
    """Return a short name for the content of arrays: 16 hex digits of their SHA-256."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(repr((array.shape, array.dtype.str)).encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class SupportsArray(Protocol):
    """Anything that numpy.asarray reads.

    An array, a tensor, a column or a table of Arrow, pandas or polars.
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
"""numpy array, torch tensor, memory map, nested lists, a table's column with one vector
a row, `Vectors`, a store with `scan()`, or a path (.npy, or .parquet, of which
`file#name` names one column of several). And what belongs to a package X, such
as a Faiss index, if `hubplugin_X.vectors_in(source, name)` reads it."""

OffsetsLike: TypeAlias = SupportsArray | Sequence[Number]
"""One number a target [n], in an array, a tensor or a list."""


def as_vectors(source: VectorLike, name: str = "vectors") -> Vectors:
    """Return `source` as checked `Vectors`; values are checked as blocks are read.

    Args:
        source: What holds vectors.
        name: What errors call it ("query bank", "targets").

    Raises:
        InputError: It is empty, no matrix, not numeric, an object array or pickle
            (never unpickled), truncated, or of mixed dimensions.
    """
    if isinstance(source, Vectors):
        return source
    if isinstance(source, (str, os.PathLike)):
        return from_file(os.fspath(source), name)
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and isinstance(source, torch.Tensor):
        dtype = source.dtype
        if not dtype.is_floating_point and "int" not in str(dtype):
            raise no_numbers(name, f"a tensor of {dtype}")
        return Sliceable(name, source.detach(), tuple(source.shape), numpy)
    if isinstance(source, Scannable):
        return to_tempfile((batch.vectors for batch in source.scan()), name)
    if np.ma.is_masked(source):
        raise InputError(
            f"{name} is a masked array with values that are masked; remove those rows or "
            "fill them"
        )
    try:
        array = np.asarray(source)
    except Exception as error:  # whatever the conversion of a foreign object raises
        raise InputError(
            f"{name}: {type(source).__name__} is no matrix [rows, d]: {one_line(error)}"
        ) from None
    if array.ndim == 0 and array.dtype.kind == "O":
        return from_adapter(source, name)
    return from_array(array, name)


def from_adapter(source: Any, name: str) -> Vectors:
    """Return the vectors in an object of a package that an adapter knows."""
    adapter = f"hubplugin_{type(source).__module__.partition('.')[0]}"
    reader = None
    if find_spec(adapter):
        reader = getattr(import_module(adapter), "vectors_in", None)
    if reader is None:
        raise InputError(f"{name}: {type(source).__name__} is no matrix [rows, d]")
    return cast(Vectors, reader(source, name))


def from_array(array: np.ndarray, name: str) -> Vectors:
    """Return the vectors in a matrix, or in a column with one vector a row."""
    if array.dtype.kind == "O" and array.ndim == 1 and array.size:
        try:
            array = np.stack([np.asarray(row) for row in array])
        except ValueError as error:
            raise InputError(
                f"{name} is an object array; expected a vector of the same length in "
                f"each row ({one_line(error)})"
            ) from None
    if array.dtype.kind in "UST":
        raise only_texts(name, "is made of texts")
    if array.dtype.kind not in "fiu":
        raise no_numbers(name, f"an array of {array.dtype}")
    return Sliceable(name, array, array.shape, np.asarray)


def no_numbers(name: str, what: str) -> InputError:
    """Return the error for values of another type."""
    return InputError(
        f"{name} is {what}; expected floats or integers in a matrix [rows, d]"
    )


def only_texts(name: str, problem: str) -> InputError:
    """Return the error for texts in the place of vectors."""
    return InputError(
        f"{name} {problem}; embed texts with the model that embedded the gallery: "
        "pass it as ",
        Parameter("embed"),
        " for a query bank, or pass vectors",
    )


def numpy(tensor: Any) -> np.ndarray:
    """Return a tensor as numpy's, which knows no bfloat16.

    A double stays one, so that what float32 cannot hold is seen.
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
        except Exception as error:  # whatever pyarrow makes of a damaged file
            raise _not_parquet(name, error) from None
        schema = self._file.schema_arrow
        lists = []
        for field in schema:
            values = getattr(field.type, "value_type", pa.null())
            if pa.types.is_floating(values) or pa.types.is_integer(values):
                lists.append(field.name)
        if not lists:
            raise only_texts(name, "has no column of vectors")
        if column is None and len(lists) == 1:
            column = lists[0]
        if column not in lists:
            raise InputError(
                f"{name}: the columns of vectors are {', '.join(lists)}; name one as "
                f"{path.name}#NAME"
            )
        self._column = column
        self.name = name
        first = next(self.raw_blocks(1), np.empty((0, 0)))
        super().__init__(name, self._file.metadata.num_rows, first.shape[1])

    def raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        batches = self._file.iter_batches(batch_size=size, columns=[self._column])
        while True:
            try:
                column = next(batches).column(0)
            except StopIteration:
                return
            except Exception as error:  # as above
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
    return InputError(f"{name}: cannot be read as .parquet: {one_line(error)}")


def require_file(path: Path, name: str, expected: str = "a file") -> None:
    """Raise InputError if the path of `name` is no file; it says what was `expected`."""
    if os.path.isdir(path):
        raise InputError(f"{name}: {str(path)!r} is a folder; expected {expected}")
    if not os.path.isfile(path):
        raise InputError(f"{name}: there is no file {str(path)[-200:]!r}")


def from_file(text: str, name: str) -> Vectors:
    """Return the vectors in a file, which its suffix says how to read.

    Args:
        text: PATH or, for one of the columns in the file, PATH#COLUMN.
        name: What errors call the vectors.

    Raises:
        InputError: There is no such file or column, it cannot be read, or `text` is a URL.
    """
    path = Path(text)
    column = None
    if "#" in text and not os.path.exists(path):
        head, _, column = text.rpartition("#")
        path = Path(head)
    if not os.path.exists(path) and (url := re.match(r"[a-z][a-z0-9+-]+:", text)):
        # What stands behind the scheme may hold a password.
        raise InputError(
            f"{name}: there is no file '{url[0]}...'; "
            "a store is opened by hubplugin.open_store(URL)"
        )
    require_file(path, name, "a file, .npy or .parquet")
    name = f"{name} ({path.name})"
    if path.suffix == ".npy":
        return from_array(open_npy(path, name), name)
    if path.suffix == ".parquet":
        return _Parquet(name, path, column)
    raise InputError(
        f"{name}: unknown kind of file {path.suffix!r}; expected one of .npy, .parquet; "
        "for a file of texts name the model, ",
        Parameter("embed"),
    )


def open_npy(path: Path, name: str) -> np.ndarray:
    """Return the array in the .npy file `path`, mapped.

    Raises InputError, which calls it `name`, for other files and for pickled objects,
    which are never loaded.
    """
    require_file(path, name)
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name}: cannot be read as .npy: {one_line(error)}; "
            "write numbers with numpy.save"
        ) from None
