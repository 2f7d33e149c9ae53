"""Files of vectors: .npy, .npz, .safetensors and .parquet."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hubplugin.errors import InputError
from hubplugin.vectors.arrays import from_array, numpy, only_texts
from hubplugin.vectors.base import Sliceable, Vectors, one_line

EXPANSION, ALWAYS = 100, 64 << 20
"""A compressed file may unpack to `EXPANSION` times its size: where components have two values, of a bit each, as
float64 they take 64 times that. `ALWAYS` bytes are unpacked whatever the size: they do no harm."""

TEXTS = (".csv", ".json", ".jsonl", ".md", ".tsv", ".txt")
"""What banks of texts are kept in."""


class _Parquet(Vectors):
    """A list column of a parquet file, read batch by batch."""

    def __init__(self, name: str, path: Path, column: str | None):
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise InputError(f"{name}: reading {path.name} needs pyarrow: pip install 'hubplugin[parquet]'") from None
        self.name, self._file, self._errors = name, pq.ParquetFile(path), (pa.ArrowException, OSError)
        types = {field.name: field.type for field in self._file.schema_arrow}
        kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        lists = [column for column, of in types.items() if any(kind(of) for kind in kinds)]
        texts = [column for column, of in types.items() if pa.types.is_string(of) or pa.types.is_large_string(of)]
        if texts and not lists:
            raise only_texts(name, f"has texts in {', '.join(texts)} and no vectors")
        self._column = _choose(name, path, column, lists, "list columns")
        values = types[self._column].value_type
        if not (pa.types.is_floating(values) or pa.types.is_integer(values)):
            raise InputError(f"{name}: column {self._column!r} has lists of {values}; expected floats or integers")
        _require_plausible(name, path, self._unpacked_bytes(values.bit_width // 8))
        first = next(self._raw_batches(1), np.empty((0, 0)))
        super().__init__(name, self._file.metadata.num_rows, first.shape[1])

    def _unpacked_bytes(self, width: int) -> int:
        """What the file says that its column holds, `width` bytes a value."""
        metadata, total = self._file.metadata, 0
        for group in range(metadata.num_row_groups):
            columns = (metadata.row_group(group).column(number) for number in range(metadata.num_columns))
            total += sum(each.num_values for each in columns if each.path_in_schema.split(".")[0] == self._column)
        return int(total * width)

    def _raw_batches(self, size: int) -> Iterator[np.ndarray]:
        batches = self._file.iter_batches(batch_size=size, columns=[self._column])
        while True:
            try:
                column = next(batches).column(0)
            except StopIteration:
                return
            except self._errors as error:
                raise InputError(f"{self.name}: damaged .parquet file: {one_line(error)}") from None
            lengths = column.value_lengths().to_numpy(zero_copy_only=False)
            if column.null_count or len(np.unique(lengths)) > 1:
                raise InputError(
                    f"{self.name}: mixed dimensions: rows of column {self._column!r} "
                    "have different lengths or are null; every row must hold one vector of the same length"
                )
            values = column.flatten().to_numpy(zero_copy_only=False)
            yield values.reshape(len(column), -1)

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        return self._raw_batches(size)


def _require_plausible(name: str, path: Path, unpacked: int) -> None:
    """Raises InputError for a small file that would fill memory or disk: `unpacked` is what it claims, in bytes."""
    size = path.stat().st_size
    if unpacked > max(ALWAYS, EXPANSION * size):
        raise InputError(
            f"{name} has {size:,} bytes and would unpack to {unpacked:,}, more than {EXPANSION} times as many; "
            "if that is right, load it yourself and pass the array"
        )


def from_file(text: str, name: str) -> Vectors:
    path, part = Path(text), None
    try:
        if not path.exists() and "#" in text:
            head, _, part = text.rpartition("#")
            path = Path(head)
        found = path.is_file()
    except OSError as error:
        raise InputError(f"{name}: {text[:80]!r} cannot be opened: {error.strerror}") from None
    if path.is_dir():
        raise InputError(f"{name}: {str(path)!r} is a folder; expected a file, {', '.join(READERS)}")
    if not found:
        url = re.match(r"([a-z][a-z+-]+):", text)
        if url:  # what stands behind the scheme may hold a password
            raise InputError(f"{name}: there is no file '{url[0]}...'; a store is opened by hubplugin.open_store(URL)")
        raise InputError(f"{name}: there is no file {str(path)!r}")
    name = f"{name} ({path.name})"
    if path.suffix in TEXTS:
        kinds = ", ".join(READERS)
        raise only_texts(name, f"is a text file, and vectors are read from {kinds}")
    if path.suffix not in READERS:
        raise InputError(f"{name}: unknown kind of file {path.suffix!r}; expected one of {', '.join(READERS)}")
    try:
        return READERS[path.suffix](name, path, part)
    except InputError:
        raise
    except Exception as error:  # each reader has its own errors for a file that it cannot make out
        raise InputError(f"{name}: damaged or truncated {path.suffix} file: {one_line(error)}") from error


def _from_npy(name: str, path: Path, part: str | None) -> Vectors:
    with path.open("rb") as file:
        start = file.read(len(np.lib.format.MAGIC_PREFIX))
    if start != np.lib.format.MAGIC_PREFIX:
        kind = "text" if start.isascii() and start.decode().isprintable() else "something else"
        raise InputError(
            f"{name} is no .npy file: it holds {kind}; write it with numpy.save"
            if start
            else f"{name} is an empty file"
        )
    try:
        return from_array(np.lib.format.open_memmap(path, mode="r"), name)
    except ValueError as error:
        if "Python objects" in str(error):
            raise InputError(
                f"{name} holds pickled objects, which are never loaded; expected numbers in a matrix [rows, d]"
            ) from None
        raise


def _from_npz(name: str, path: Path, part: str | None) -> Vectors:
    # Unpacked to a temporary file, so that it is read in blocks and the zip's checksum is verified.
    with zipfile.ZipFile(path) as archive:
        members = [member.removesuffix(".npy") for member in archive.namelist() if member.endswith(".npy")]
        member = _choose(name, path, part, members, "arrays")
        unpacked = archive.getinfo(member + ".npy").file_size
        _require_plausible(name, path, unpacked)
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if unpacked > free:
            raise InputError(
                f"{name} unpacks to {unpacked:,} bytes, and {tempfile.gettempdir()!r} has room for {free:,}; "
                "set TMPDIR to a folder with room"
            )
        folder = Path(tempfile.mkdtemp(prefix="hubplugin-"))
        try:
            with archive.open(member + ".npy") as packed, (folder / "array.npy").open("wb") as plain:
                shutil.copyfileobj(packed, plain)
            vectors = _from_npy(name, folder / "array.npy", None)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # what is mapped stays readable, and a kill leaves nothing
    weakref.finalize(vectors, shutil.rmtree, folder, ignore_errors=True)  # where a mapped file cannot be removed
    return vectors


def _from_safetensors(name: str, path: Path, part: str | None) -> Vectors:
    from safetensors import safe_open

    file = safe_open(path, framework="pt")  # torch reads every dtype, bfloat16 among them
    tensor = file.get_slice(_choose(name, path, part, list(file.keys()), "tensors"))
    if tensor.get_dtype() in ("BOOL", "C64"):
        raise InputError(f"{name} is of type {tensor.get_dtype()}; expected floats or integers in a matrix [rows, d]")
    return Sliceable(name, tensor, tuple(tensor.get_shape()), numpy)


READERS: dict[str, Callable[[str, Path, str | None], Vectors]] = {
    ".npy": _from_npy,
    ".npz": _from_npz,
    ".safetensors": _from_safetensors,
    ".parquet": _Parquet,
}


def _choose(name: str, path: Path, part: str | None, found: list[str], what: str) -> str:
    if part is None and len(found) == 1:
        return found[0]
    if part in found:
        return part
    listed = ", ".join(found) or "none"
    wanted = f"no {what[:-1]} {part!r}" if part else "several to choose from" if found else f"no {what}"
    raise InputError(f"{name}: {wanted}; {what} in it: {listed}; name one as {path.name}#NAME")
