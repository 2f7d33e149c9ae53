"""`hubplugin.Recorder`: queries recorded while an application runs, read as a bank."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import hubplugin
from hubplugin import InputError, Recorder
from hubplugin.recording import clear, folder_within, read, thin


@pytest.fixture
def queries() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "photos.queries"


def rows(vectors: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in vectors}


def recorded(folder: Path, queries: np.ndarray, size: int = 10_000) -> Recorder:
    recorder = Recorder(folder, size)
    recorder.add(queries)
    recorder.flush()
    return recorder


def test_what_was_asked_is_read_as_a_bank_without_repetitions(folder: Path, queries: np.ndarray) -> None:
    started = time.time()
    recorder = Recorder(folder)
    for query in (*queries, *queries[:50]):
        recorder.add(query)
    recorder.close()
    found = read(folder)
    assert found is not None
    assert rows(found.array()) == rows(queries)
    assert (found.rows, found.seen, found.different, found.texts) == (300, 350, 300, None)
    assert started <= found.first <= found.times.min() <= found.times.max() <= found.last <= time.time()
    assert hubplugin.fit(found, "is", queries).dim == 8


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, lambda query: np.asarray(query, np.float64)])
def test_the_same_query_in_another_form_is_the_same(folder: Path, queries: np.ndarray, kind: type) -> None:
    recorder = recorded(folder, queries[:1])
    recorder.add(kind(queries[0].tolist()))
    recorder.close()
    found = read(folder)
    assert found is not None
    assert (found.rows, found.seen) == (1, 2)


def test_the_size_is_kept_to_and_parts_of_several_recorders_are_one_sample(folder: Path, queries: np.ndarray) -> None:
    several = [recorded(folder, queries[:200], 50), recorded(folder, queries[100:], 50)]
    alone = recorded(folder.with_name("alone"), queries, 50)
    found, whole = read(folder), read(alone.folder)
    assert found is not None
    assert whole is not None
    assert rows(whole.array()) <= rows(found.array())
    assert 50 <= found.rows < 100
    assert found.seen == 400
    assert len(list(folder.glob("*.safetensors"))) == 2
    for each in several:
        each.close()


def test_a_restart_takes_up_the_part_that_was_left(folder: Path, queries: np.ndarray) -> None:
    recorded(folder, queries[:100], 50).close()
    recorded(folder, queries[100:], 50).close()
    found = read(folder)
    alone = recorded(folder.with_name("alone"), queries, 50)
    whole = read(alone.folder)
    assert found is not None
    assert whole is not None
    assert rows(found.array()) == rows(whole.array())
    assert [path.name for path in folder.glob("*.safetensors")] == ["part-0.safetensors"]


def test_texts_are_kept_only_if_asked_for(folder: Path, queries: np.ndarray) -> None:
    for texts in (False, True):
        recorder = Recorder(folder, texts=texts)
        recorder.add(queries[0], text="red shoes")
        recorder.add(queries[1])
        recorder.close()
        found = read(folder)
        assert found is not None
        assert (found.texts is not None) == texts
    assert sorted(found.texts or (), key=str) == [None, "red shoes"]


def test_files_are_readable_by_their_owner_only(folder: Path, queries: np.ndarray) -> None:
    recorded(folder, queries).close()
    assert stat.S_IMODE((folder / "part-0.safetensors").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_queries_of_another_model_are_kept_apart(folder: Path, queries: np.ndarray) -> None:
    recorder = recorded(folder, queries[:, :4])
    recorder.add(queries[:10])
    recorder.flush()
    other = recorded(folder, queries[:20, :4])
    found, eight, four = read(folder), read(folder, 8), read(folder, 4)
    assert found is not None
    assert eight is not None
    assert four is not None
    assert (found.dim, eight.rows, four.rows) == (4, 10, 20)
    assert read(folder, 5) is None
    recorder.close()
    other.close()


def test_what_is_cleared_or_thinned_stays_so_while_a_recorder_runs(folder: Path, queries: np.ndarray) -> None:
    recorder = recorded(folder, queries[:200])
    thin(folder, 20)
    found = read(folder)
    assert found is not None
    assert found.rows == 20
    assert 50 < found.different < 800
    recorder.flush()  # it notices
    recorder.add(queries[200:])
    recorder.flush()
    found = read(folder)
    assert found is not None
    assert 20 < found.rows < 100, "of 100 more queries a tenth is kept"
    clear(folder)
    assert read(folder) is None
    recorder.flush()
    assert read(folder) is None
    recorder.add(queries[:5])
    recorder.close()
    found = read(folder)
    assert found is not None
    assert found.rows == 5
    with pytest.raises(InputError, match="at least 1"):
        thin(folder, 0)


def test_only_what_was_asked_lately_is_read_where_that_is_wanted(folder: Path, queries: np.ndarray) -> None:
    recorder = recorded(folder, queries[:100])
    moment = time.time()
    time.sleep(0.01)
    recorder.add(queries[90:120])
    recorder.close()
    lately = read(folder, since=moment)
    assert lately is not None
    assert rows(lately.array()) == rows(queries[90:120])
    assert read(folder, since=time.time() + 1) is None


def test_a_folder_that_cannot_be_written_is_one_line_in_the_log(
    tmp_path: Path, queries: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    recorder = Recorder(tmp_path / "file" / "queries", seconds=0.01)
    recorder.add(queries)
    time.sleep(0.1)
    for _ in range(3):
        recorder.add(queries)
        recorder.flush()
    recorder.close()
    (record,) = caplog.records
    assert "queries are not recorded in" in record.message
    assert "Not a directory" in record.message
    assert record.levelno == logging.WARNING


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to write to")
def test_a_full_disk_loses_nothing_that_was_there_and_recording_goes_on_after_it(
    folder: Path, queries: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorded(folder, queries[:10])
    (folder / "part-0.tmp").symlink_to("/dev/full")
    recorder.add(queries[10:20])
    recorder.flush()
    found = read(folder)
    assert found is not None
    assert found.rows == 10
    assert "No space left" in caplog.text
    (folder / "part-0.tmp").unlink()
    recorder.flush()
    found = read(folder)
    assert found is not None
    assert found.rows == 20
    recorder.close()


@pytest.mark.parametrize("given", [object(), "words", [[1, 2], [3]], np.zeros((2, 2, 2)), None, [], ["a"]])
def test_whatever_is_added_nothing_is_raised(folder: Path, queries: np.ndarray, given: object) -> None:
    recorder = Recorder(folder)
    recorder.add(given)  # type: ignore[arg-type]
    recorder.add(queries)
    recorder.close()
    found = read(folder)
    assert found is not None
    assert found.rows == len(queries)


def test_damaged_parts_are_left_out_and_left_alone(
    folder: Path, queries: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    recorded(folder, queries).close()
    (folder / "part-1.safetensors").write_bytes((folder / "part-0.safetensors").read_bytes()[:500])
    save_file({"vectors": queries}, folder / "part-2.safetensors")
    (folder / "part-3.safetensors").write_bytes(b"")
    found = read(folder)
    assert found is not None
    assert found.rows == 300
    assert [f"part-{number}.safetensors" in caplog.text for number in range(4)] == [False, True, True, True]
    held, second = recorded(folder, queries[:1]), recorded(folder, queries[:2])
    assert (folder / "part-4.safetensors").exists(), "the first that is free and not damaged"
    assert (folder / "part-3.safetensors").read_bytes() == b""
    held.close()
    second.close()


def test_names_become_folders_inside(tmp_path: Path) -> None:
    assert folder_within(tmp_path, "photos", "") == tmp_path / "photos"
    assert folder_within(tmp_path, "a/b", "..") == tmp_path / "a%2Fb" / "%2E."
    recorder = Recorder(tmp_path)
    assert recorder.within("photos", "image").folder == tmp_path / "photos" / "image"
    assert recorder.within("photos", "image") is recorder.within("photos", "image")


def test_threads_lose_nothing(folder: Path, queries: np.ndarray) -> None:
    recorder = Recorder(folder, seconds=0.001)
    threads = [threading.Thread(target=recorder.add, args=(queries[n::4],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    found = read(folder)
    assert found is not None
    assert (found.rows, found.seen) == (300, 300)


def test_what_makes_no_sense_is_refused(folder: Path) -> None:
    for settings in ({"size": 0}, {"seconds": 0}):
        with pytest.raises(InputError, match="above 0"):
            Recorder(folder, **settings)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"expected a list of names, such as \['photos'\]"):
        Recorder(folder, collections="photos")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_worker_has_a_part_of_its_own(folder: Path, queries: np.ndarray) -> None:
    recorder = recorded(folder, queries[:100])
    child = os.fork()
    if child == 0:
        recorder.add(queries[100:150])
        recorder.flush()
        os._exit(0)
    os.waitpid(child, 0)
    recorder.add(queries[150:160])
    recorder.flush()
    found = read(folder)
    assert found is not None
    assert (found.rows, found.seen) == (160, 160)
    assert len(list(folder.glob("*.safetensors"))) == 2
    recorder.close()


WORKER = """
import sys, numpy as np, hubplugin
recorder = hubplugin.Recorder(sys.argv[1], 200, seconds=0.001)
rng = np.random.default_rng(int(sys.argv[2]))
print("recording", flush=True)
for _ in range(int(sys.argv[3])):
    recorder.add(rng.normal(size=64))
"""


def worker(folder: Path, seed: int, count: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WORKER, str(folder), str(seed), str(count)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_several_processes_record_at_the_same_time_and_end_without_a_call(folder: Path) -> None:
    workers = [worker(folder, seed, 2_000) for seed in (1, 2, 2)]
    assert [each.wait(60) for each in workers] == [0, 0, 0]
    found = read(folder)
    assert found is not None
    assert found.seen == 6_000
    assert found.rows >= 200
    assert 3_000 < found.different < 5_200, "4,000, since two of them asked the same"


def seen_above(folder: Path, seen: int) -> int:
    """How many queries the folder has seen, once they are more than `seen` and fill a sample: a slow machine may need
    long for it."""
    for _ in range(6_000):
        found = read(folder)
        if found is not None and found.seen > seen and found.rows == 200:
            return found.seen
        time.sleep(0.01)
    raise AssertionError(f"nothing was written for a minute, after {seen:,} queries")


@pytest.mark.slow
def test_a_kill_while_it_is_written_leaves_a_sample_that_is_whole(folder: Path) -> None:
    seen = 0
    for run in range(8):
        killed = worker(folder, run, 10**9)
        written = seen_above(folder, seen)  # the next one goes on where the last one stopped
        time.sleep(0.013 * run)  # it writes without end
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        found = read(folder)
        assert found is not None
        assert found.rows == 200
        assert found.seen >= written, "what was written stays"
        seen = found.seen
    assert len(list(folder.glob("*.safetensors"))) == 1
