"""Index files: read, upgraded and replaced so that a kill at any moment leaves the old or the new one whole.

Beside `photos.faiss` lies its model, `photos.faiss.hub`. Whatever is being written has the suffix `.new` until it is
whole and checked; then the index takes its place in one step, and the model follows. A kill between the two leaves
the model under its `.new` name, where it is found by the mark in the index. Inverted lists on disk are files of their
own: `photos.faiss.lists` names those that are being written and those that they replace, and `sweep` removes the ones
that the index does not use.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import faiss
import numpy as np

from hubplugin.errors import ModelFileError, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, load
from hubplugin.vectors import Progress, VectorLike, Vectors
from hubplugin_faiss.calibration import loss_of_recall
from hubplugin_faiss.encoding.layout import Body, Fill
from hubplugin_faiss.handlers.base import reason, rule_for
from hubplugin_faiss.handlers.inverted_lists import free_name, in_memory
from hubplugin_faiss.index import (
    Gallery,
    carries_mark_of,
    checked_originals,
    offsets_by,
    plan_for,
    require_upgradable,
    require_upgraded,
    upgraded_by,
    warn_of_loss,
)
from hubplugin_faiss.search_settings import holds_graph

try:
    import fcntl
except ImportError:  # where there is none, nobody is kept away
    fcntl = None  # type: ignore[assignment]

PROBES = 16
"""A file that was written is read back and searched with this many of its own vectors before it takes its place."""

HALF = 2.0**-10
"""What a second stage of 16 bits may change in a vector, relative to its largest component."""

_HELD: set[str] = set()

PAGES_KEPT = 256 << 20
"""The pages of a mapped file are given back each time that about this much of it has been read."""


def upgrade_file(
    path: str | os.PathLike[str],
    model: OffsetModel,
    out: str | os.PathLike[str] | None = None,
    *,
    vectors: VectorLike | None = None,
    rebuild: bool | None = None,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> None:
    """Upgrades the index in the file `path` in place, or to the file `out`, and lays `model` beside it as `.hub`.

    An index that is already upgraded gets the offsets of `model` instead of its own. The new file is written beside,
    flushed, read back and searched before it takes the place of the old one; a kill at any moment leaves one of the
    two whole, and running this again finishes. Codes in a row or in inverted lists go from the mapped old file to the
    new one piece by piece, and offsets lie in a file meanwhile, so that memory does not grow with the size. vectors:
    the originals, rebuild: whether graphs are built anew, both as in `upgrade`.

    Raises StoreError or InputError as `upgrade` does, and StoreError for a file that Faiss cannot read.
    """
    with writing(path), writing(path if out is None else out):
        _upgrade_file(Path(path), model, path if out is None else out, vectors, rebuild, device, memory, progress)


def _upgrade_file(
    path: Path,
    model: OffsetModel,
    target: str | os.PathLike[str],
    vectors: VectorLike | None,
    rebuild: bool | None,
    device: str,
    memory: int | str,
    progress: Progress | None,
) -> None:
    source, raw, spool = path, beside(target, ".raw"), beside(target, ".spool")
    try:
        index = original = read_faiss(source, mapped=True)
        again = rule_for(index).is_upgraded()
        if again:
            if vectors is None and rule_for(index).coarse:
                vectors = Gallery(index)
            note_lists(target, [*map(free_name, rule_for(index).files())])
            _write(raw, rule_for(index).downgraded, [source], progress)
            index, source = read_faiss(raw, mapped=True), raw
        require_upgradable(rule_for(index))
        gallery = MappedGallery([source, spool], index, unit=model.metric is Metric.COSINE)
        originals, room = checked_originals(vectors, rule_for(index)), _spooled(spool, gallery.rows)
        offsets = offsets_by(model, index, gallery, originals, device, memory, progress, room, tolerant=again)
        obsolete = rule_for(original).files() if path == Path(target) else []
        put(target, index, offsets, model, [source, spool], obsolete, progress, originals, rebuild)
    finally:
        for name in (raw, spool):
            name.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(path: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the file `path`, if there is one, until it is left or the process ends, so that no two processes write
    beside it at once. Raises StoreError if another one holds it. In one process it may be entered again."""
    name = os.path.realpath(path)
    if fcntl is None or name in _HELD or not os.path.isfile(name):
        yield
        return
    while True:
        with open(name, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreError(
                    f"{os.fspath(path)!r} is being written by another process; nothing was changed: wait until it ends"
                ) from None
            if os.path.exists(name) and not os.path.samestat(os.fstat(file.fileno()), os.stat(name)):
                continue  # it was replaced before it could be held
            _HELD.add(name)
            try:
                yield
            finally:
                _HELD.discard(name)
            return


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the file `path` as `alone` does; lists that it does not use, left behind by this or an earlier process, are
    removed."""
    with alone(path):
        sweep(path)
        try:
            yield
        finally:
            sweep(path)


def note_lists(path: str | os.PathLike[str], names: Sequence[str]) -> None:
    """Notes that the lists files `names` beside the index file `path` may soon be used by it, or no longer."""
    if not names:
        return
    with beside(path, ".lists").open("a") as journal:
        journal.writelines(json.dumps(os.path.realpath(name)) + "\n" for name in names)
        journal.flush()
        os.fsync(journal.fileno())


def sweep(path: str | os.PathLike[str]) -> None:
    """Removes the noted lists files that the index in the file `path` does not use."""
    journal, used = beside(path, ".lists"), set()
    if not journal.exists():
        return
    if Path(path).exists():
        try:
            used = {os.path.realpath(name) for name in rule_for(read_faiss(path, mapped=True)).files()}
        except StoreError:
            return  # an index that cannot be read may use any of them
    for line in journal.read_text().splitlines():
        with contextlib.suppress(ValueError):  # a kill may cut off the last line, whose file was not yet made
            name = json.loads(line)
            if name not in used:
                Path(name).unlink(missing_ok=True)
    journal.unlink()


def read_index(path: str | os.PathLike[str]) -> tuple[Any, OffsetModel | None]:
    """The index in the file `path`, and the model that its offsets are from (None if they came from no model, or
    the index is not upgraded).

    Raises StoreError for a file that Faiss cannot read, or whose model is missing or is another one.
    """
    index = read_faiss(path)
    return index, model_of(path, index)


def model_of(path: str | os.PathLike[str], index: Any) -> OffsetModel | None:
    """The model beside the file `path` that holds `index`; see `read_index`."""
    rule = rule_for(index)
    if not rule.is_upgraded() or carries_mark_of(rule, ""):
        return None
    model_path = beside(path, ".hub")
    found = [candidate for candidate in (model_path, beside(model_path, ".new")) if candidate.exists()]
    damaged = None
    for candidate in found:
        try:
            model = load(candidate)
        except ModelFileError as error:
            damaged = error
            continue
        if carries_mark_of(rule, model.fingerprint):
            return model
    if damaged is not None:
        raise StoreError(str(damaged))
    what = f"{model_path.name} is the model of another index" if found else f"its model {model_path.name} is missing"
    raise StoreError(f"{os.fspath(path)} is upgraded, but {what}; put the right one beside it, or downgrade the index")


def put(
    path: str | os.PathLike[str],
    index: Any,
    offsets: np.ndarray,
    model: OffsetModel,
    mapped: Sequence[Path],
    obsolete: list[str],
    progress: Progress | None = None,
    originals: Vectors | None = None,
    rebuild: bool | None = None,
) -> None:
    """Upgrades `index` with `offsets` [n] in scan order, and puts it and its `model` in the place of what the file
    `path` and its `.hub` hold. obsolete: the lists files of the replaced index, which `writing` removes. mapped: the
    files from which index and offsets are mapped."""
    rule = rule_for(index)
    note_lists(path, [*obsolete, *map(free_name, rule.files())])

    if holds_graph(index):  # graphs are made in memory, and some of them twice
        graph = upgraded_by(index, offsets, model, originals, rebuild)
        _replace(path, lambda _: graph, index, model, mapped, progress, lambda written: None, originals)
        return

    def make(fill: Fill) -> Any:
        return rule.upgraded(offsets, plan_for(offsets, model, fill, vectors=originals))

    def give_back() -> None:
        give_back_pages(*mapped, beside(os.path.realpath(path), ".new"))

    def checked(written: Any) -> None:
        if originals is not None or not rule.exhaustive:
            warn_of_loss(loss_of_recall(index, written, model, give_back, originals), written)

    _replace(path, make, index, model, mapped, progress, checked, originals)


def take_out(path: str | os.PathLike[str], index: Any, progress: Progress | None = None) -> None:
    """Replaces the file `path`, which holds the upgraded `index`, by the index as it was."""
    rule = rule_for(index)
    require_upgraded(rule)
    note_lists(path, [*rule.files(), *map(free_name, rule.files())])
    _replace(path, rule.downgraded, index, None, [Path(path)], progress, lambda written: None)


def beside(path: str | os.PathLike[str], suffix: str) -> Path:
    return Path(f"{os.fspath(path)}{suffix}")


def read_faiss(path: str | os.PathLike[str], *, mapped: bool = False) -> Any:
    """The index in the file `path`, in memory or mapped; raises StoreError, one line, if there is none or Faiss
    refuses it."""
    if not Path(path).is_file():
        what = "is a folder, not an index file" if Path(path).is_dir() else "does not exist"
        raise StoreError(f"{os.fspath(path)!r} {what}")
    try:
        return faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP_IFC if mapped else 0)
    except RuntimeError as error:
        raise StoreError(f"Faiss cannot read {os.fspath(path)!r}: {reason(error)}") from None


class MappedGallery(Gallery):
    """The vectors of an index that is mapped from the first of some files, whose pages are given back meanwhile."""

    def __init__(self, mapped: Sequence[Path], index: Any, *, unit: bool):
        super().__init__(index, mapped[0].name, unit=unit)
        self._mapped = mapped

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        read = 0
        for block in super()._raw_blocks(size):
            yield block
            read += block.nbytes
            if read > PAGES_KEPT:
                give_back_pages(*self._mapped)
                read = 0


def _spooled(path: Path, rows: int) -> np.ndarray:
    """Room for offsets [rows] in a file that is mapped."""
    try:
        return np.memmap(path, np.float32, "w+", shape=(rows,))
    except OSError as error:
        raise StoreError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None


def give_back_pages(*paths: Path) -> None:
    """Tells the kernel that pages of the mapped files `paths` may go, so that files that are larger than memory are
    read without filling it. They are read again where they are needed."""
    if not sys.platform.startswith("linux"):
        return
    libc, names = ctypes.CDLL(None), tuple(os.path.realpath(path) for path in paths)
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip("\n").endswith(names):
                first, _, last = line.split(maxsplit=1)[0].partition("-")
                start = int(first, 16)
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(int(last, 16) - start), 4)  # MADV_DONTNEED


def _replace(
    path: str | os.PathLike[str],
    make: Callable[[Fill], Any],
    index: Any,
    model: OffsetModel | None,
    mapped: Sequence[Path],
    progress: Progress | None,
    checked: Callable[[Any], None],
    originals: Vectors | None = None,
) -> None:
    real = os.path.realpath(path)  # a link stays one
    new, model_path = beside(real, ".new"), beside(path, ".hub")
    new_model = beside(model_path, ".new")
    try:
        _write(new, make, mapped, progress)
        written = read_faiss(new, mapped=True)
        _require_same(written, index, new, originals)
        checked(written)
        if model is not None:
            model.save(new_model)
        if os.path.isfile(real):  # who may read the old one may read the new one, and nobody else
            for made in (new, new_model) if model is not None else (new,):
                shutil.copymode(real, made)
                _give_to(made, os.stat(real))
        os.replace(new, real)
    except OSError as error:
        raise StoreError(f"cannot write {os.fspath(path)!r}: {error.strerror}; it is as it was") from None
    finally:
        new.unlink(missing_ok=True)
    failing = f"its model could not be {'removed' if model is None else f'moved from {new_model.name!r}'}"
    try:
        if model is None:
            model_path.unlink(missing_ok=True)
        else:
            os.replace(new_model, model_path)
        failing = "the folder could not be flushed"
        _flush_folder(Path(real).parent)
    except OSError as error:
        warnings.warn(f"{os.fspath(path)!r} is written; {failing}: {error.strerror}", stacklevel=3)


def _write(path: Path, make: Callable[[Fill], Any], mapped: Sequence[Path], progress: Progress | None) -> None:
    """Writes what `make` makes to the file `path`, and its inverted lists to their files, and flushes them.

    Faiss's own writer writes everything but the codes: leaves get a plug instead, which is then found in what was
    written, and the codes go in its place as they come.
    """
    plugs: list[tuple[Body, bytes]] = []

    def plugged(body: Body) -> Any:
        plug = _plug(body)
        if plug is None:
            return in_memory(body)
        plugs.append((body, plug))
        return body.shell

    index = make(plugged)
    if not plugs:
        try:
            faiss.write_index(index, os.fspath(path))
        except RuntimeError as error:
            raise StoreError(f"Faiss cannot write {os.fspath(path)!r}: {reason(error)}") from None
        for name in (os.fspath(path), *rule_for(index).files()):
            with open(name, "rb+") as written:
                os.fsync(written.fileno())
        return
    frame = faiss.serialize_index(index).tobytes()
    places = sorted((_place(frame, plug), number) for number, (_, plug) in enumerate(plugs))
    done, total = 0, sum(int(body.shell.ntotal) for body, _ in plugs)
    with path.open("wb") as file:
        position = 0
        for place, number in places:
            body, plug = plugs[number]
            file.write(frame[position:place])
            for count in _pour(body, file):
                done += count
                give_back_pages(*mapped)
                if progress is not None:
                    progress("writing the index", done, total)
            position = place + len(plug)
        file.write(frame[position:])
        file.flush()
        os.fsync(file.fileno())


def _plug(body: Body) -> bytes | None:
    """What Faiss writes in the place of the codes of a leaf without them; None if it writes them elsewhere."""
    shell = body.shell
    if isinstance(shell, faiss.IndexIVF):
        if not isinstance(faiss.downcast_InvertedLists(shell.invlists), faiss.ArrayInvertedLists):
            return None
        return struct.pack("<4sQQ4sQ", b"ilar", shell.nlist, shell.code_size, b"sprs", 0)
    if isinstance(shell, faiss.IndexFastScan):
        return None
    plug = os.urandom(64)
    shell.codes.resize(len(plug))
    faiss.rev_swig_ptr(shell.codes.data(), len(plug))[:] = np.frombuffer(plug, np.uint8)
    return struct.pack("<Q", len(plug) // _unit(shell)) + plug


def _place(frame: bytes, plug: bytes) -> int:
    """Where `plug` is in `frame`. A short one may stand there by chance: then what was written will not read back."""
    place = frame.rfind(plug)
    if place < 0:
        raise StoreError("this version of Faiss writes indexes in another way than is known; nothing was changed")
    return place


def _pour(body: Body, file: BinaryIO) -> Iterator[int]:
    """Writes the codes of `body` as Faiss does, and yields how many they are, piece by piece."""
    shell = body.shell
    if not isinstance(shell, faiss.IndexIVF):
        file.write(struct.pack("<Q", int(shell.ntotal) * int(shell.code_size) // _unit(shell)))
        for entries in body.entries():
            file.write(np.ascontiguousarray(entries.codes).data)
            yield len(entries.codes)
        return
    assert body.list_sizes is not None
    sizes = body.list_sizes.astype(np.uint64)
    file.write(struct.pack("<4sQQ", b"ilar", shell.nlist, shell.code_size))
    filled = np.flatnonzero(sizes)
    if len(filled) > shell.nlist // 2:
        listed, kind = sizes, b"full"
    else:
        listed, kind = np.stack([filled.astype(np.uint64), sizes[filled]], axis=1).ravel(), b"sprs"
    file.write(struct.pack("<4sQ", kind, len(listed)) + listed.tobytes())
    held: list[np.ndarray] = []  # ids follow the codes of their whole list
    left = 0
    for entries in body.entries():
        assert entries.lists is not None
        assert entries.ids is not None
        edges = np.flatnonzero(np.diff(entries.lists, prepend=-1, append=-1))
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            left = left or int(sizes[entries.lists[first]])
            file.write(np.ascontiguousarray(entries.codes[first:last]).data)
            held.append(entries.ids[first:last])
            left -= last - first
            if left == 0:
                file.write(np.concatenate(held).tobytes())
                held.clear()
        yield len(entries.codes)


def _unit(shell: Any) -> int:
    """In what Faiss counts the codes of a leaf: floats or bytes."""
    return 4 if isinstance(shell, faiss.IndexFlat) else 1


def _require_same(written: Any, index: Any, path: Path, originals: Vectors | None) -> None:
    """Raises StoreError unless `written`, read back from `path`, holds some vectors of `index` and finds them, or of
    the `originals`, where a second stage holds those.

    It is searched among those only, so that a large file is not read as a whole.
    """
    before, after = rule_for(index), rule_for(written)
    same = before.count == after.count
    if same:
        starts = (0, max(0, before.count - PROBES))
        labels = [after.labels(start, min(start + PROBES, before.count)) for start in starts]
        selector = faiss.IDSelectorBatch(np.concatenate(labels))
        parameters = after.selecting(selector)
        for start in starts:
            (probes, _), (found, _) = next(before.scan(start, PROBES)), next(after.scan(start, PROBES))
            if originals is not None and after.coarse:
                probes, found = next(originals.blocks(PROBES)), next(after.scan(0, PROBES))[0]
            scores, names = written.search(probes, 1, params=parameters)
            if after.coarse:  # a second stage may hold them at unit length
                lengths = np.linalg.norm(probes, axis=1) / np.maximum(np.linalg.norm(found, axis=1), 1e-30)
                found = found * lengths[:, None]
            probes, found = np.nan_to_num(probes), np.nan_to_num(found)
            near = np.allclose(probes, found, rtol=0, atol=HALF * float(np.abs(probes).max()))
            same &= near and bool((names >= 0).any() and np.isfinite(scores[names >= 0]).all())
    if not same:
        raise StoreError(f"{os.fspath(path)!r} does not read back as it was written; the disk may be failing")


def _give_to(path: Path, owner: os.stat_result) -> None:
    with contextlib.suppress(OSError):  # only root may
        os.chown(path, owner.st_uid, owner.st_gid)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
