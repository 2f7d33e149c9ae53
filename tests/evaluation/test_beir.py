"""A BEIR folder is evaluated by name, its corpus embedded or in a store."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hubplugin.cli import app
from hubplugin.errors import InputError
from hubplugin.evaluation.beir import read_beir

WORDS = ("red", "green", "blue", "small", "large", "round", "flat", "old")

MODEL = """
import numpy as np
WORDS = {words!r}
def embed(texts):
    return np.array([[text.split().count(word) + 0.01 for word in WORDS] for text in texts], np.float32)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Documents of two words each, and queries that ask for one of them in other words."""
    found = tmp_path / "colours"
    (found / "qrels").mkdir(parents=True)
    pairs = [(one, other) for one in WORDS for other in WORDS if one < other]
    lines = [
        {"_id": f"d{row}", "title": one, "text": other}
        for row, (one, other) in enumerate(pairs)
    ]
    (found / "corpus.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines)
    )
    lines = [
        {"_id": f"q{row}", "text": f"{other} {one} {one}"}
        for row, (one, other) in enumerate(pairs)
    ]
    lines.append({"_id": "unjudged", "text": "red"})
    (found / "queries.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines)
    )
    judged = "".join(f"q{row}\td{row}\t1\n" for row in range(len(pairs)))
    (found / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    (tmp_path / "words_model.py").write_text(MODEL.format(words=WORDS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return found


def test_a_folder_is_read_with_the_queries_that_are_judged(folder):
    beir = read_beir(folder)
    assert (len(beir.documents), len(beir.queries)) == (28, 28)
    assert beir.documents[beir.ids.index("d0")] == "red small"
    assert "unjudged" not in beir.query_ids


def test_files_that_are_missing_or_of_another_form_are_named(folder):
    (folder / "corpus.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(InputError, match=r"corpus\.jsonl has no _id and text"):
        read_beir(folder)
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(InputError, match=r"BEIR: there is no file .*corpus.jsonl"):
        read_beir(folder)
    (folder / "qrels" / "test.tsv").unlink()
    with pytest.raises(InputError, match=r"test\.tsv"):
        read_beir(folder)


def evaluated(*arguments):
    done = CliRunner().invoke(app, ["evaluate", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_command_embeds_the_corpus_and_the_queries(folder):
    rng = np.random.default_rng(1)
    np.save("bank.npy", rng.random((40, len(WORDS)), np.float32))
    given = (
        "--queries",
        folder,
        "--embed",
        "words_model:embed",
        "--bank",
        "bank.npy",
        "--method",
        "is tau=0.1",
    )
    told = evaluated(*given, "--report", "report.html")
    assert Path("report.html").read_text().startswith("<!DOCTYPE html>")
    assert (told["queries"], told["judged"], told["targets"]) == (28, 28, 28)
    assert [method["label"] for method in told["methods"]] == ["raw", "is tau=0.1"]
    assert told["methods"][0]["recall"]["1"]["value"] == 1.0


@pytest.mark.slow
def test_the_queries_of_a_folder_ask_a_file_of_vectors(folder):
    from words_model import embed

    np.save("corpus.npy", embed(read_beir(folder).documents))
    told = evaluated("--queries", folder, "--embed", "words_model:embed", "corpus.npy")
    assert told["methods"][0]["recall"]["1"]["value"] == 1.0
