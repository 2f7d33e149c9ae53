"""`hubplugin.Recorder`: queries recorded while an application runs, read as a bank."""

import json
import logging
import math
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import hubplugin
from hubplugin import InputError, Recorder
from hubplugin.recording import clear, folder_within, read, thin
from hubplugin.recording.parts import writing_alone
from hubplugin.recording.sample import digest_of


@pytest.fixture
def queries():
    return np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "photos.queries"


def rows(vectors):
    return {row.tobytes() for row in vectors}


def recorded(folder, queries, size=10_000):
    recorder = Recorder(folder, size)
    recorder.add(queries)
    recorder.flush()
    return recorder


def test_what_was_asked_is_read_as_a_bank_without_repetitions(folder, queries):
    started = time.time()
    recorder = Recorder(folder)
    for query in (*queries, *queries[:50]):
        recorder.add(query)
    recorder.close()
    found = read(folder)
    assert rows(found.array()) == rows(queries)
    assert (found.rows, found.seen, found.different, found.texts) == (300, 350, 300, None)
    assert started <= found.first <= found.times.min() <= found.times.max() <= found.last <= time.time()
    assert hubplugin.fit(queries, found, "is").dim == 8


def test_the_size_is_kept_to_and_parts_of_several_recorders_are_one_sample(folder, queries):
    several = [recorded(folder, queries[:200], 50), recorded(folder, queries[100:], 50)]
    alone = recorded(folder.with_name("alone"), queries, 50)
    found, whole = read(folder), read(alone.folder)
    assert rows(whole.array()) <= rows(found.array())
    assert 50 <= found.rows < 100
    assert found.seen == 400
    assert len(list(folder.glob("*.safetensors"))) == 2
    for each in several:
        each.close()


def test_a_restart_takes_up_the_part_that_was_left(folder, queries):
    recorded(folder, queries[:100], 50).close()
    recorded(folder, queries[100:], 50).close()
    found = read(folder)
    alone = recorded(folder.with_name("alone"), queries, 50)
    whole = read(alone.folder)
    assert rows(found.array()) == rows(whole.array())
    assert [path.name for path in folder.glob("*.safetensors")] == ["part-0.safetensors"]


@pytest.mark.parametrize("by", [Recorder.id_of, list, np.asarray])
def test_clicks_are_answers_of_the_queries_that_they_belong_to(folder, queries, by):
    recorder = recorded(folder, queries[:6])
    given = [(0, 5), (1, "a"), (1, "b"), (1, "b"), (2, "17"), (3, uuid.UUID(int=7)), (4, np.int64(8)), (5, "042")]
    for row, target in (*given, (9, 1)):
        recorder.click(by(queries[row].tolist()), target)
    recorder.close()
    found = read(folder)
    assert found.answers is not None
    answers = dict(zip(map(bytes, found.array()), found.answers.tolist(), strict=True))
    expected = [5, "b", 17, "00000000-0000-0000-0000-000000000007", 8, "042"]
    assert [answers[bytes(query)] for query in queries[:6]] == expected
    assert sum(sum(counts.values()) for counts in found.clicks) == 8, "one is of a query that nobody asked"


def test_the_id_of_a_query_is_short_and_the_same_for_every_form_of_it(queries):
    (one, two, *_) = queries
    forms = (list, tuple, np.asarray, np.float32)
    assert {Recorder.id_of(form(one.tolist())) for form in forms} == {Recorder.id_of(one)}
    assert Recorder.id_of(two) != Recorder.id_of(one)
    assert re.fullmatch("[0-9a-f]{16}", Recorder.id_of(one))
    with pytest.raises(InputError, match=r"one query \[d\]; got 300"):
        Recorder.id_of(queries)


def test_a_process_that_only_hears_of_clicks_adds_to_the_same_sample(folder, queries):
    hearing = Recorder(folder)
    hearing.click(Recorder.id_of(queries[3]), 30)
    hearing.flush()
    assert read(folder) is None
    searching = recorded(folder, queries[:10])
    searching.click(queries[3], 30)
    for each in (hearing, searching):
        each.close()
    later = Recorder(folder)
    later.click(queries[3], 31)
    later.click(queries[4], 40)
    later.close()
    found = read(folder)
    assert (found.rows, found.seen) == (10, 10)
    clicks = dict(zip(map(bytes, found.array()), found.clicks, strict=True))
    assert (clicks[bytes(queries[3])], clicks[bytes(queries[4])]) == ({30: 2, 31: 1}, {40: 1})
    assert len(list(folder.glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("query", "target", "said"),
    [
        ("my red shoes", 1, "its id of 16 hexadecimal digits; got a text of 12 characters"),
        (np.zeros((2, 2, 2)), 1, "got shape (2, 2, 2)"),
        (None, 1, ""),
        *(("0" * 16, target, "expected the id of a target") for target in (-1, 1.5, True, None, "", "x" * 201)),
    ],
)
def test_what_is_no_click_is_one_line_in_the_log_without_what_was_written(folder, queries, caplog, query, target, said):
    recorder = Recorder(folder)
    for _ in range(3):
        recorder.click(query, target)
    recorder.add(queries)
    recorder.close()
    found = read(folder)
    assert (found.rows, found.answers) == (300, None)
    (record,) = caplog.records
    assert record.message.startswith(f"a click is not recorded in {folder}: ")
    assert said in record.message
    assert "shoes" not in record.message
    assert "xxx" not in record.message


def test_texts_are_kept_only_if_asked_for(folder, queries):
    for texts in (False, True):
        recorder = Recorder(folder, texts=texts)
        recorder.add(queries[0], text="red shoes")
        recorder.add(queries[:2])
        recorder.close()
        found = read(folder)
        assert (found.texts is not None) == texts
    assert sorted(found.texts or (), key=str) == [None, "red shoes"]


def test_files_are_readable_by_their_owner_only(folder, queries):
    recorded(folder, queries).close()
    assert stat.S_IMODE((folder / "part-0.safetensors").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_queries_of_another_model_are_kept_apart(folder, queries):
    recorder = recorded(folder, queries[:, :4])
    recorder.add(queries[:10])
    recorder.flush()
    other = recorded(folder, queries[:20, :4])
    found, eight, four = read(folder), read(folder, 8), read(folder, 4)
    assert (found.dim, eight.rows, four.rows) == (4, 10, 20)
    assert read(folder, 5) is None
    recorder.close()
    other.close()


def test_what_is_cleared_or_thinned_stays_so_with_its_clicks_while_a_recorder_runs(folder, queries):
    recorder = recorded(folder, queries[:200])
    for query in queries[:200]:
        recorder.click(query, 1)
    recorder.flush()
    thin(folder, 20)
    found = read(folder)
    assert found.answers.tolist() == [1] * 20
    assert 50 < found.different < 800
    recorder.flush()  # it notices
    recorder.click(found.array()[0], 2)
    recorder.add(queries[200:])
    recorder.flush()
    again = read(folder)
    assert 20 < again.rows < 100, "of 100 more queries a tenth is kept"
    assert sum(sum(counts.values()) for counts in again.clicks) == 21
    clear(folder)
    assert read(folder) is None
    recorder.flush()
    assert read(folder) is None
    recorder.add(queries[:5])
    recorder.close()
    found = read(folder)
    assert (found.rows, found.answers) == (5, None)
    with pytest.raises(InputError, match="at least 1"):
        thin(folder, 0)


def test_only_what_was_asked_lately_is_read_where_that_is_wanted(folder, queries):
    recorder = recorded(folder, queries[:100])
    moment = time.time()
    time.sleep(0.01)
    recorder.add(queries[90:120])
    recorder.close()
    lately = read(folder, since=moment)
    assert rows(lately.array()) == rows(queries[90:120])
    assert read(folder, since=time.time() + 1) is None


def test_a_folder_that_cannot_be_written_is_one_line_in_the_log(tmp_path, queries, caplog):
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


def test_a_full_disk_loses_nothing_that_was_there_and_recording_goes_on_after_it(folder, caplog, full_disk):
    queries = np.random.default_rng(0).normal(size=(2_000, 64)).astype(np.float32)
    recorder = recorded(folder, queries[:10])
    recorder.add(queries[10:])
    with full_disk():
        recorder.flush()
        assert read(folder).rows == 10
        assert "File too large; searches go on" in caplog.text
        assert sorted(path.name for path in folder.iterdir()) == ["part-0.lock", "part-0.safetensors"]
    recorder.flush()
    assert read(folder).rows == 2_000
    recorder.close()


@pytest.mark.parametrize("given", [object(), "words", [[1, 2], [3]], np.zeros((2, 2, 2)), None, [], ["a"]])
def test_whatever_is_added_nothing_is_raised(folder, queries, given):
    recorder = Recorder(folder)
    recorder.add(given)
    recorder.add(queries)
    recorder.close()
    assert read(folder).rows == len(queries)


def changed(part, to, about=None, **arrays):
    """Writes `part` with other entries in its header, or other arrays, to the file `to`."""
    with safe_open(part, framework="np") as file:
        content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        header = json.loads(file.metadata()["hubplugin"])
    save_file(content | arrays, to, {"hubplugin": json.dumps(header | (about or {}))})


ABOUT = [
    *({"size": value} for value in (-1_000, 0, 2.5, "10", None, math.inf, True, [1])),
    *({"limit": value} for value in (-1, 2**64, 1e400, None)),
    *({"seen": value} for value in (-1, math.inf, math.nan, "many")),
    *({"first": value} for value in (math.inf, math.nan, 1e20, -(10**400), "today", [])),
    *({"format": value} for value in ("1", None, [])),
]
ARRAYS = [
    {"vectors": np.zeros((), np.float32)},
    {"vectors": np.zeros((300, 0), np.float32)},
    {"vectors": np.zeros((300, 8), np.float32)},
    {"digests": np.zeros((300, 1), np.uint64)},
    {"times": np.full(300, np.inf)},
    {"times": np.zeros(299)},
    {"texts": np.frombuffer(b"[1]", np.uint8)},
    {"texts": np.frombuffer(json.dumps([7] * 300).encode(), np.uint8)},
    {"texts": np.frombuffer(b"[" * 100_000, np.uint8)},
]


def clicks(given):
    """What is wrong in the clicks of a part, though they are the bytes that were written."""
    content = given if isinstance(given, bytes) else json.dumps(given).encode()
    return {"about": {"format": 2, "clicks": digest_of(content)}, "clicks": np.frombuffer(content, np.uint8)}


CLICKS = [
    {"about": {"format": 2, "clicks": 7}, "clicks": np.frombuffer(b"[]", np.uint8)},
    {"about": {"format": 2, "clicks": 7}},
    *map(clicks, (b"[", b"[" * 100_000, [7], [["7", [[1, 1]]]], [[-1, [[1, 1]]]], [[2**64, [[1, 1]]]], [[7, []]])),
    *(clicks([[7, [[1, count]]]]) for count in (0, -1, 1.5, True, "1", None)),
    *(clicks([[7, [[target, 1]]]]) for target in (-1, 1.5, True, None, "", "17", "x" * 201, [1])),
    clicks([[7, [[target, 1] for target in range(9)]]]),
]


@pytest.mark.parametrize(
    "damage", [{"about": about} for about in ABOUT] + ARRAYS + CLICKS, ids=lambda damage: str(damage)[:40]
)
def test_a_part_that_makes_no_sense_is_left_out_with_a_warning(damage, folder, queries, caplog):
    recorded(folder, queries).close()
    changed(folder / "part-0.safetensors", folder / "part-1.safetensors", **damage)
    before = (folder / "part-1.safetensors").read_bytes()
    found = read(folder)
    assert (rows(found.array()), found.seen) == (rows(queries), 300)
    (record,) = caplog.records
    assert "part-1.safetensors is damaged (" in record.message
    assert record.message.endswith("); left out")
    first, second = recorded(folder, queries[:1]), recorded(folder, queries[:1])  # part-0 and, beyond it, part-2
    first.close()
    second.close()
    assert (folder / "part-1.safetensors").read_bytes() == before
    assert (folder / "part-2.safetensors").exists()


def test_whatever_byte_changes_a_part_is_left_out_or_holds_what_was_asked(folder, queries, rng):
    recorder = Recorder(folder, texts=True)
    for number, query in enumerate(queries[:12]):
        recorder.add(query, text="red shoes")
        recorder.click(query, number)
    recorder.close()
    expected = {bytes(query): {number: 1} for number, query in enumerate(queries[:12])}
    part = folder / "part-0.safetensors"
    whole = part.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    left_out = 0
    for _ in range(1_500):
        content = bytearray(whole)
        for place in rng.integers(header if rng.random() < 0.8 else len(whole), size=rng.integers(1, 4)):
            content[place] = (
                rng.choice(list(b'0123456789-.,:"[]{}eENI\\\x00\xff')) if rng.random() < 0.8 else rng.integers(256)
            )
        part.write_bytes(content[: rng.integers(len(whole))] if rng.random() < 0.1 else content)
        found = read(folder, dim=8)
        left_out += found is None
        if found is not None:
            assert rows(found.array()) <= rows(queries[:12])
            assert found.answers is None or all(
                expected[bytes(query)] == counts for query, counts in zip(found.array(), found.clicks, strict=True)
            )
    assert 500 < left_out < 1_500


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_what_is_no_file_of_a_recorder_is_left_out(folder, queries, caplog):
    recorded(folder, queries).close()
    os.mkfifo(folder / "part-1.safetensors")
    (folder / "part-2.safetensors").mkdir()
    (folder / "part-3.safetensors").write_bytes((folder / "part-0.safetensors").read_bytes()[:500])
    save_file({"vectors": queries}, folder / "part-4.safetensors")
    (folder / "part-5.safetensors").write_bytes(b"")
    assert read(folder).rows == 300
    assert [f"part-{number}.safetensors is damaged (" in caplog.text for number in range(6)] == [False] + [True] * 5
    assert caplog.text.count("(it is no file); left out") == 2


def test_a_part_that_is_damaged_while_it_is_recorded_to_is_written_anew(folder, queries, caplog):
    recorder = recorded(folder, queries[:100])
    (folder / "part-0.safetensors").write_bytes(b"damaged")
    recorder.add(queries[100:])
    recorder.close()
    found = read(folder)
    assert (rows(found.array()), found.seen) == (rows(queries), 300)
    assert "part-0.safetensors is damaged" in caplog.text


@pytest.mark.parametrize("text", [b"red shoes", 7, ["red", "shoes"], object()])
def test_a_text_that_is_none_is_left_out_and_recording_goes_on(text, folder, queries, caplog):
    recorder = Recorder(folder, texts=True)
    recorder.add(queries[0], text="before")
    for query in queries[1:3]:
        recorder.add(query, text=text)
    recorder.add(queries[3], text="after")
    recorder.close()
    found = read(folder)
    assert (found.seen, rows(found.array())) == (4, rows(queries[:4]))
    assert sorted(found.texts or (), key=str) == [None, None, "after", "before"]
    (record,) = caplog.records
    assert record.message.endswith(f"without their texts: expected a str, got {type(text).__name__}")


def test_what_a_killed_process_left_half_written_goes(folder, queries):
    def left(name):
        (folder / name).write_bytes(b"half")
        return folder / name

    recorded(folder, queries).close()
    half = left("part-0.safetensors.0123abcd.tmp")
    recorder = recorded(folder, queries)
    assert not half.exists()
    halves = [left("part-0.safetensors.0123abcd.tmp"), left("part-7.safetensors.0123abcd.tmp")]
    clear(folder)
    assert not any(half.exists() for half in halves)
    recorder.close()


def test_a_part_is_not_taken_up_while_it_is_thinned(folder, queries, monkeypatch):
    recorded(folder, queries).close()
    begun: list[threading.Thread] = []
    fsync, recorder = os.fsync, Recorder(folder)

    def meanwhile(file):
        if not begun:
            recorder.add(queries[:5])
            begun.append(threading.Thread(target=recorder.flush))
            begun[0].start()
            time.sleep(0.05)
            assert begun[0].is_alive(), "it waits"
        fsync(file)

    monkeypatch.setattr("os.fsync", meanwhile)
    thin(folder, 20)
    begun[0].join()
    recorder.close()
    assert [path.name for path in folder.glob("*.safetensors")] == ["part-0.safetensors"]
    assert 20 <= read(folder).rows <= 25


def test_a_folder_that_others_write_to_for_long_is_left_alone(folder, queries, monkeypatch, caplog):
    monkeypatch.setattr("hubplugin.recording.parts.PATIENCE", 0.05)
    recorder = recorded(folder, queries)
    recorder.flush()
    recorder.add(queries[:5] + 1)
    with writing_alone(folder):
        recorder.flush()
        assert "others are writing to it, try again; searches go on" in caplog.text
        with pytest.raises(OSError, match="others are writing"):
            thin(folder, 20)
    recorder.close()
    assert read(folder).rows == len(queries) + 5


def test_names_become_folders_inside(tmp_path):
    assert folder_within(tmp_path, "photos", "") == tmp_path / "photos"
    assert folder_within(tmp_path, "a/b", "..") == tmp_path / "a%2Fb" / "%2E."
    recorder = Recorder(tmp_path)
    assert recorder.within("photos", "image").folder == tmp_path / "photos" / "image"
    assert recorder.within("photos", "image") is recorder.within("photos", "image")


def test_threads_lose_nothing(folder, queries):
    recorder = Recorder(folder, seconds=0.001)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(recorder.add, [queries[n::4] for n in range(4)]))
    recorder.close()
    found = read(folder)
    assert (found.rows, found.seen) == (300, 300)


def test_what_makes_no_sense_is_refused(folder):
    for settings in ({"size": 0}, {"seconds": 0}):
        with pytest.raises(InputError, match="above 0"):
            Recorder(folder, **settings)
    with pytest.raises(InputError, match=r"expected a list of names, such as \['photos'\]"):
        Recorder(folder, collections="photos")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_worker_has_a_part_of_its_own(folder, queries):
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
    assert (found.rows, found.seen) == (160, 160)
    assert len(list(folder.glob("*.safetensors"))) == 2
    recorder.close()


WORKER = """
import sys, numpy as np, hubplugin
recorder = hubplugin.Recorder(sys.argv[1], 200, seconds=0.001)
rng = np.random.default_rng(int(sys.argv[2]))
print("recording", flush=True)
for _ in range(int(sys.argv[3])):
    query = rng.normal(size=64)
    recorder.add(query)
    recorder.click(recorder.id_of(query), 7)
"""


def worker(folder, seed, count):
    arguments = [sys.executable, "-c", WORKER, str(folder), str(seed), str(count)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_several_processes_record_at_the_same_time_and_end_without_a_call(folder):
    workers = [worker(folder, seed, 2_000) for seed in (1, 2, 2)]
    assert [each.wait(60) for each in workers] == [0, 0, 0]
    found = read(folder)
    assert found.seen == 6_000
    assert found.rows >= 200
    assert 3_000 < found.different < 5_200, "4,000, since two of them asked the same"
    assert all(counts in ({7: 1}, {7: 2}) for counts in found.clicks), "each query was clicked as often as it was asked"


def seen_above(folder, seen):
    """How many queries the folder has seen, once they are more than `seen` and fill a sample: a slow machine may need
    long for it."""
    for _ in range(6_000):
        found = read(folder)
        if found is not None and found.seen > seen and found.rows == 200:
            return found.seen
        time.sleep(0.01)
    raise AssertionError(f"nothing was written for a minute, after {seen:,} queries")


@pytest.mark.slow
def test_a_kill_while_it_is_written_leaves_a_sample_that_is_whole(folder):
    seen = 0
    for run in range(8):
        killed = worker(folder, run, 10**9)
        written = seen_above(folder, seen)  # the next one goes on where the last one stopped
        time.sleep(0.013 * run)  # it writes without end
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        found = read(folder)
        assert found.rows == 200
        assert found.clicks.count({7: 1}) >= 199, "but for one that was asked and not clicked yet"
        assert found.seen >= written, "what was written stays"
        seen = found.seen
    assert len(list(folder.glob("*.safetensors"))) == 1
