"""`hubplugin.Recorder`: queries recorded while an application runs, read as a bank."""

import logging
import os
import re
import signal
import sqlite3
import stat
import struct
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

import hubplugin
from hubplugin import InputError, Recorder, StoreError
from hubplugin.recording import clear, folder_within, read, thin
from tests.recording.recorders import recorded


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
    assert (found.rows, found.seen, found.different, found.texts) == (
        300,
        350,
        300,
        None,
    )
    assert (
        started
        <= found.first
        <= found.times.min()
        <= found.times.max()
        <= found.last
        <= time.time()
    )
    assert hubplugin.fit(queries, found, "is").dim == 8
    modes = [
        stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "record.sqlite")
    ]
    assert modes == [0o700, 0o600], "readable by their owner only"


def test_a_file_that_was_only_made_holds_nothing_and_is_gone_on_with(folder, queries):
    folder.mkdir()
    (folder / "record.sqlite").touch()
    assert read(folder) is None
    recorded(folder, queries)
    assert read(folder).rows == 300


def test_clicks_are_answers_of_the_queries_that_they_belong_to(folder, queries):
    recorder = recorded(folder, queries[:6])
    given = [
        (0, 5),
        (1, "a"),
        (1, "b"),
        (1, "b"),
        (2, "17"),
        (3, uuid.UUID(int=7)),
        (4, np.int64(8)),
        (5, "042"),
    ]
    for row, target in (*given, (9, 1)):
        recorder.click(
            queries[row].tolist() if row % 2 else Recorder.id_of(queries[row]), target
        )
    recorder.close()
    found = read(folder)
    assert found.answers is not None
    answers = dict(zip(map(bytes, found.array()), found.answers.tolist(), strict=True))
    expected = [5, "b", 17, "00000000-0000-0000-0000-000000000007", 8, "042"]
    assert [answers[bytes(query)] for query in queries[:6]] == expected
    assert sum(sum(counts.values()) for counts in found.clicks) == 8, (
        "one is of a query that nobody asked"
    )


def test_the_id_of_a_query_is_short_and_the_same_for_every_form_of_it(queries):
    (one, two, *_) = queries
    forms = (list, tuple, np.asarray, np.float32)
    assert {Recorder.id_of(form(one.tolist())) for form in forms} == {
        Recorder.id_of(one)
    }
    assert Recorder.id_of(two) != Recorder.id_of(one)
    assert re.fullmatch("[0-9a-f]{16}", Recorder.id_of(one))
    with pytest.raises(InputError, match=r"one query \[d\]; got 300"):
        Recorder.id_of(queries)


@pytest.mark.parametrize(
    ("query", "target", "said"),
    [
        (
            "my red shoes",
            1,
            "its id of 16 hexadecimal digits; got a text of 12 characters",
        ),
        (np.zeros((2, 2, 2)), 1, "got shape (2, 2, 2)"),
        (None, 1, ""),
        *(
            ("0" * 16, target, "expected the id of a target")
            for target in (-1, 1.5, True, None, "", "x" * 201)
        ),
    ],
)
def test_what_is_no_click_is_one_line_in_the_log_without_what_was_written(
    folder, queries, caplog, query, target, said
):
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


def test_queries_of_another_model_are_kept_apart(folder, queries):
    recorder = recorded(folder, queries[:, :4])
    recorder.add(queries[:10])
    recorder.flush()
    other = recorded(folder, queries[:20, :4])
    found, eight, four = read(folder), read(folder, 8), read(folder, 4)
    assert (found.dim, eight.rows, four.rows) == (4, 10, 300)
    assert read(folder, 5) is None
    other.add(queries[:5, :3])  # of the two before it, that which was asked last stays
    recorder.close()
    other.close()
    assert (read(folder).dim, read(folder, 8), read(folder, 4).rows) == (3, None, 300)
    assert (
        recorder.forget(
            [Recorder.id_of(queries[0, :3]), Recorder.id_of(queries[0, :4])]
        )
        == 2
    )


def test_a_recorder_that_two_models_take_turns_with_keeps_a_sample_of_each(
    folder, queries
):
    recorder = Recorder(folder, 100)
    for query in queries:
        recorder.add(query)
        recorder.add(query[:4])
    recorder.close()
    for dim in (8, 4):
        found = read(folder, dim)
        assert (
            found.ids == sorted(Recorder.id_of(query[:dim]) for query in queries)[:100]
        )
        assert found.seen == 300


def test_a_model_that_left_the_record_and_comes_back_has_a_whole_sample(
    folder, queries
):
    recorder = Recorder(folder, 10)
    for seen in (queries[:, :4], queries[:, :8], queries[:, :5], queries[:10, :4]):
        recorder.add(seen)
        recorder.flush()
    found = read(folder, 4)
    assert (found.rows, found.seen) == (10, 10)


def test_a_program_that_changes_its_folder_writes_where_it_began(
    folder, queries, monkeypatch
):
    monkeypatch.chdir(folder.parent)
    recorder = Recorder(folder.name)
    recorder.add(queries)
    monkeypatch.chdir("/")
    recorder.close()
    assert read(folder).rows == 300


def test_what_is_cleared_stays_so_while_a_recorder_runs(folder, queries):
    recorder = recorded(folder, queries, 20, clicks=[1] * 300)
    assert len(read(folder).answers) == 20
    clear(folder)
    assert read(folder) is None
    recorder.flush()
    assert read(folder) is None
    recorder.add(queries[:5])
    recorder.close()
    found = read(folder)
    assert (found.rows, found.answers) == (5, None)


def test_only_what_was_asked_lately_is_read_where_that_is_wanted(folder, queries):
    recorder = recorded(folder, queries[:100])
    moment = time.time()
    time.sleep(0.01)
    recorder.add(queries[90:120])
    recorder.close()
    lately = read(folder, since=moment)
    assert rows(lately.array()) == rows(queries[90:120])
    assert read(folder, since=time.time() + 1) is None


def test_a_folder_that_cannot_be_written_is_one_line_in_the_log(
    tmp_path, queries, caplog
):
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


def test_a_full_disk_loses_nothing_that_was_there_and_recording_goes_on_after_it(
    folder, caplog, full_disk
):
    queries = np.random.default_rng(0).normal(size=(2_000, 64)).astype(np.float32)
    recorder = recorded(folder, queries[:10])
    recorder.add(queries[10:])
    with full_disk():
        recorder.flush()
        assert read(folder).rows == 10
        assert (
            "record.sqlite cannot be used now (disk I/O error); try again; searches go on"
            in caplog.text
        )
    recorder.flush()
    assert read(folder).rows == 2_000
    recorder.close()


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


def test_texts_are_kept_only_if_asked_for_and_one_that_is_none_keeps_no_other_out(
    folder, queries, caplog
):
    given = ["red shoes", b"red shoes", 7, ["red", "shoes"], "\ud800", "a\0b", "\0"]
    for texts in (False, True):
        recorder = Recorder(folder, texts=texts)
        for query, text in zip(queries, (*given, None, "after"), strict=False):
            recorder.add(query, text=text)
            recorder.click(query, text)
        recorder.click(queries[0], 7)
        recorder.close()
        found = read(folder)
        assert (found.texts is not None) == texts
        assert rows(found.array()) == rows(queries[:9])
    assert {"red shoes", "after"} < set(found.texts)
    assert found.texts.count(None) == 4
    assert 7 in found.clicks[found.texts.index("red shoes")]
    (said,) = (
        record.message
        for record in caplog.records
        if "the text of a query" in record.message
    )
    assert (
        f"the text of a query is not recorded in {folder}: expected a str, got bytes"
        in said
    )


def damaged(folder, queries, by):
    """A record of `queries` in which the SQL `by` has changed something, past all checks of the tables."""
    recorded(folder, queries, clicks=[7])
    with closing(sqlite3.connect(folder / "record.sqlite")) as record:
        record.execute("PRAGMA ignore_check_constraints = ON")
        record.execute("PRAGMA writable_schema = ON")
        with record:
            record.execute(by)


DAMAGES = [
    *(
        f"UPDATE samples SET bound = {value}"
        for value in ("7", "''", "'x'", "x'00'", "1e999")
    ),
    *(
        f"UPDATE samples SET seen = {value}"
        for value in ("-1", "0", "1.5", "1e999", "'many'", "NULL")
    ),
    *(
        f"UPDATE samples SET {name} = {to}"
        for name in ("first", "last")
        for to in ("1e20", "1e999", "'now'", "x'00'")
    ),
    *(
        f"UPDATE queries SET vector = {value}"
        for value in ("NULL", "1", "'x'", "x'00'", "zeroblob(32)")
    ),
    "UPDATE queries SET vector = zeroblob(3000000) WHERE rowid = 3",
    *(f"UPDATE queries SET time = {value}" for value in ("1e999", "'now'", "-1e20")),
    *(
        f"UPDATE queries SET text = {value}"
        for value in ("x'00'", "CAST(x'ff' AS TEXT)")
    ),
    *(
        f"UPDATE clicks SET count = {value}"
        for value in ("0", "-1", "1.5", "'one'", "NULL")
    ),
    *(
        f"UPDATE clicks SET target = {value}"
        for value in ("NULL", "''", "x'00'", "printf('%201s', 'x')")
    ),
    "UPDATE queries SET id = '0123456789abcdef' WHERE rowid = 3",
    "DROP TABLE clicks",
    "CREATE TABLE others (id)",
    "CREATE TRIGGER more AFTER INSERT ON queries BEGIN DELETE FROM clicks; END",
    "UPDATE sqlite_master SET sql = 'CREATE TABLE clicks (id TEXT, target, count, time)' WHERE name = 'clicks'",
]


@pytest.mark.parametrize("by", DAMAGES)
def test_a_file_that_makes_no_sense_is_refused_in_one_line_that_says_what_to_do(
    by, folder, queries
):
    damaged(folder, queries, by)
    with pytest.raises(StoreError) as raised:
        read(folder)
    assert str(raised.value).startswith(f"{folder / 'record.sqlite'} is damaged (")
    assert str(raised.value).endswith("); delete it: it is only a sample")
    assert "\n" not in str(raised.value)


def test_whatever_byte_changes_a_file_is_refused_or_holds_what_was_asked(
    folder, queries, rng
):
    recorded(folder, queries[:60])
    path = folder / "record.sqlite"
    whole = path.read_bytes()
    refused = list[str]()
    for _ in range(400):
        content = bytearray(whole)
        for place in rng.integers(len(whole), size=rng.integers(1, 20)):
            content[place] = rng.integers(256)
        path.write_bytes(
            content[: rng.integers(len(whole))] if rng.random() < 0.1 else content
        )
        try:
            found = read(folder)
        except StoreError as error:
            refused.append(str(error))
        else:
            assert found is None or rows(found.array()) <= rows(queries[:60])
    assert 100 < len(refused) < 400
    assert all("record.sqlite" in said for said in refused)


@pytest.mark.parametrize("content", [b"damaged", b"damaged" * 1_000])
def test_a_file_that_is_damaged_while_it_is_recorded_to_is_one_line_and_anew_once_it_is_deleted(
    content, folder, queries, caplog
):
    recorder = recorded(folder, queries[:100])
    (folder / "record.sqlite").write_bytes(content)
    for _ in range(3):
        recorder.add(queries[100:])
        recorder.flush()
    (record,) = caplog.records
    assert (
        "record.sqlite is damaged (file is not a database); delete it" in record.message
    )
    for refused in (
        read,
        clear,
        lambda folder: thin(folder, 3),
        lambda folder: Recorder(folder).forget(["0" * 16]),
    ):
        with pytest.raises(StoreError, match="delete it"):
            refused(folder)
    (folder / "record.sqlite").unlink()
    recorder.flush()
    recorder.add(queries[:7])
    recorder.close()
    assert read(folder).rows == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda path, record: path.symlink_to(record),
        lambda path, record: path.symlink_to(record.with_name("nowhere")),
        lambda path, record: path.mkdir(),
        lambda path, record: os.mkfifo(path),
        lambda path, record: os.link(record, path),
    ],
)
def test_no_link_is_followed_and_what_is_no_file_is_refused(
    make, folder, queries, tmp_path, caplog
):
    recorded(tmp_path / "other", queries[:3])
    beyond = tmp_path / "other" / "record.sqlite"
    before = beyond.read_bytes()
    folder.mkdir()
    make(folder / "record.sqlite", beyond)
    recorded(folder, queries)
    assert beyond.read_bytes() == before
    assert [path.name for path in beyond.parent.iterdir()] == ["record.sqlite"]
    (said,) = (record.message for record in caplog.records)
    assert "is a link, or no file; delete it" in said
    with pytest.raises(StoreError, match="is a link, or no file; delete it"):
        read(folder)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("name", ["journal", "wal", "shm"])
def test_a_link_in_the_place_of_what_sqlite_keeps_beside_a_record_is_not_followed(
    name, folder, queries, tmp_path
):
    recorded(folder, queries)
    (tmp_path / "precious").write_text("precious")
    (folder / f"record.sqlite-{name}").symlink_to(tmp_path / "precious")
    for use in (read, clear):
        with pytest.raises(
            StoreError, match=f"record.sqlite-{name} is a link, or no file; delete it"
        ):
            use(folder)
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_journal_that_names_a_file_of_somebody_else_deletes_it_not(
    folder, queries, tmp_path
):
    """SQLite takes it for that of a transaction over several databases, and deletes what it names once it is done."""
    recorded(folder, queries)
    precious, magic = tmp_path / "precious", bytes.fromhex("d9d505f920a163d7")
    precious.write_text("precious")
    name, pages = (
        str(precious).encode(),
        (folder / "record.sqlite").stat().st_size // 4096,
    )
    head = (magic + struct.pack(">5I", 0, 1, pages, 512, 4096)).ljust(512, b"\0")
    tail = (
        struct.pack(">I", (1 << 30) // 4096 + 1)
        + name
        + struct.pack(">2I", len(name), sum(name))
        + magic
    )
    (folder / "record.sqlite-journal").write_bytes(head + tail)
    with pytest.raises(
        StoreError,
        match=r"record.sqlite-journal names another file, which SQLite would delete",
    ):
        read(folder)
    assert precious.read_text() == "precious"


def test_a_record_that_others_write_to_for_long_is_left_alone(
    folder, queries, monkeypatch, caplog
):
    monkeypatch.setattr("hubplugin.recording.PATIENCE", 0.05)
    recorder = recorded(folder, queries)
    recorder.add(queries[:5] + 1)
    recorder.click(queries[0], 7)
    with closing(
        sqlite3.connect(folder / "record.sqlite", isolation_level=None)
    ) as other:
        other.execute("BEGIN IMMEDIATE")
        recorder.flush()
        assert (
            "record.sqlite cannot be used now (database is locked); try again; searches go on"
            in caplog.text
        )
        with pytest.raises(StoreError, match="database is locked"):
            thin(folder, 20)
        assert read(folder).rows == 300
    recorder.close()
    found = read(folder)
    assert (found.rows, found.seen, 7 in found.answers) == (305, 305, True)


def test_names_become_folders_inside(tmp_path):
    assert folder_within(tmp_path, "photos", "") == tmp_path / "photos"
    assert folder_within(tmp_path, "a/b", "..") == tmp_path / "a%2Fb" / "%2E."
    recorder = Recorder(tmp_path)
    assert recorder.within("photos", "image").folder == tmp_path / "photos" / "image"
    assert recorder.within("photos", "image") is recorder.within("photos", "image")


def test_what_makes_no_sense_is_refused(folder):
    for settings, said in (
        ({"size": 0}, "above 0"),
        ({"seconds": 0}, "above 0"),
        ({"collections": "photos"}, r"expected a list of names, such as \['photos'\]"),
    ):
        with pytest.raises(InputError, match=said):
            Recorder(folder, **settings)
    with pytest.raises(InputError, match="at least 1"):
        thin(folder, 0)


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
    assert 3_000 < found.different < 5_200, "4,000, since two of them asked the same"
    assert all(counts in ({7: 1}, {7: 2}) for counts in found.clicks), (
        "each query was clicked as often as it was asked"
    )


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
        written = seen_above(
            folder, seen
        )  # the next one goes on where the last one stopped
        time.sleep(0.013 * run)  # it writes without end
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        found = read(folder)
        assert found.rows == 200
        assert found.clicks.count({7: 1}) >= 199, (
            "but for one that was asked and not clicked yet"
        )
        assert found.seen >= written, "what was written stays"
        seen = found.seen
    recorded(folder, np.ones((1, 64)), 200).close()
    assert [path.name for path in folder.iterdir()] == ["record.sqlite"], (
        "the journal of a killed process goes"
    )
