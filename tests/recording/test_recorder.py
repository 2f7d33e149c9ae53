"""`hubplugin.Recorder`: queries recorded while an application runs, read as a bank."""

import os
import re
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from uuid import UUID

import numpy as np
import pytest

import hubplugin
from hubplugin import InputError, Recorder, StoreError
from hubplugin.recording import FILE, folder_within, read
from tests.recording.recorders import recorded
from tests.refusals import refused


def rows(vectors):
    return {row.tobytes() for row in vectors}


def test_what_was_asked_is_read_as_a_bank_without_repetitions(folder, queries):
    started = time.time()
    recorder = Recorder(folder)
    for query in (*queries, *queries[:50]):
        recorder.add(query)
    recorder.close()
    found = read(folder)
    assert rows(found.array()) == rows(queries)
    assert (found.rows, found.seen) == (300, 350)
    assert found.texts is None
    assert started <= found.first <= found.last <= time.time()
    assert hubplugin.fit(queries, found, "is").dim == 8
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / FILE)]
    assert modes == [0o700, 0o600], "readable by their owner only"


def test_clicks_are_answers_of_the_queries_that_they_belong_to(folder, queries):
    recorder = recorded(folder, queries[:7])
    uuid = UUID(int=7)
    for query, target in zip(
        queries, [5, "17", uuid, np.int64(8), "042", -5, "-5"], strict=False
    ):
        recorder.click(Recorder.id_of(query), target)
    recorder.click(queries[0], "b")
    recorder.click(queries[0].tolist(), "b")
    recorder.click(queries[9], 1)  # which nobody asked
    recorder.close()
    found = read(folder)
    answers = dict(zip(found.ids, found.answers, strict=True))
    expected = ["b", 17, str(uuid), 8, "042", -5, -5]
    assert [answers[Recorder.id_of(query)] for query in queries[:7]] == expected
    assert sum(sum(counts.values()) for counts in found.clicks) == 9


def test_a_recorded_click_on_minus_one_is_read_as_none(folder, queries):
    recorded(folder, queries[:2], clicks=[3, 4])
    with closing(sqlite3.connect(folder / FILE)) as record, record:
        record.execute("UPDATE clicks SET target = '-1' WHERE target = '4'")
    found = read(folder)
    assert sorted(found.answers) == [-1, 3]
    assert {} in found.clicks


def test_the_id_of_a_query_is_short_and_the_same_for_every_form_of_it(queries):
    one = queries[0].tolist()
    forms = [form(one) for form in (list, tuple, np.asarray, np.float32)]
    (id,) = {Recorder.id_of(form) for form in forms}
    assert Recorder.id_of(queries[1]) != id
    assert re.fullmatch("[0-9a-f]{16}", id)
    with refused(InputError, r"one query \[d\]; got 300"):
        Recorder.id_of(queries)


@pytest.mark.parametrize(
    ("query", "target", "said"),
    [
        ("my red shoes", 1, "16 hexadecimal digits; got a text of 12 characters"),
        (np.zeros((2, 2, 2)), 1, "got shape (2, 2, 2)"),
        ("0" * 16, -1, "expected the id of a target: an integer other than -1"),
        ("0" * 16, "-1", "expected the id of a target: an integer other than -1"),
        ("0" * 16, "", "a text of 1 to 200 characters; got str"),
        ("0" * 16, True, "expected the id of a target"),
        ("0" * 16, "x" * 201, "expected the id of a target"),
    ],
)
def test_what_is_no_click_is_one_line_in_the_log_without_what_was_written(
    folder, queries, caplog, query, target, said
):
    recorder = recorded(folder, queries)
    for _ in range(3):
        recorder.click(query, target)
    recorder.close()
    assert read(folder).answers is None
    (message,) = caplog.messages
    assert message.startswith(f"a click is not recorded in {folder}: ")
    assert said in message
    assert not re.search("shoes|xxx", message)


def test_queries_of_each_dimension_have_a_sample_of_their_own(folder, queries):
    recorder = Recorder(folder, 100)
    for query in queries:
        recorder.add(query)
        recorder.add(query[:4])
    recorder.close()
    for dim in (8, 4):
        found = read(folder, dim)
        ids = sorted(Recorder.id_of(query[:dim]) for query in queries)
        assert found.ids == ids[:100]
        assert found.seen == 300
    assert read(folder).dim == 4, "that which was asked last"
    assert read(folder, 5) is None


def test_a_program_that_changes_its_folder_writes_where_it_began(
    folder, queries, monkeypatch
):
    monkeypatch.chdir(folder.parent)
    recorder = Recorder(folder.name)
    recorder.add(queries)
    monkeypatch.chdir("/")
    recorder.close()
    assert read(folder).rows == 300


def test_only_what_was_asked_lately_is_read_where_that_is_wanted(folder, queries):
    recorder = recorded(folder, queries[:100])
    moment = time.time()
    time.sleep(0.01)
    recorder.add(queries[90:120])
    recorder.close()
    lately = read(folder, since=moment)
    assert rows(lately.array()) == rows(queries[90:120])
    assert read(folder, since=time.time() + 1) is None


def test_a_full_disk_keeps_what_was_there_and_recording_goes_on_after_it(
    folder, caplog, full_disk
):
    queries = np.random.default_rng(0).normal(size=(3_000, 64))
    recorder = recorded(folder, queries[:10])
    recorder.add(queries[10:2_000])
    with full_disk():
        recorder.flush()
        assert read(folder).rows == 10
        assert "record.sqlite cannot be used (disk I/O error)" in caplog.text
    recorder.add(queries[2_000:])
    recorder.close()
    assert read(folder).rows == 1_010


NO_QUERIES = [object(), "words", [[1, 2], [3]], np.zeros((2, 2, 2)), None, [], ["a"]]
NO_DIRECTIONS = [np.full(8, value) for value in (0, np.nan, np.inf)]


@pytest.mark.parametrize("given", [*NO_QUERIES, *NO_DIRECTIONS])
def test_whatever_is_added_nothing_is_raised_and_what_has_no_direction_is_counted(
    folder, queries, given
):
    recorder = Recorder(folder)
    recorder.add(given)
    recorder.add(queries)
    recorder.close()
    found = read(folder)
    assert rows(found.array()) == rows(queries)
    assert found.seen == 300 + any(given is each for each in NO_DIRECTIONS)


def test_texts_are_kept_only_if_asked_for(folder, queries):
    given = ["red shoes", "\ud800", "a\0b", None, "after"]
    for texts in (False, True):
        recorder = Recorder(folder, texts=texts)
        for query, text in zip(queries, given, strict=False):
            recorder.add(query, text=text)
        recorder.close()
        found = read(folder)
        assert (found.texts is not None) == texts
        assert rows(found.array()) == rows(queries[:5])
    assert {"red shoes", "after"} < set(found.texts)
    assert found.texts.count(None) == 1


def test_a_file_that_is_damaged_while_it_is_recorded_to_is_one_line_and_anew_once_it_is_deleted(
    folder, queries, caplog
):
    recorder = recorded(folder, queries[:100])
    (folder / FILE).write_bytes(b"damaged" * 1_000)
    for _ in range(3):
        recorder.add(queries[100:])
        recorder.flush()
    (said,) = caplog.messages
    assert f"{FILE} cannot be used (file is not a database)" in said
    for use in (read, lambda folder: Recorder(folder).forget(["0" * 16])):
        with refused(StoreError, "delete it: it is only a sample"):
            use(folder)
    (folder / FILE).unlink()
    recorder.add(queries[:7])
    recorder.close()
    assert read(folder).rows == 7


def test_no_link_is_followed(folder, queries, tmp_path, caplog):
    recorded(tmp_path / "other", queries[:3])
    beyond = tmp_path / "other" / FILE
    before = beyond.read_bytes()
    folder.mkdir()
    (folder / FILE).symlink_to(beyond)
    recorded(folder, queries)
    assert beyond.read_bytes() == before
    assert [*beyond.parent.iterdir(), *folder.iterdir()] == [beyond, folder / FILE]
    said = "is a link, or not a file; delete it"
    (message,) = caplog.messages
    assert said in message
    with refused(StoreError, said):
        read(folder)


def test_a_click_where_nobody_asked_makes_no_folder_and_is_said(folder, caplog):
    recorder = Recorder(folder)
    recorder.within("phtos").click("0" * 16, 7)
    recorder.close()
    assert not folder.exists()
    (said,) = caplog.messages
    assert "phtos: no query was recorded there" in said


def test_names_become_folders_inside(tmp_path):
    assert folder_within(tmp_path, "photos", "") == tmp_path / "photos"
    assert folder_within(tmp_path, "a/b", "..") == tmp_path / "a%2Fb" / "%2E."
    recorder = Recorder(tmp_path)
    assert recorder.within("photos", "image").folder == tmp_path / "photos" / "image"
    assert recorder.within("photos", "image") is recorder.within("photos", "image")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"size": 0}, "above 0"),
        ({"seconds": 0}, "above 0"),
        ({"collections": "photos"}, r"expected a list of names, as \['photos'\]"),
        ({"folder": __file__}, "is a file; queries are recorded in"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(folder, settings, said):
    with refused(InputError, said):
        Recorder(**{"folder": folder} | settings)


def test_threads_lose_nothing(folder, queries):
    recorder = Recorder(folder, seconds=0.001)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(recorder.add, [queries[n::4] for n in range(4)]))
    recorder.close()
    found = read(folder)
    assert (found.rows, found.seen) == (300, 300)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_worker_adds_what_it_heard_itself(folder, queries):
    recorder = recorded(folder, queries[:100])
    child = os.fork()
    if child == 0:
        recorder.add(queries[100:150])
        recorder.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    recorder.add(queries[150:160])
    recorder.flush()
    found = read(folder)
    assert (found.rows, found.seen) == (160, 160)
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
    assert found.rows == 200
    assert all(counts in ({7: 1}, {7: 2}) for counts in found.clicks), (
        "each query was clicked as often as it was asked"
    )


def seen_above(folder, seen):
    """Return how many queries the folder has seen, once they are more than `seen`.

    They must fill a sample; a slow machine may need long for it.
    """
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
        written = seen_above(folder, seen)  # it goes on where the last one stopped
        time.sleep(0.013 * run)  # it writes without end
        killed.kill()
        killed.wait()
        found = read(folder)
        assert found.rows == 200
        # One may be asked and not clicked yet.
        assert found.clicks.count({7: 1}) >= 199
        assert found.seen >= written, "what was written stays"
        seen = found.seen
    recorded(folder, np.ones((1, 64)), 200).close()
    assert [*folder.iterdir()] == [folder / FILE], "the journal of the killed goes"
