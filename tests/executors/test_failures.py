"""What cannot be used is told in one line that names shard and row."""

import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_all_start_methods, get_context

import numpy as np
import pytest

import hubplugin
from hubplugin.errors import ClusterError, InputError
from hubplugin.executors import shards_of
from tests.executors.conftest import Serial
from tests.galleries import normal
from tests.refusals import refused

BANK = normal(np.random.default_rng(1), 40, 8)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", normal(rng, 50, 8))
    return tmp_path


def fit(folder, executor=None, **more):
    given = {"executor": executor or Serial(), "answers": "left out"}
    return hubplugin.fit(str(folder / "*.npy"), BANK, "nnn", **given | more)


def put(file, number, value):
    """Put `value` into row `number` of a shard."""
    part = np.load(file)
    part[number] = value
    np.save(file, part)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda file: put(file, 17, np.nan),
            "row 17 holds a value that is NaN, infinity",
        ),
        (
            lambda file: np.save(file, np.ones((5, 6), np.float32)),
            "has 6 dimensions, the query bank has 8",
        ),
        (
            lambda file: file.write_bytes(file.read_bytes()[:-100]),
            "cannot be read as .npy",
        ),
    ],
)
def test_a_shard_that_cannot_be_used_is_named(folder, damage, said):
    damage(folder / "2.npy")
    with refused(InputError, rf"^targets \(2.npy.*\).* {said}"):
        fit(folder)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("none-*.npy", "no file matches"),
        (["0.npy", "gone.npy"], "^targets: there is no file .*gone.npy"),
        (["empty.npy"], "targets are empty"),
        (None, "workers cannot read NoneType"),
        (BANK, "workers cannot read ndarray from the memory of this process"),
    ],
)
def test_targets_that_workers_cannot_use_are_refused_in_one_line(
    folder, monkeypatch, targets, said
):
    monkeypatch.chdir(folder)
    np.save("empty.npy", np.ones((0, 8), np.float32))
    with refused(InputError, said):
        hubplugin.fit(targets, BANK, executor=Serial())


def test_a_file_that_became_shorter_since_it_was_divided(folder):
    shards = shards_of(folder / "0.npy", 2)
    np.save(folder / "0.npy", np.ones((30, 8), np.float32))
    said = r"targets \(0.npy, rows 25 to 49\): the file has 30 rows; it changed"
    with refused(InputError, said):
        hubplugin.fit(shards, BANK, executor=Serial())


class Pending(Executor):
    """Never answers, and raises in the place of a wait."""

    def __init__(self):
        self.futures: list[Future] = []

    def submit(self, fn, /, number, shard):
        future: Future = Future()
        if number == 1:
            future.set_exception(OSError("the worker is on fire\nand more"))
        elif number == 0:
            future.set_result(fn(number, shard))
        self.futures.append(future)
        return future


def test_a_task_that_fails_is_told_with_its_shard_and_the_others_are_cancelled(folder):
    executor = Pending()
    said = r"^targets \(1.npy, rows 0 to 49\): reading the gallery failed with OSError: the worker is on fire and more$"
    with refused(ClusterError, said):
        fit(folder, executor)
    assert all(future.cancelled() for future in executor.futures[2:])


def test_processes_that_are_forks_are_refused_in_one_line(folder):
    if "fork" not in get_all_start_methods():
        pytest.skip("this system has no fork")
    said = r"^the processes of this executor are forks, .* mp_context=.*spawn.*$"
    with (
        ProcessPoolExecutor(1, mp_context=get_context("fork")) as forks,
        refused(InputError, said),
    ):
        fit(folder, forks)


def test_progress_tells_shards(folder):
    told, thread = [], threading.current_thread()

    def progress(what, done, total):
        assert threading.current_thread() is thread
        told.append((what, done, total))

    fit(folder, compute=hubplugin.Compute(progress=progress))
    label = "reading the gallery, 4 shards"
    assert told[:4] == [(label, done, 4) for done in (1, 2, 3, 4)]


def test_shards_are_refused_without_workers():
    said = "shards= are for workers: pass executor=, too"
    with refused(InputError, said):
        hubplugin.fit(BANK, BANK, "nnn", shards=2)


def test_zero_vectors_are_left_out_and_counted(folder):
    put(folder / "1.npy", 3, 0)
    np.save(folder / "2.npy", np.zeros((5, 8), np.float32))
    said = "targets: 6 zero vectors are left out, and get the offset 0"
    with pytest.warns(UserWarning, match=said):
        model = fit(folder)
    assert model.gallery.count == 149
