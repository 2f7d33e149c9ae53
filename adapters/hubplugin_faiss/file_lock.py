"""Keeps two processes from writing beside one index file, and removes what a killed one left there."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hubplugin.errors import StoreError
from hubplugin_faiss.file_reader import beside, read_faiss
from hubplugin_faiss.handlers import handler_for

try:
    import fcntl
except ImportError:  # where there is none, nobody is kept away
    fcntl = None  # type: ignore[assignment]

_HELD: set[str] = set()


@contextlib.contextmanager
def alone(path: str | os.PathLike[str]) -> Iterator[None]:
    """Locks the file `path`, if there is one, so that no two processes write beside it at once.

    One process may enter it again. Raises StoreError if another process holds the lock.
    """
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
    """Locks the file `path` as `alone` does, and removes lists files that this or an earlier process left unused."""
    with alone(path):
        sweep(path)
        try:
            yield
        finally:
            sweep(path)


def note_lists(path: str | os.PathLike[str], names: Sequence[str]) -> None:
    """Records the lists files `names` that the index file `path` may soon use, or use no longer, for `sweep`."""
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
            used = {os.path.realpath(name) for name in handler_for(read_faiss(path, mapped=True)).files()}
        except StoreError:
            return  # an index that cannot be read may use any of them
    for line in journal.read_text().splitlines():
        with contextlib.suppress(ValueError):  # a kill may cut off the last line, whose file was not yet made
            name = json.loads(line)
            if name not in used:
                Path(name).unlink(missing_ok=True)
    journal.unlink()
