"""A bank from what people have, on the command line: recorded queries, a log's texts, its clicks."""

from pathlib import Path

import faiss
import numpy as np
import pytest

from hubplugin import Recorder, open_store
from hubplugin_qdrant import HubQdrantClient
from tests.commands import STORE, asked, complains, run, typed
from tests.galleries import collection, unit

QUERIES = "photos.faiss.queries"
"""Where queries are recorded by default."""


@pytest.fixture
def bank(here, real):
    bank = real["bank_queries"][:500].astype(np.float32)
    for name in ("bank.npy", "embedded.npy"):
        np.save(name, bank)
    return bank


def record(queries, **settings):
    recorder = Recorder(QUERIES, **settings)
    recorder.add(queries)
    recorder.close()


def test_recorded_queries_and_clicks_are_shown_and_exported(bank):
    assert f"no queries are recorded in {QUERIES}" in typed("bank", STORE).lower()
    record(np.concatenate([bank, bank[:100]]), size=400)
    shown = typed("bank", STORE)
    assert "400 queries of 384 dimensions, of 600 that were asked from 20" in shown
    assert QUERIES in shown
    figures = asked("bank", STORE, "--export", "out.npy")
    assert (figures["queries"], figures["seen"]) == (400, 600)
    exported = np.load("out.npy")
    assert {row.tobytes() for row in exported} <= {row.tobytes() for row in bank}
    recorder = Recorder(QUERIES)
    for row, target in ((0, 3), (0, 3), (0, 4), (1, 3)):
        recorder.click(exported[row], target)
    recorder.close()
    figures = asked("bank", STORE)
    assert (figures["clicks"], figures["pairs"]) == (4, 3)


@pytest.mark.slow
def test_what_was_clicked_teaches_a_map_where_that_is_asked_for(bank, real):
    record(bank[:100])
    recorder = Recorder(QUERIES)
    for row, query in enumerate(real["test_queries"][:600]):
        recorder.add(query)
        recorder.click(query, row)
    recorder.close()
    assert asked("diagnose", STORE, "--learn")["lesson"]["strength"] > 0
    assert asked("diagnose", STORE)["trial"]["right"] is None
    typed("apply", STORE, "--learn", "--force")
    assert open_store(STORE).correction().model.query_map.pairs == 600


def test_a_folder_of_a_qdrant_client_is_named_behind_the_store(bank):
    client = HubQdrantClient(path="qdrant", record="queries")
    collection(client, bank[:1])
    client.query_points("photos", bank[0])
    client.close()
    store = "qdrant-local:qdrant/photos"
    assert asked("bank", f"{store}?record=queries")["queries"] == 1
    assert "HubQdrantClient(..., record=FOLDER)" in run("bank", store).stderr
    assert "?record=FOLDER" in run("apply", store).stderr


@pytest.mark.slow
def test_a_log_of_texts_is_embedded_and_its_clicks_are_used(bank):
    np.save("first.npy", bank[:300])
    texts = [f"query {number}" for number in range(300)]
    Path("log.csv").write_text("\n".join(["query", *texts, ""]))
    index = faiss.read_index("photos.faiss")
    nearest = index.search(unit(bank[:300]), 1)[1][:, 0]
    rows = [f"{text},{target}" for text, target in zip(texts, nearest, strict=True)]
    unknown = "query 0,99999", "query 900,3", "query 7,77777"
    Path("clicks.csv").write_text("\n".join(["query,target", *rows, *unknown]))
    by_texts = ("--bank", "log.csv", "--embed", "tests.embedding:embed")
    without, called = figures(*by_texts)
    assert without == figures("--bank", "first.npy")[0]
    assert called <= {f"“{text}”" for text in texts}
    clicked, _ = figures(*by_texts, "--answers", "clicks.csv")
    assert clicked["trial"]["right"] is not None
    np.save("clicks.npy", nearest)
    by_array = figures("--bank", "first.npy", "--answers", "clicks.npy")
    assert clicked == by_array[0]


def figures(*given):
    """What `diagnose` prints as JSON, and what queries are called in it, apart."""
    found = asked("diagnose", STORE, *given)
    misled = [each for hub in found["hubs"] for each in hub.pop("misled")]
    return found, {each["query"] for each in misled}


def test_clicked_ids_that_the_store_lacks_are_counted_and_named(bank):
    rows = [f"{row},{row if row != 5 else 99999}" for row in range(300)]
    Path("clicks.csv").write_text("\n".join(["query,target", *rows]))
    given = ("--bank", "bank.npy", "--answers", "clicks.csv")
    said = "1 of 300 clicked ids are not in the store and are left out: 99999"
    assert said in run("diagnose", STORE, *given).stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), f"no queries are recorded in {QUERIES}; pass --bank"),
        ((), f"hubplugin.Recorder('{QUERIES}').add(queries) at each search"),
        (("--bank", "log.txt"), "for a file of texts name the model, --embed"),
        (("--bank", "bank.npy", "--answers", "log.txt"), "expected .csv, .tsv or .npy"),
    ],
)
def test_what_goes_wrong_is_one_line_in_the_words_that_were_typed(bank, options, said):
    Path("log.txt").write_text("query 1\nquery 2\n")
    complains("apply", STORE, *options, said=said)


def test_a_damaged_record_is_named_by_every_command_in_one_line(bank):
    typed("apply", STORE, "--bank", "bank.npy", "--force")
    record(bank[:300] + 0.01)
    path = Path(QUERIES, "record.sqlite")
    whole = path.read_bytes()
    assert asked("inspect", STORE)["hubness"]["live"]
    damaged = whole[:-200] + bytes(100) + whole[-100:]
    path.write_bytes(damaged)
    for command in ("bank", "inspect", "diagnose", "refit"):
        said = complains(command, STORE, said=f"{path} cannot be used (")
        assert said.endswith("delete it: it is only a sample\n")
    assert path.read_bytes() == damaged, "it is left as it is"
    assert asked("diagnose", STORE, "--bank", "bank.npy")["queries"] == 500
