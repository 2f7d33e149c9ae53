"""What cannot be used is told in one line that names shard and row; what was found is not lost."""

import re
import tempfile
import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_all_start_methods, get_context

import numpy as np
import pytest
import torch

import hubplugin
from hubplugin.cluster import Workspace
from hubplugin.cluster import gallery as run
from hubplugin.errors import ClusterError, InputError
from hubplugin.vectors import shards_of
from tests.cluster.conftest import Serial
from tests.galleries import flat_index

BANK = np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", rng.normal(size=(50, 8)).astype(np.float32))
    return tmp_path


def fit(folder, executor=None, **more):
    """Three steps over all shards: reading, the answers of the bank, offsets."""
    given = {"executor": executor or Serial(), "answers": "left out"}
    return hubplugin.fit(str(folder / "*.npy"), BANK, "nnn", **given | more)


def row(number, value):
    """What puts `value` into row `number` of a shard."""

    def put(file):
        part = np.load(file)
        part[number] = value
        np.save(file, part)

    return put


@pytest.mark.parametrize(
    ("shard", "damage", "said"),
    [
        (2, row(17, np.nan), "row 17 holds a value that is NaN or infinity"),
        (3, lambda file: np.save(file, np.ones((5, 6), np.float32)), r"has 6 dimensions, targets, shard 0 .* has 8"),
        (2, lambda file: file.write_bytes(file.read_bytes()[:-100]), "damaged or truncated .npy file"),
    ],
)
def test_a_shard_that_cannot_be_used_is_named(folder, shard, damage, said):
    damage(folder / f"{shard}.npy")
    with pytest.raises(InputError, match=rf"^targets, shard {shard} \({shard}.npy\).* {said}"):
        fit(folder)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("FOLDER/?.npy", "query bank has 8 dimensions, targets has 6"),
        ("FOLDER/none-*.npy", "no file matches"),
        (["FOLDER/0.npy", "FOLDER/gone.npy"], r"^targets, shard 1 .*there is no file .*gone.npy"),
        (["FOLDER/empty.npy"], "none of its 1 shards has a vector"),
        (["FOLDER/x.parquet"], r"^targets, shard 0 \(x.parquet\).*damaged or truncated .parquet file"),
        (None, "an executor computes on the gallery: pass targets="),
        *((source, "workers cannot read .* from the memory of this process") for source in (BANK, [[1.0, 2.0]], 7)),
    ],
)
def test_targets_that_workers_cannot_use_are_refused_in_one_line(tmp_path, targets, said):
    np.save(tmp_path / "0.npy", np.ones((5, 6), np.float32))
    np.save(tmp_path / "empty.npy", np.ones((0, 8), np.float32))
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + b"nonsense" * 50 + b"PAR1")
    if isinstance(targets, str):
        targets = targets.replace("FOLDER", str(tmp_path))
    elif isinstance(targets, list) and isinstance(targets[0], str):
        targets = [each.replace("FOLDER", str(tmp_path)) for each in targets]
    with pytest.raises(InputError, match=said) as caught:
        hubplugin.fit(targets, BANK, executor=Serial())
    assert "\n" not in str(caught.value)


def test_a_file_that_became_shorter_since_it_was_divided(folder):
    shards = shards_of(folder / "0.npy", 2)
    np.save(folder / "0.npy", np.ones((30, 8), np.float32))
    with pytest.raises(InputError, match=r"shard 1 \(0.npy from row 25 on\): the file has 30 rows; it changed"):
        hubplugin.fit(shards, BANK, executor=Serial())


def test_what_cannot_be_fetched_from_a_bucket(folder, monkeypatch):
    files = pytest.importorskip("fsspec", reason="pip install '.[cluster]'").filesystem("memory")
    with pytest.raises(InputError, match=r"^targets, shard 0 \(gone.npy\): there is no file 'memory://parts/gone.npy'"):
        hubplugin.fit(["memory://parts/gone.npy"], BANK, executor=Serial())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(files), "get_file", full)
    with pytest.raises(InputError, match=r"^targets, shard 0 \(0.npy\): cannot be fetched .*No space left on device"):
        hubplugin.fit(["memory://parts/0.npy"], BANK, executor=Serial())


def test_a_full_disk_at_the_coordinator(folder, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hubplugin.cluster.workspace.np.savez", full)
    with pytest.raises(ClusterError, match="work' cannot keep what the workers found: No space left on device"):
        fit(folder, workspace=tmp_path / "work")


def test_a_secret_in_a_url_is_not_told():
    with pytest.raises(InputError) as told:
        hubplugin.fit("nosuch://me:secret@host/parts/*.npy", BANK, executor=Serial())
    assert "secret" not in str(told.value)


class Failing(Serial):
    """Loses the worker at some orders."""

    def __init__(self, lost: set[int], error: Exception):
        super().__init__()
        self.orders, self.lost, self.error = 0, lost, error

    def submit(self, fn, /, order):
        self.orders += 1
        if self.orders in self.lost:
            future: Future = Future()
            future.set_exception(self.error)
            return future
        return super().submit(fn, order)


def test_a_task_whose_worker_is_lost_is_done_again_and_no_other(folder):
    steady, losing = Serial(), Failing({2, 9, 10, 11, 30}, OSError("worker lost"))
    expected, found = fit(folder, steady), fit(folder, losing)
    assert found.fingerprint == expected.fingerprint
    assert sorted(losing.found) == sorted(steady.found)


class Abandoned(Serial):
    """Has no worker until somebody has asked whether it has one."""

    def __init__(self):
        super().__init__()
        self.waiting, self.asked = [], 0

    def submit(self, fn, /, order):
        if self.asked:
            return super().submit(fn, order)
        self.waiting.append((Future(), fn, order))
        return self.waiting[-1][0]

    def has_workers(self):
        self.asked += 1
        for future, fn, order in self.waiting:
            future.set_result(super().submit(fn, order).result())
        self.waiting.clear()
        return False


def test_a_cluster_without_workers_is_told_once_and_the_run_goes_on_with_new_ones(folder, monkeypatch, caplog):
    monkeypatch.setattr(run, "SILENT_SECONDS", 0.05)
    abandoned = Abandoned()
    assert fit(folder, abandoned).fingerprint == fit(folder).fingerprint
    told = [record.getMessage() for record in caplog.records if "has no worker" in record.getMessage()]
    assert (abandoned.asked, len(told)) == (1, 1)
    assert "start some" in told[0]


@pytest.mark.skipif("fork" not in get_all_start_methods(), reason="no fork")
@pytest.mark.parametrize("job", ["fit", "apply"])
def test_processes_that_are_forks_are_refused_in_one_line(folder, job):
    torch.ones(300, 300) @ torch.ones(300, 300)  # starts threads, which a fork does not have
    store = hubplugin.open_store(flat_index(folder / "photos.faiss", np.load(folder / "0.npy")))
    with (
        ProcessPoolExecutor(2, mp_context=get_context("fork")) as executor,
        pytest.raises(InputError, match=r'^the processes .* with mp_context=multiprocessing\.get_context\("spawn"\)$'),
    ):
        fit(folder, executor) if job == "fit" else hubplugin.apply(store, BANK, executor=executor)


class Slow(Serial):
    """Answers only when it has been asked for long."""

    def submit(self, fn, /, order):
        future = Future()
        threading.Timer(0.5, lambda: future.set_result(fn(order))).start()
        return future


def test_a_long_wait_says_once_what_it_waits_for(folder, monkeypatch, caplog):
    monkeypatch.setattr(run, "SILENT_SECONDS", 0.02)
    monkeypatch.setattr(run, "LONG_SECONDS", 0.1)
    assert fit(folder, Slow()).fingerprint == fit(folder).fingerprint
    told = [record.getMessage() for record in caplog.records if "goes on waiting" in record.getMessage()]
    assert told
    assert re.match(
        r"nothing has come for 0\.1 s; .* for \d+ shards, such as targets, shard 0 \(0\.npy\): read", told[0]
    )


def test_a_task_that_fails_again_and_again_is_told_with_its_shard(folder):
    with pytest.raises(
        ClusterError, match=r"^targets, shard 0 \(0.npy\): reading the gallery failed 5 times.*OSError: gone"
    ):
        fit(folder, Failing({1, 5, 6, 7, 8}, OSError("gone")))


def test_a_rerun_does_only_what_was_not_done(folder, tmp_path):
    whole = Serial()
    expected = fit(folder, whole)
    for limit in (1, 6, 9, len(whole.found) - 1):
        where = tmp_path / f"work{limit}"
        with pytest.raises(KeyboardInterrupt):
            fit(folder, Serial(limit), workspace=where)
        again = Serial()
        assert fit(folder, again, workspace=where).fingerprint == expected.fingerprint
        assert len(again.found) == len(whole.found) - limit
        assert not where.exists()  # nothing is left behind


def test_a_rerun_after_a_shard_has_changed_reads_that_again(folder, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(folder, Serial(4), workspace=tmp_path / "work")
    np.save(folder / "1.npy", np.load(folder / "1.npy")[:40])
    again = Serial()
    found = fit(folder, again, workspace=tmp_path / "work")
    assert found.gallery.count == 190
    assert [each for each in again.found if each.startswith("reading")] == [
        "reading the gallery: targets, shard 1 (1.npy)"
    ]


def test_a_damaged_file_in_the_workspace_is_done_again(folder, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(folder, Serial(3), workspace=tmp_path / "work")
    damaged = next((tmp_path / "work").rglob("*.npz"))
    damaged.write_bytes(damaged.read_bytes()[:50])
    assert fit(folder, workspace=tmp_path / "work").fingerprint == fit(folder).fingerprint


def test_nothing_is_left_in_the_temporary_folder(folder, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    fit(folder)
    with pytest.raises(KeyboardInterrupt):
        fit(folder, Serial(3))
    assert not list((tmp_path / "tmp").iterdir())


def test_two_runs_in_one_workspace(tmp_path):
    with Workspace(tmp_path / "work"), pytest.raises(ClusterError, match="another run is at work in"):
        Workspace(tmp_path / "work")


def test_a_workspace_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="cannot write in"):
        Workspace(tmp_path / "file" / "work")


def test_files_of_others_in_the_workspace_stay(folder, tmp_path):
    (tmp_path / "work" / "mine").mkdir(parents=True)
    fit(folder, workspace=tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mine"]


STEP = "offsets-0123456789abcdef"


@pytest.mark.parametrize("name", ["lock", STEP])
def test_nothing_is_written_to_or_deleted_through_a_link_in_the_workspace(folder, tmp_path, name):
    victim, work = tmp_path / "victim", tmp_path / "work"
    victim.mkdir()
    work.mkdir()
    kept = victim / f"00000-{STEP[-16:]}.npz"
    kept.write_text("precious")
    if name == "lock":
        (work / name).symlink_to(victim / "new")
        with pytest.raises(ClusterError, match=r"cannot write in .*work': it is a link"):
            fit(folder, workspace=work)
    else:
        (work / name).symlink_to(victim)
        fit(folder, workspace=work)
        with Workspace(work) as workspace, pytest.raises(ClusterError, match=f"{STEP} is a link"):
            workspace.write(STEP, f"00000-{STEP[-16:]}", {"x": np.zeros(1)})
    assert [path.read_text() for path in victim.iterdir()] == ["precious"]


def test_what_somebody_else_keeps_in_the_workspace_under_a_like_name_stays(folder, tmp_path):
    work = tmp_path / "work"
    (work / STEP).mkdir(parents=True)
    (work / STEP / "mine").write_text("precious")
    fit(folder, workspace=work)
    assert (work / STEP / "mine").read_text() == "precious"
    (work / "lock").write_text("precious")
    with pytest.raises(ClusterError, match="its file 'lock' is somebody else's; name another folder"):
        fit(folder, workspace=work)
    assert (work / "lock").read_text() == "precious"


def test_ctrl_c_cancels_what_was_sent(folder):
    sent: list[Future] = []

    class Pending(Executor):
        def submit(self, fn, /, *args):
            sent.append(Future())
            if len(sent) == 4:
                raise KeyboardInterrupt
            return sent[-1]

    with pytest.raises(KeyboardInterrupt):
        fit(folder, Pending())
    assert [future.cancelled() for future in sent[:3]] == [True] * 3


def test_progress_tells_shards_and_targets(folder):
    told: list[tuple[str, int, int]] = []
    fit(folder, compute=hubplugin.Compute(progress=lambda *each: told.append(each)))
    whole = [(what, done, total) for what, done, total in told if what == "offsets, 4 shards"]
    assert whole == [("offsets, 4 shards", done, 200) for done in (50, 100, 150, 200)]


@pytest.mark.parametrize("name", ["shards", "workspace"])
def test_what_is_for_workers_is_refused_without_them(name, tmp_path):
    with pytest.raises(InputError, match=f"^{name}= is for the workers of an executor: pass executor=, too"):
        hubplugin.fit(BANK, BANK, **{name: 3 if name == "shards" else tmp_path})


def test_what_has_come_is_kept_where_the_caller_stops(folder, tmp_path):
    def stop(what, done, total):
        if what.startswith("offsets") and done > 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(folder, compute=hubplugin.Compute(progress=stop), workspace=tmp_path / "work")
    assert len(list((tmp_path / "work").glob("offsets-*/*.npz"))) == 4


def test_zero_vectors_are_left_out_and_counted(folder):
    row(4, 0)(folder / "1.npy")
    row(slice(None), 0)(folder / "2.npy")
    with pytest.warns(UserWarning, match="^targets: 51 zero vectors are left out, and keep the offset 0$"):
        model = fit(folder)
    with pytest.warns(UserWarning, match="targets: 51 zero vectors"):
        alone = hubplugin.fit(
            np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))]), BANK, "nnn", answers="left out"
        )
    assert model.gallery.count == alone.gallery.count
    np.testing.assert_allclose(model.offsets(BANK), alone.offsets(BANK), atol=1e-6)
