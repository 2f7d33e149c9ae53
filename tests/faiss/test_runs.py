"""Runs that write an index file: one at a time, only what they have read, and nothing left behind by what fails."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from hubplugin import apply, open_store, refit, refresh, rollback
from hubplugin.store import Store
from hubplugin_faiss import store as faiss_store
from hubplugin_faiss.encoding import codecs
from tests.faiss import killed_steps
from tests.faiss.cases import filled, grow, unit, written
from tests.faiss.cases import stored as stored_in
from tests.whole.commands import hubplugin as hubplugin_command

RNG = np.random.default_rng(7)
BANK, GALLERY = (unit(RNG.normal(size=(rows, 16)) + 0.3) for rows in (200, 900))
FIT = {"force": True, "method": "csls"}


@cache
def fitted(method: str = "csls", **parameters) -> hubplugin.OffsetModel:
    """A model, only to be looked at."""
    return hubplugin.fit(GALLERY, BANK, method, **parameters)


def built(path: Path, vectors: np.ndarray = GALLERY) -> Path:
    """An index of `vectors` in the file `path`."""
    return written(path, filled("Flat", np.ascontiguousarray(vectors)))


def opened(path: Path) -> Store:
    return open_store(f"faiss:{path}")


def stored(path: Path) -> np.ndarray:
    return stored_in(faiss.read_index(str(path)))


@pytest.fixture
def photos(tmp_path) -> Path:
    return built(tmp_path / "photos.faiss")


@pytest.fixture(scope="module")
def two_models(tmp_path_factory) -> Path:
    """A folder with photos.faiss, corrected by csls and then by nnn."""
    photos = built(tmp_path_factory.mktemp("corrected") / "photos.faiss")
    apply(opened(photos), fitted())
    apply(opened(photos), fitted("nnn", k=4))
    return photos.parent


@pytest.fixture
def corrected(two_models, tmp_path) -> Path:
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


def test_a_second_run_on_one_file_is_refused_and_the_first_keeps_its_own_offsets(
    photos,
):
    first, second = fitted(), fitted("dbsn", tau=0.05)
    one, two = opened(photos), opened(photos)
    with one.begin(first) as writing:
        batch = next(iter(writing.scan()))
        for rows in (np.arange(450), np.arange(450, 900)):
            part = batch.take(rows)
            writing.write(part, first.offsets(part.vectors))
            with pytest.raises(
                hubplugin.StoreError, match="is being written by another run"
            ):
                apply(two, second)
        writing.activate()
    np.testing.assert_allclose(stored(photos), first.offsets(GALLERY), atol=1e-5)
    with pytest.raises(
        hubplugin.StoreError, match="changed by another program since it was read"
    ):
        apply(two, second)
    apply(opened(photos), second)
    np.testing.assert_allclose(stored(photos), second.offsets(GALLERY), atol=1e-5)


@pytest.mark.parametrize("what", WRITERS)
def test_nothing_else_writes_while_a_run_does(corrected, what):
    store = opened(corrected)
    with opened(corrected).begin(fitted("dn")):
        before = corrected.read_bytes(), sorted(os.walk(f"{corrected}.hub"))
        with pytest.raises(
            hubplugin.StoreError,
            match=r"is being written by another run \(process \d+ on .*\); nothing",
        ):
            WRITERS[what](store)
        assert (corrected.read_bytes(), sorted(os.walk(f"{corrected}.hub"))) == before
    WRITERS[what](opened(corrected))


@pytest.mark.slow
def test_a_run_in_another_process_keeps_this_one_out_until_it_is_killed(photos):
    program = (
        "import sys, hubplugin; from hubplugin.registry import open_store\n"
        "writing = open_store('faiss:' + sys.argv[1]).begin(hubplugin.load(sys.argv[2]))\n"
        "print('', flush=True); input()\n"
    )
    fitted().save(photos.parent / "model.hub")
    command = [
        sys.executable,
        "-c",
        program,
        str(photos),
        str(photos.parent / "model.hub"),
    ]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    with pytest.raises(
        hubplugin.StoreError, match=f"written by another run .process {other.pid} on "
    ):
        apply(opened(photos), fitted())
    other.kill()
    other.wait()
    apply(opened(photos), fitted())


@pytest.mark.slow
def test_two_applies_at_once_leave_the_offsets_of_one_model(tmp_path):
    rng = np.random.default_rng(3)
    gallery = unit(rng.normal(size=(60_000, 16)))
    photos, banks = built(tmp_path / "photos.faiss", gallery), []
    for number, rows in enumerate((200, 300)):
        np.save(tmp_path / f"{number}.npy", unit(rng.normal(size=(rows, 16))))
        banks.append(str(tmp_path / f"{number}.npy"))
    program = "import sys, hubplugin.cli; hubplugin.cli.main()"
    options = ["--method", "csls", "--force"]
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                program,
                "apply",
                f"faiss:{photos}",
                "--bank",
                bank,
                *options,
            ],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for bank in banks
    ]
    said = [run.communicate()[1] for run in started]
    statuses = sorted(run.returncode for run in started)
    assert statuses in ([0, 0], [0, 1]), said
    refusals = "being written by another run", "changed by another program"
    assert all(
        any(why in text for why in refusals)
        for text, run in zip(said, started, strict=True)
        if run.returncode
    )
    model = opened(photos).correction().model
    np.testing.assert_allclose(stored(photos), model.offsets(gallery), atol=1e-5)
    assert hubplugin.inspect(opened(photos), queries=0).stale == 0


def renamed(new: Path, path: Path) -> None:
    os.replace(new, path)


def overwritten(new: Path, path: Path) -> None:
    path.write_bytes(new.read_bytes())


@pytest.mark.parametrize("moment", ["after it was opened", "before the last step"])
@pytest.mark.parametrize("entries", [900, 500])
@pytest.mark.parametrize("way", [renamed, overwritten])
@pytest.mark.parametrize("what", sorted(WRITERS))
def test_what_another_program_writes_meanwhile_stays(
    corrected, monkeypatch, what, way, entries, moment
):
    new = built(
        corrected.parent / "next", np.ascontiguousarray(GALLERY[::-1][:entries])
    )
    content, store, replaced, real = (
        new.read_bytes(),
        opened(corrected),
        [],
        faiss_store.write_index_file,
    )
    if what == "refresh":  # which replaces the file only if an offset is wrong
        grow(corrected, BANK[:1])
        store = opened(corrected)

    def replace() -> None:
        if not replaced:
            replaced.append(way(new, corrected))

    def last(*arguments) -> None:
        replace()
        real(*arguments)

    if moment == "before the last step":
        monkeypatch.setattr(faiss_store, "write_index_file", last)
    else:
        replace()
    with pytest.raises(
        hubplugin.StoreError,
        match="was changed by another program since it was read; it stays as",
    ):
        WRITERS[what](store)
    assert replaced
    assert corrected.read_bytes() == content
    assert not half_written(corrected)


def half_written(photos: Path) -> list[str]:
    """What lies beside an index of a run that has not ended."""
    names = [path.name for path in Path(f"{photos}.hub").glob("*")]
    return [name for name in names if name.endswith((".offsets", ".tmp", ".faiss"))]


def killed_at(photos: Path, model: hubplugin.OffsetModel, rows: int) -> None:
    """A run that had written the offsets of some rows."""
    with opened(photos).begin(model) as writing:
        batch = next(iter(writing.scan())).take(np.arange(rows))
        writing.write(batch, model.offsets(batch.vectors))


def older_file(photos: Path) -> None:
    """Another index of as many entries, built before, is moved to its place."""
    new = built(photos.parent / "next", GALLERY[::-1])
    os.utime(new, ns=(0, photos.stat().st_mtime_ns - 10**9))
    os.replace(new, photos)


def same_size_and_time(photos: Path) -> None:
    """The file is overwritten in place, and has the size and the time that it had."""
    before, vectors = photos.stat(), GALLERY.copy()
    vectors[100:800] = vectors[100:800][::-1]
    built(photos, vectors)
    os.utime(photos, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert photos.stat().st_size == before.st_size


@pytest.mark.parametrize("change", [older_file, same_size_and_time])
def test_offsets_that_a_killed_run_left_are_not_taken_for_another_index(photos, change):
    killed_at(photos, fitted(), 800)
    change(photos)
    assert opened(photos).correction() is None
    assert apply(opened(photos), BANK, **FIT).missing == 900
    vectors = np.concatenate([batch.vectors for batch in opened(photos).scan()])
    np.testing.assert_allclose(
        stored(photos), opened(photos).correction().model.offsets(vectors), atol=1e-5
    )


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
    rollback(opened(corrected))
    np.testing.assert_allclose(stored(corrected), fitted().offsets(GALLERY), atol=1e-5)


def lying_in(folder: Path) -> dict[str, bytes]:
    """Each file in `folder` and below, but for locks."""
    files = (
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("what", ["refresh", "remove", "rollback", "model"])
@pytest.mark.parametrize("size", [100, 4_000, 20_000, 50_000])
def test_what_finds_no_room_says_how_much_it_needs_and_leaves_all_as_it_was(
    corrected, what, size, full_disk
):
    grow(corrected, BANK[:1])  # so that a refresh has something to do
    before, store = lying_in(corrected.parent), opened(corrected)
    needed = r"cannot write '.*': File too large, [\d,]+ bytes are needed and [\d,]+ were free; nothing was changed"
    with pytest.raises(hubplugin.StoreError, match=needed), full_disk(size):
        WRITERS[what](store)
    assert lying_in(corrected.parent) == before


@pytest.fixture
def large(tmp_path, monkeypatch) -> Callable[..., Path]:
    """Makes a folder with x.faiss of 20,000 entries, or so many, as it lies before a step, and goes there."""

    def made(kind: str, step: str, entries: int = 20_000) -> Path:
        rng, folder = np.random.default_rng(3), tmp_path / "before"
        gallery, bank = (
            unit(rng.normal(size=(rows, 16)) + 0.2) for rows in (entries, 200)
        )
        folder.mkdir()
        monkeypatch.chdir(folder)
        np.save("../bank.npy", bank)
        hubplugin.fit(gallery, bank, "dn").save("../next.hub")
        written("x.faiss", filled(kind, gallery))
        if step in ("refresh", "rollback", "remove"):
            for method in ("csls", "nnn"):
                apply(open_store("faiss:x.faiss"), hubplugin.fit(gallery, bank, method))
        if step == "refresh":
            index = faiss.read_index("x.faiss")
            index.add(bank)
            faiss.write_index(index, "x.faiss")
        return folder

    return made


FULL = [
    ("Flat", "apply", 40), ("Flat", "apply", 600), ("Flat", "rollback", 500), ("IVF16,Flat", "remove", 500),
    ("HNSW8", "model", 900),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "step", "free"), FULL)
def test_a_full_disk_ends_in_one_line_and_stays_as_it_was(large, kind, step, free):
    alone = ["unshare", "--mount", "--map-root-user"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*alone, "true"], capture_output=True).returncode
    ):
        pytest.skip(
            "needs a small disk of its own: run it as root, or where `unshare --mount --map-root-user` works"
        )
    folder = large(kind, step)
    size = (
        sum(path.stat().st_blocks for path in folder.rglob("*") if path.is_file()) // 2
        + free
        + 400
    )
    arguments = [
        str(Path(killed_steps.__file__).with_name("full_disk.py")),
        str(folder),
        str(size),
        str(free),
        step,
    ]
    run = subprocess.run(
        [*alone, sys.executable, *arguments], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    status, said, same, less_free, there = json.loads(run.stdout)
    assert status == 1, f"signal {-status}" if status < 0 else said
    full = r"^cannot write (in )?'.*': No space left on device, [\d,]+ bytes are needed and [\d,]+ were free"
    assert re.search(full, said)
    assert said.count("\n") == 1
    assert same, there
    assert less_free == 0


KILLED = [
    *((kind, "apply", "25", 20_000) for kind in ("Flat", "IVF64,Flat", "HNSW4")),
    *(("HNSW8", step, "0", 900) for step in ("apply", "refresh", "rollback", "remove")),
    *(
        ("IVF16,Flat", step, "0 alike", 900)
        for step in ("apply", "refresh", "rollback", "remove")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "step", "kills", "entries"), KILLED)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_index_and_a_rerun_finishes(
    large, monkeypatch, kind, step, kills, entries
):
    if "alike" in kills:
        monkeypatch.setattr(codecs, "_model_bits", killed_steps.same_bits)
    folder = large(kind, step, entries)
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(killed_steps.__file__)),
        step,
        *kills.split(),
    ]
    run = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "'before'" in run.stdout, "no kill came before the end"
    assert kills == "25" or "'after'" in run.stdout, (
        "no kill came after the new index was in its place"
    )


def test_a_gallery_that_finds_no_room_to_be_read_says_how_much_it_needs(
    photos, full_disk
):
    before = lying_in(photos.parent)
    needed = r"at least 57,600 bytes are needed and [\d,]+ are free; set TMPDIR"
    with pytest.raises(hubplugin.InputError, match=needed), full_disk(10_000):
        apply(opened(photos), BANK, **FIT)
    assert lying_in(photos.parent) == before


@pytest.mark.parametrize(
    "name", ["2.model", "1.model", "manifest.json", "3.offsets", "lock", "."]
)
@pytest.mark.parametrize("what", WRITERS)
def test_what_has_the_place_of_a_file_ends_in_one_line_and_changes_nothing(
    corrected, what, name
):
    """A folder where a file belongs, a file where a folder does."""
    place = Path(f"{corrected}.hub") / name
    kept = Path(f"{corrected}.hub/2.model").read_bytes()
    if name == ".":
        shutil.rmtree(place)
        place.write_bytes(kept)
    else:
        place.unlink(missing_ok=True)
        place.mkdir()
        (place / "somebody's own").touch()
    before = lying_in(corrected.parent)
    with pytest.raises(
        hubplugin.HubpluginError, match=re.escape(str(place.resolve()))
    ) as caught:
        WRITERS[what](opened(corrected))
    assert "\n" not in str(caught.value)
    assert lying_in(corrected.parent) == before


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("missing", "its model .* is missing"),
        ("cut off", ""),
        ("of another index", "is the model of another index"),
    ],
)
def test_a_correction_whose_model_is_lost_is_refused_and_taken_out_all_the_same(
    corrected, damage, says
):
    raw, model = (
        built(corrected.parent / "raw").read_bytes(),
        Path(f"{corrected}.hub/2.model"),
    )
    if damage == "missing":
        shutil.rmtree(model.parent)
    elif damage == "cut off":
        model.write_bytes(model.read_bytes()[:100])
    else:
        fitted("dn").save(model)
    for use in (hubplugin_faiss.read_index, lambda path: refresh(opened(path))):
        with pytest.raises(
            hubplugin.StoreError,
            match=f"{says}.*; put the right .* hubplugin remove faiss:{corrected}",
        ):
            use(corrected)
    told = hubplugin_command("remove", f"faiss:{corrected}")
    assert (told.returncode, told.stdout) == (
        0,
        f"faiss:{corrected}: correction removed\n",
    )
    assert corrected.read_bytes() == raw
    assert sorted(os.listdir(corrected.parent)) == ["photos.faiss", "raw"]


@pytest.mark.filterwarnings("ignore:recall@10")
def test_a_graph_that_was_corrected_and_refitted_is_the_very_file_after_remove(
    tmp_path,
):
    photos = written(
        tmp_path / "photos.faiss", filled("HNSW4", GALLERY)
    )  # whose links lose much by offsets
    before = photos.read_bytes()
    for alpha in (2.0, 1.0):
        apply(opened(photos), BANK, "nnn", k=3, alpha=alpha, force=True)
    opened(photos).remove()
    assert photos.read_bytes() == before


def test_an_index_and_the_links_to_it_are_one(photos, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/first").symlink_to("../photos.faiss")
    link = tmp_path / "elsewhere/second.faiss"
    link.symlink_to("first")
    apply(opened(link), fitted())
    for path in (photos, link):
        model = hubplugin_faiss.read_index(path)[1]
        assert model.fingerprint == fitted().fingerprint
        assert refresh(opened(path)).stale == 0
    with (
        opened(photos).begin(fitted("dn")),
        pytest.raises(hubplugin.StoreError, match="written by another run"),
    ):
        apply(opened(link), fitted("dn"))
    apply(hubplugin_faiss.open_store(link), fitted("nnn", k=4))
    assert opened(link).correction().model.method == "nnn"
    opened(link).remove()
    assert link.is_symlink()
    assert photos.read_bytes() == built(tmp_path / "raw").read_bytes()
    assert not Path(f"{photos}.hub").exists()
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["first", "second.faiss"]


@pytest.mark.parametrize(
    "content",
    ['{"format": 5, "hubplugin": "0.1"}', "{", "{}x", '{"format": 7, "photos": 1}'],
)
def test_a_manifest_of_another_version_or_a_damaged_one_is_refused_still_searched_and_taken_out(
    corrected, content
):
    raw = built(corrected.parent / "raw").read_bytes()
    Path(f"{corrected}.hub/manifest.json").write_text(content)
    before = lying_in(corrected.parent)
    for use in (refresh, lambda store: apply(store, fitted("is"))):
        with pytest.raises(
            hubplugin.StoreError,
            match=r"manifest\.json' has a manifest .*hubplugin remove faiss:",
        ):
            use(opened(corrected))
    assert lying_in(corrected.parent) == before
    assert opened(corrected).search(BANK[:1], 3).ids
    opened(corrected).remove()
    assert corrected.read_bytes() == raw
    assert not Path(f"{corrected}.hub").exists()


def test_a_model_file_of_an_earlier_version_in_the_place_of_the_folder_is_named(photos):
    model, content = Path(f"{photos}.hub"), photos.read_bytes()
    fitted().save(model)
    with pytest.raises(
        hubplugin.StoreError,
        match=r"photos\.faiss\.hub' is a file, where hubplugin keeps a folder",
    ):
        apply(opened(photos), fitted())
    assert photos.read_bytes() == content
    model.rename(photos.parent / "old.hub")
    model.mkdir()
    os.replace(
        photos.parent / "old.hub", model / "model.hub"
    )  # where a user puts it who upgrades in memory
    faiss.write_index(
        hubplugin_faiss.upgrade(faiss.read_index(str(photos)), fitted()), str(photos)
    )
    assert opened(photos).correction().active


@pytest.mark.parametrize("name", ["note.txt", "sub/precious"])
def test_what_somebody_else_has_put_into_the_folder_stays_when_the_correction_goes(
    photos, name
):
    killed_at(photos, fitted(), 400)
    precious = Path(f"{photos}.hub", name)
    precious.parent.mkdir(exist_ok=True)
    precious.write_bytes(b"precious")
    apply(opened(photos), fitted("is"))
    opened(photos).remove()
    assert lying_in(Path(f"{photos}.hub")) == {name: b"precious"}
    apply(opened(photos), fitted())
    assert opened(photos).correction().active


def test_a_run_that_is_refused_leaves_no_folder(photos):
    faiss.write_index(faiss.IndexFlatIP(16), str(photos))  # empty
    with pytest.raises(hubplugin.HubpluginError, match="is empty"):
        opened(photos).begin(fitted())
    assert os.listdir(photos.parent) == ["photos.faiss"]


PLACES = {
    "": "a folder", "lock": "a file", "manifest.json": "a file", "1.model": "a file", "2.model": "a file",
    "3.model": "a file", "3.offsets": "a file", "index.faiss": "a file", "model.hub": "a file",
    "manifest.json.0123abcd.tmp": "a file", "3.model.4567abcd.tmp": "a file",
}  # fmt: skip
"""All that hubplugin has in photos.faiss.hub."""


@pytest.fixture
def impatient():
    """A pipe that is read without a writer is waited for without an end."""

    def stop(*_):
        raise TimeoutError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def cleared(index: Path, place: str) -> Path:
    """Where something is going to be put in the place of what hubplugin has there, the name `place`."""
    path = Path(f"{index}.hub", place)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return path


def modes_and_contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes())
        for path in files
    }


@pytest.mark.parametrize("what", WRITERS)
@pytest.mark.parametrize("place", PLACES)
def test_what_a_link_leads_to_stays_and_one_line_names_the_link(
    corrected, tmp_path, place, what
):
    victim = tmp_path / "victim"
    shutil.copytree(f"{corrected}.hub", victim)
    for path in victim.iterdir():
        path.chmod(0o600)
    link = cleared(corrected, place)
    same = victim / place if (victim / place).exists() else victim / "2.model"
    link.symlink_to(victim if PLACES[place] == "a folder" else same)
    before, index = modes_and_contents(victim), corrected.read_bytes()
    told = rf"{re.escape(str(link))}' is a link, where hubplugin keeps {PLACES[place]}; move it away"
    with pytest.raises(hubplugin.StoreError, match=told) as caught:
        WRITERS[what](opened(corrected))
    assert "\n" not in str(caught.value)
    assert modes_and_contents(victim) == before
    assert corrected.read_bytes() == index
    assert link.is_symlink()


@pytest.mark.parametrize("place", PLACES)
def test_a_link_to_nowhere_makes_no_file_there(photos, tmp_path, place):
    cleared(photos, place).symlink_to(tmp_path / "nowhere")
    with pytest.raises(hubplugin.StoreError, match="is a link, where hubplugin keeps"):
        apply(opened(photos), fitted())
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("place", PLACES)
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(
    corrected, place, impatient
):
    os.mkfifo(cleared(corrected, place))
    with pytest.raises(
        hubplugin.StoreError,
        match=r"is a pipe or a device, where hubplugin keeps|is no regular file",
    ):
        apply(opened(corrected), fitted("is"))


def test_a_lock_that_has_a_name_elsewhere_is_made_anew(photos, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    precious.chmod(0o600)
    os.link(precious, cleared(photos, "lock"))
    apply(opened(photos), fitted())
    assert (precious.read_text(), precious.stat().st_mode & 0o777) == (
        "precious",
        0o600,
    )
    with (
        opened(photos).begin(fitted("is")),
        pytest.raises(hubplugin.StoreError, match="is being written by another"),
    ):
        apply(opened(photos), fitted("is"))


def test_offsets_that_have_a_name_elsewhere_are_not_gone_on_with(photos, tmp_path):
    killed_at(photos, fitted(), 400)
    precious = tmp_path / "precious"
    os.link(f"{photos}.hub/1.offsets", precious)
    before = precious.read_bytes()
    apply(opened(photos), fitted())
    assert precious.read_bytes() == before
    assert (
        abs(stored(photos) - fitted().offsets(opened(photos).raw.reconstruct_n())).max()
        < 1e-5
    )


def test_an_index_that_is_a_pipe_is_named_and_not_waited_for(tmp_path, impatient):
    os.mkfifo(tmp_path / "photos.faiss")
    with pytest.raises(hubplugin.StoreError, match="it is no regular file"):
        opened(tmp_path / "photos.faiss")


def test_whoever_may_read_the_index_and_nobody_else_may_read_what_lies_beside_it(
    photos,
):
    photos.chmod(0o640)
    apply(opened(photos), fitted())
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in (photos, *Path(f"{photos}.hub").iterdir())
    }
    assert modes == {
        "photos.faiss": 0o640,
        "manifest.json": 0o640,
        "1.model": 0o640,
        "lock": 0o640,
    }
    assert Path(f"{photos}.hub").stat().st_mode & 0o777 == 0o750


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
def test_what_root_writes_belongs_to_the_owner_of_the_index(photos):
    os.chown(photos, 1234, 1234)
    apply(opened(photos), fitted())
    assert {
        path.stat().st_uid for path in (photos, *Path(f"{photos}.hub").rglob("*"))
    } == {1234}
