"""Runs that write an index file: one at a time, only what they have read, and nothing left behind by what fails."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import hubplugin
from hubplugin import (
    HubpluginError,
    StoreError,
    apply,
    open_store,
    refit,
    refresh,
    rollback,
)
from hubplugin.store import Store
from hubplugin_faiss import read_index
from tests.faiss.cases import draw, filled, grow, written
from tests.refusals import refused

RNG = np.random.default_rng(7)
BANK, GALLERY = draw(RNG, 200, 900, at=0.3)
FIT = {"force": True, "method": "csls"}


@cache
def fitted(method="csls", **parameters):
    """A model, only to be looked at."""
    return hubplugin.fit(GALLERY, BANK, method, **parameters)


def built(path, vectors=GALLERY):
    """An index of `vectors` in the file `path`."""
    return written(path, filled("Flat", np.ascontiguousarray(vectors)))


def opened(path):
    return open_store(f"faiss:{path}")


@pytest.fixture
def photos(tmp_path):
    return built(tmp_path / "photos.faiss")


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    """A folder with photos.faiss, corrected by csls and then by nnn."""
    photos = built(tmp_path_factory.mktemp("corrected") / "photos.faiss")
    apply(opened(photos), fitted())
    apply(opened(photos), fitted("nnn", k=4))
    return photos.parent


@pytest.fixture
def corrected(two_models, tmp_path):
    """The index of `two_models`, as one's own."""
    shutil.copytree(two_models, tmp_path, dirs_exist_ok=True)
    return tmp_path / "photos.faiss"


WRITERS: dict[str, Callable[[Store], object]] = {
    "apply": lambda store: apply(store, BANK, **FIT),
    "refit": lambda store: refit(store, BANK, "is", force=True),
    "refresh": refresh,
    "rollback": rollback,
    "remove": lambda store: store.remove(),
    "model": lambda store: apply(store, fitted("is")),
}
"""Everything that writes beside an index."""


@pytest.mark.parametrize("what", WRITERS)
def test_nothing_else_writes_while_a_run_does(corrected, what):
    store = opened(corrected)
    with opened(corrected).begin(fitted("dn")):
        before = corrected.read_bytes(), sorted(os.walk(f"{corrected}.hub"))
        with refused(
            StoreError, "is being written by another run; nothing was changed"
        ):
            WRITERS[what](store)
        assert (corrected.read_bytes(), sorted(os.walk(f"{corrected}.hub"))) == before
    WRITERS[what](opened(corrected))


def test_an_old_index_that_is_put_back_is_the_active_one_again(corrected):
    kept = corrected.parent / "kept.faiss"
    apply(opened(corrected), fitted())
    shutil.copy(corrected, kept)
    apply(opened(corrected), fitted("is"))
    os.replace(kept, corrected)
    assert opened(corrected).correction().model.fingerprint == fitted().fingerprint
    assert opened(corrected).previous() is None
    apply(opened(corrected), fitted("dn"))
    assert opened(corrected).previous().fingerprint == fitted().fingerprint


def lying_in(folder):
    """Each file in `folder` and below, but for locks."""
    if folder.is_file():
        return {"": folder.read_bytes()}
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: path.read_bytes() for path in files if path.name != "lock"}


@pytest.mark.parametrize("what", ["refresh", "remove", "rollback", "model"])
@pytest.mark.parametrize("size", [100, 4_000, 20_000, 50_000])
def test_what_finds_no_room_says_how_much_it_needs_and_leaves_all_as_it_was(
    corrected, what, size, full_disk
):
    grow(corrected, BANK[:1])  # so that a refresh has something to do
    before, store = lying_in(corrected.parent), opened(corrected)
    needed = r"cannot write '.*': File too large, [\d,]+ bytes are needed and [\d,]+ were free; nothing was changed"
    with refused(StoreError, needed), full_disk(size):
        WRITERS[what](store)
    assert lying_in(corrected.parent) == before


CHANGES = "os.remove", "os.rename", "os.rmdir", "os.mkdir", "open"
"""The events that Python reports when names are made, changed or deleted."""


def run_in_child(step, kill_before=None):
    """Run `step` in a process that is killed before its change of this number; return
    True if it was not."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), "the step itself failed"
        return status == 0
    changes = itertools.count()

    def watch(event, arguments):
        is_write = event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES and is_write and next(changes) == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    with contextlib.suppress(BaseException):
        step()
        os._exit(0)
    os._exit(1)


def seen(path):
    """Return the ranking, the model and the one before. Raise if they do not fit."""
    index, model = read_index(path)
    models = model, opened(path).previous()
    names = [each and each.fingerprint for each in models]
    return *[part.tobytes() for part in index.search(BANK, 10)], *names


def names_in(folder):
    """Return what lies there, whatever numbers versions have."""
    return sorted(re.sub(r"\d+\.", "N.", str(path)) for path in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "refresh", "rollback", "remove"])
@pytest.mark.parametrize("kind", ["HNSW8", "IVF16,Flat"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_index_and_a_rerun_finishes(
    tmp_path, kind, what
):
    """Each change of a name is a moment: what is written before it has no name."""
    folder = tmp_path / "photos"
    folder.mkdir()
    photos = written(folder / "photos.faiss", filled(kind, GALLERY))
    if what != "model":
        for method in ("csls", "nnn"):
            apply(opened(photos), fitted(method))
    if what == "refresh":
        grow(photos, BANK)
    kept = shutil.copytree(folder, tmp_path / "kept")

    def run(what, kill_before=None):
        return run_in_child(lambda: WRITERS[what](opened(photos)), kill_before)

    before = seen(photos)
    run(what)
    after = seen(photos)
    left = names_in(folder)
    found = set()
    for moment in itertools.count():
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        if run(what, moment):
            break
        now = seen(photos)
        found.add(now)
        # What was killed is known by its content: copied, and then added to.
        copied = shutil.copytree(folder, tmp_path / "copied") / photos.name
        assert seen(copied) == now
        grow(copied, BANK[:1])
        if now[2] is not None:
            assert opened(copied).correction().model.fingerprint == now[2]
        shutil.rmtree(copied.parent)
        # A rollback would go back once more.
        run("refresh" if what == "rollback" and now == after else what)
        assert seen(photos) == after, f"the run after kill {moment} does not finish"
        assert names_in(folder) == left
    assert found == {before, after}


def test_a_damaged_manifest_is_refused_and_its_index_searched_and_taken_out(corrected):
    raw = built(corrected.parent / "raw").read_bytes()
    Path(f"{corrected}.hub/manifest.json").write_text("{")
    before = lying_in(corrected.parent)
    for use in (refresh, lambda store: apply(store, fitted("is"))):
        with refused(
            StoreError, r"manifest\.json' is damaged: .*hubplugin remove faiss:"
        ):
            use(opened(corrected))
    assert lying_in(corrected.parent) == before
    assert opened(corrected).search(BANK[:1], 3).ids
    opened(corrected).remove()
    assert corrected.read_bytes() == raw
    assert not Path(f"{corrected}.hub").exists()


def test_whoever_may_read_the_index_and_nobody_else_may_read_what_lies_beside_it(
    photos,
):
    photos.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(photos, 1234, 1234)
    apply(opened(photos), fitted())
    hub = Path(f"{photos}.hub")
    names = {path.name for path in hub.iterdir()}
    assert names == {"manifest.json", "1.model", "lock"}
    for path in (photos, hub, *hub.iterdir()):
        status = path.stat()
        assert status.st_mode & 0o777 == (0o750 if path == hub else 0o640)
        assert status.st_uid == photos.stat().st_uid


@pytest.mark.parametrize("moment", ["it fits", "it has written"])
def test_what_another_program_writes_during_a_run_stays(corrected, moment):
    new = built(corrected.parent / "next", GALLERY[::-1][:500])
    content = new.read_bytes()
    store = opened(corrected)

    def replace(*_):
        if new.exists():
            os.replace(new, corrected)

    says = "it stays as that program left"
    if moment == "it fits":
        with refused(StoreError, says):
            apply(store, BANK, **FIT, compute=hubplugin.Compute(progress=replace))
    else:
        with store.begin(fitted("is")) as writing:
            for batch in writing.scan():
                writing.write(batch, fitted("is").offsets(batch.vectors))
            replace()
            with refused(StoreError, says):
                writing.activate()
    assert corrected.read_bytes() == content
    WRITERS["model"](store)  # run again, it finds what is there
    assert store.count() == 500


def test_a_run_that_was_cut_off_is_not_fitted_again_unless_the_index_is_another(photos):
    model = hubplugin.apply(opened(photos), BANK, **FIT, dry_run=True).model
    opened(photos).begin(model)  # and killed: its lock goes with it
    found = opened(photos).correction()
    assert (found.active, found.model.fingerprint) == (False, model.fingerprint)
    os.utime(photos)
    assert opened(photos).correction() is not None
    assert apply(opened(photos), BANK, **FIT).model.fingerprint == model.fingerprint
    opened(photos).remove()
    opened(photos).begin(model)
    built(photos, GALLERY[::-1])
    assert opened(photos).correction() is None


@pytest.mark.parametrize("damage", ["missing", "cut off", "of another index"])
def test_a_correction_whose_model_is_lost_is_refused_and_taken_out_all_the_same(
    corrected, damage
):
    raw = built(corrected.parent / "raw").read_bytes()
    model = Path(f"{corrected}.hub/2.model")
    if damage == "missing":
        shutil.rmtree(model.parent)
    elif damage == "cut off":
        model.write_bytes(model.read_bytes()[:100])
    else:
        fitted("dn").save(model)
    for use in (read_index, lambda path: refresh(opened(path))):
        with refused(StoreError, f"remove faiss:{corrected}"):
            use(corrected)
    hubplugin.remove(opened(corrected))
    assert corrected.read_bytes() == raw
    assert sorted(os.listdir(corrected.parent)) == ["photos.faiss", "raw"]


@pytest.mark.parametrize(
    "place", ["", "lock", "manifest.json", "2.model", "index.faiss"]
)
@pytest.mark.parametrize("what", WRITERS)
def test_what_a_link_in_the_folder_leads_to_stays_as_it_is(
    corrected, tmp_path, place, what
):
    """A link that was followed once wrote over what it led to."""
    link = Path(f"{corrected}.hub", place)
    victim = tmp_path / "victim"
    if link.exists():
        os.replace(link, victim)
    else:
        victim.write_bytes(b"precious")
    before = lying_in(victim), victim.stat().st_mode
    link.symlink_to(victim)
    with contextlib.suppress(HubpluginError):
        WRITERS[what](opened(corrected))
    assert (lying_in(victim), victim.stat().st_mode) == before


def test_an_index_and_the_links_to_it_are_one(photos, tmp_path):
    link = tmp_path / "second.faiss"
    link.symlink_to(photos.name)
    apply(opened(link), fitted())
    for path in (photos, link):
        assert refresh(opened(path)).stale == 0
    opened(link).remove()
    assert link.is_symlink()
    assert photos.read_bytes() == built(tmp_path / "raw").read_bytes()
    assert not Path(f"{photos}.hub").exists()


def test_what_somebody_else_has_put_into_the_folder_stays(photos):
    apply(opened(photos), fitted())
    note = Path(f"{photos}.hub/note.txt")
    note.write_bytes(b"precious")
    opened(photos).remove()
    assert lying_in(note.parent) == {"note.txt": b"precious"}
