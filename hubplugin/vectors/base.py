"""What a readable set of vectors is, whatever holds it."""

from __future__ import annotations

import hashlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from hubplugin.errors import EmptyInput, InputError

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as progress(what, done, total) while long work goes on; total is 0 where it is not known."""

BLOCK_ROWS = 16_384


@runtime_checkable
class Scannable(Protocol):
    """A store: something that yields batches with `.vectors` [b, d], every vector once."""

    def scan(self) -> Iterator[Any]: ...


class Vectors(ABC):
    """A readable set of vectors: `rows` x `dim`, read in blocks and as often as needed.

    key: the run and the shard that they are, for who keeps something of them from one task to the next."""

    key: tuple[str, str] | None = None

    def __init__(self, name: str, rows: int, dim: int):
        if rows == 0 or dim == 0:
            raise EmptyInput(f"{name} is empty: shape is [{rows}, {dim}]; at least one vector is needed")
        self.name, self.rows, self.dim = name, rows, dim

    @abstractmethod
    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        """Blocks [b, dim] in order, of any numeric dtype, b <= size."""

    def blocks(self, size: int = BLOCK_ROWS) -> Iterator[np.ndarray]:
        """Blocks [b, dim], b <= size, float32, C order, finite.

        Raises InputError with the first row that is not finite, or if the source changed its shape.
        """
        row = 0
        for raw in self._raw_blocks(size):
            yield self._checked(raw, range(row, row + len(raw)))
            row += len(raw)
        if row != self.rows:
            raise InputError(f"{self.name}: expected {self.rows} rows, read {row}; the source changed while being read")

    def some(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of some `rows`, which ascend, as `blocks` gives them: float32 [len(rows), dim]. One pass, of
        which only these are kept and checked."""
        parts, start = [], 0
        for raw in self._raw_blocks(BLOCK_ROWS):
            inside = rows[(rows >= start) & (rows < start + len(raw))]
            parts.append(self._checked(raw[inside - start], inside))
            start += len(raw)
        return np.concatenate(parts)

    def _checked(self, raw: np.ndarray, numbers: range | np.ndarray) -> np.ndarray:
        """Rows as `blocks` gives them; `numbers` is what errors call them."""
        if raw.ndim != 2 or raw.shape[1] != self.dim:
            raise InputError(f"{self.name}: mixed dimensions: expected {self.dim}, found shape {raw.shape}")
        with np.errstate(over="ignore"):
            block = np.ascontiguousarray(raw, dtype=np.float32)
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            bad = int(np.argmin(finite))
            reason = "too large for float32" if np.isfinite(raw[bad]).all() else "NaN or infinity"
            raise InputError(f"{self.name}: row {numbers[bad]} holds a value that is {reason}; remove or repair it")
        return block

    def fingerprint(self) -> str:
        """Names the content as it is now, to the last bit: read once and hashed, nothing is held."""
        digest = hashlib.sha256(repr((self.rows, self.dim)).encode())
        for raw in self._raw_blocks(BLOCK_ROWS):
            digest.update(raw.dtype.str.encode())
            digest.update(np.ascontiguousarray(raw).data)
        return digest.hexdigest()

    def array(self) -> np.ndarray:
        """All rows at once: float32 [rows, dim]. For banks; a gallery is read in blocks."""
        return np.concatenate(list(self.blocks()))


class Sliceable(Vectors):
    """An array, memory map, tensor or safetensors slice: anything that answers source[a:b]."""

    def __init__(self, name: str, source: Any, shape: tuple[int, ...], to_numpy: Callable[[Any], np.ndarray]):
        if len(shape) != 2:
            raise InputError(
                f"{name} has {len(shape)} dimension(s), shape {tuple(shape)}; expected [rows, d], one vector a row"
            )
        super().__init__(name, int(shape[0]), int(shape[1]))
        self._source, self._to_numpy = source, to_numpy

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        for start in range(0, self.rows, size):
            yield self.take(slice(start, start + size))

    def take(self, rows: slice | np.ndarray) -> np.ndarray:
        """Some rows, as they lie there: a slice of them, or those of some numbers."""
        return self._to_numpy(self._source[rows])

    def some(self, rows: np.ndarray) -> np.ndarray:
        return self._checked(self.take(rows), rows)  # without reading the others


class Spread(Vectors):
    """Vectors in shards that other machines read: work goes to them. What has to be read here comes shard by shard."""

    @abstractmethod
    def each(self, task: Any, similarities: Any) -> list[tuple[int, dict[str, np.ndarray]]]:
        """What `task` (`hubplugin.reductions.Task`) finds in each shard beside the bank of `similarities`, with the
        number of the shard's first row, in the order of the shards."""


def spool(blocks: Iterable[np.ndarray], name: str) -> Sliceable:
    """Blocks that can be read only once, kept in a temporary file that is read as often as needed.

    The file has no name and goes with the returned object, or with the process; memory holds one block whatever the
    number of rows. Raises InputError where there are no blocks, they differ in dimensions, or the disk is full.
    """
    rows = dim = 0
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closing it would flush again what a full disk has refused
    for block in blocks:
        if block.ndim != 2 or (dim and block.shape[1] != dim):
            raise InputError(f"{name}: mixed dimensions: expected [rows, {dim}], found shape {block.shape}")
        rows, dim = rows + block.shape[0], block.shape[1]
        try:
            file.write(np.ascontiguousarray(block, dtype=np.float32).tobytes())
            file.flush()
        except OSError as error:
            raise InputError(
                f"{name}: cannot be kept in {tempfile.gettempdir()!r}: {error.strerror}; "
                "set TMPDIR to a folder with room"
            ) from None
    if not rows:
        raise EmptyInput(f"{name} is empty: no vectors were found; at least one is needed")
    mapped = np.memmap(file, np.float32, "r", shape=(rows, dim))
    file.close()  # the map keeps what it maps
    return Sliceable(name, mapped, mapped.shape, np.asarray)


def fingerprint(*arrays: np.ndarray | None) -> str:
    """A short name for the content of some arrays: the first 16 hex digits of their SHA-256."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(repr((array.shape, array.dtype.str)).encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
