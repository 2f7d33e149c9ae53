"""A bank from what people have, on the command line: recorded queries, a log's texts, its clicks."""

import json
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
from qdrant_client import models
from typer.testing import CliRunner

import hubplugin
from hubplugin.cli import app
from hubplugin.store import read_recorded
from hubplugin_qdrant import HubQdrantClient
from tests.whole.commands import write_photos

MODEL = """
import numpy as np
VECTORS = np.load("bank.npy")
def embed(texts):
    return VECTORS[[int(text.split()[1]) for text in texts]]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory, real):
    folder = tmp_path_factory.mktemp("bank")
    write_photos(folder, real)
    np.save(folder / "bank.npy", real["bank_queries"][:500].astype(np.float32))
    (folder / "bank_model.py").write_text(MODEL)
    return folder


@pytest.fixture
def bank(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return np.load("bank.npy")


def typed(*arguments, status=0):
    run = CliRunner().invoke(app, [*map(str, arguments)])
    assert run.exit_code == status, run.output + repr(run.exception)
    return run


def asked(*arguments):
    return json.loads(typed(*arguments, "--json").stdout)


def record(queries, **settings):
    recorder = hubplugin.Recorder("photos.faiss.queries", **settings)
    recorder.add(queries)
    recorder.close()


def test_recorded_queries_and_clicks_are_shown_exported_and_forgotten(bank):
    store = "faiss:photos.faiss"
    assert (
        "no queries are recorded in photos.faiss.q"
        in typed("bank", store).stdout.lower()
    )
    record(np.concatenate([bank, bank[:100]]), size=400)
    shown = typed("bank", store).stdout
    assert "400 queries of 384 dimensions, of 600 that were asked from 20" in shown
    assert "photos.faiss.queries" in shown
    figures = asked("bank", store, "--export", "out.npy")
    assert (figures["queries"], figures["seen"]) == (400, 600)
    exported = np.load("out.npy")
    assert {row.tobytes() for row in exported} <= {row.tobytes() for row in bank}
    recorder = hubplugin.Recorder("photos.faiss.queries")
    for row, target in ((0, 3), (0, 3), (0, 4), (1, 3)):
        recorder.click(exported[row], target)
    forgotten = recorder.id_of(exported[0])
    recorder.close()
    figures = asked("bank", store)
    assert (figures["clicks"], figures["pairs"]) == (4, 3)
    figures = asked("bank", store, "--forget", forgotten)
    assert figures["forgotten"] == 1
    assert (figures["queries"], figures["clicks"]) == (399, 1)
    assert "ID" in typed("bank", store, "--forget", "x", status=1).stderr.upper()


@pytest.mark.slow
def test_what_was_clicked_teaches_a_map_where_that_is_asked_for(bank, real):
    queries = real["test_queries"][:600].astype(np.float32)
    record(bank[:100])
    recorder = hubplugin.Recorder("photos.faiss.queries")
    recorder.add(queries)
    for row in range(49):
        recorder.click(recorder.id_of(queries[row]), row)
    recorder.flush()
    said = typed("apply", "faiss:photos.faiss", "--learn", "--force", status=1).stderr
    assert "the bank has 49 different pairs of 49 targets; learn=True needs 50" in said
    for row in range(49, 600):
        recorder.click(queries[row], row)
    recorder.close()
    recorded = read_recorded(hubplugin.open_store("faiss:photos.faiss"))
    assert sorted(recorded.answers.tolist()) == [-1] * 100 + [*range(600)]
    np.save("same.npy", recorded.array())
    np.save("answers.npy", recorded.answers.astype(np.int64))
    by_file = (
        "apply",
        "faiss:photos.faiss",
        "--bank",
        "same.npy",
        "--dry-run",
        "--force",
    )
    assert (
        typed("apply", "faiss:photos.faiss", "--dry-run", "--force").stdout
        == typed(*by_file).stdout
    )
    taught = typed(*by_file, "--answers", "answers.npy", "--learn").stdout
    assert (
        typed("apply", "faiss:photos.faiss", "--learn", "--dry-run", "--force").stdout
        == taught
    )
    forecast = asked("diagnose", "faiss:photos.faiss", "--learn")["lesson"]
    assert forecast["strength"] > 0
    assert (
        f"{100 * forecast['other']['before']:.1f} -> {100 * forecast['other']['after']:.1f}"
        in " ".join(taught.split())
    )
    typed("apply", "faiss:photos.faiss", "--force")
    assert "map" in typed("refit", "faiss:photos.faiss", "--learn", "--force").stdout
    assert (
        hubplugin.open_store("faiss:photos.faiss").correction().model.query_map.pairs
        == 600
    )


def test_without_any_queries_one_line_says_what_can_be_done(bank):
    said = typed("apply", "faiss:photos.faiss", status=1).stderr
    assert said.count("\n") == 1
    assert "no queries are recorded in photos.faiss.queries; pass --bank" in said
    assert (
        "hubplugin.Recorder('photos.faiss.queries').add(queries) beside each search"
        in said
    )


def test_a_folder_of_a_qdrant_client_is_named_behind_the_store(bank, tmp_path):
    client = HubQdrantClient(path=str(tmp_path / "qdrant"), record=tmp_path / "queries")
    client.create_collection(
        "photos", models.VectorParams(size=384, distance=models.Distance.COSINE)
    )
    client.query_points("photos", bank[0])
    client.close()
    store = f"qdrant-local:{tmp_path}/qdrant/photos"
    assert asked("bank", f"{store}?record={tmp_path}/queries")["queries"] == 1
    said = typed("bank", store, status=1).stderr
    assert "HubQdrantClient(..., record=FOLDER)" in said
    assert "?record=FOLDER" in typed("apply", store, status=1).stderr


@pytest.mark.slow
def test_a_log_of_texts_is_embedded_and_its_clicks_are_used(bank):
    texts = [f"query {number}" for number in range(300)]
    Path("log.csv").write_text("query\n" + "\n".join(texts) + "\n")
    index = faiss.read_index("photos.faiss")
    nearest = index.search(
        bank[:300] / np.linalg.norm(bank[:300], axis=1, keepdims=True), 1
    )[1][:, 0]
    rows = [f"{text},{target}" for text, target in zip(texts, nearest, strict=True)]
    Path("clicks.csv").write_text(
        "query,target\n"
        + "\n".join([*rows, "query 0,99999", "query 900,3", "query 7,77777"])
    )
    by_texts = ("--bank", "log.csv", "--embed", "bank_model:embed")
    np.save("first.npy", bank[:300])
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
    found = asked("diagnose", "faiss:photos.faiss", *given)
    misled = [each for hub in found["hubs"] for each in hub.pop("misled")]
    return found, {each["query"] for each in misled}


def test_clicked_ids_that_the_store_lacks_are_counted_and_named(bank, caplog):
    np.save("first.npy", bank[:300])
    Path("clicks.csv").write_text(
        "query,target\n"
        + "\n".join(f"{n},{n if n != 5 else 99999}" for n in range(300))
    )
    typed(
        "diagnose",
        "faiss:photos.faiss",
        "--bank",
        "first.npy",
        "--answers",
        "clicks.csv",
    )
    assert (
        "1 of 300 clicked ids are not in the store, and are left out: 99999"
        in caplog.text
    )


def test_what_goes_wrong_is_one_line_in_the_words_that_were_typed(bank):
    Path("log.txt").write_text("query 1\nquery 2\n")
    for options, said in (
        (("--bank", "log.txt"), "for a file of texts name the model, --embed"),
        (("--bank", "bank.npy", "--answers", "log.txt"), "expected .csv, .tsv or .npy"),
    ):
        error = typed("apply", "faiss:photos.faiss", *options, status=1).stderr
        assert said in error
        assert error.count("\n") == 1


def test_a_damaged_record_is_named_by_every_command_in_one_line(bank):
    typed("apply", "faiss:photos.faiss", "--bank", "bank.npy", "--force")
    record(bank[:300] + 0.01)
    path = Path("photos.faiss.queries", "record.sqlite")
    whole = path.read_bytes()
    assert asked("inspect", "faiss:photos.faiss")["hubness"]["live"]
    path.write_bytes(damaged := whole[:-200] + bytes(100) + whole[-100:])
    for command in (
        ("bank",),
        ("inspect",),
        ("diagnose",),
        ("refit", "--dry-run"),
    ):
        said = typed(*command, "faiss:photos.faiss", status=1).stderr
        assert f"{path} cannot be used (" in said
        assert said.endswith("delete it: it is only a sample\n")
        assert said.count("\n") == 1
    assert path.read_bytes() == damaged, "it is left as it is"
    assert (
        asked("diagnose", "faiss:photos.faiss", "--bank", "bank.npy")["queries"] == 500
    )
