"""A BEIR folder is evaluated by name, its corpus embedded or in a store."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from hubplugin import InputError
from hubplugin.evaluation.beir import read_beir
from tests.commands import asked
from tests.refusals import refused

WORDS = ("red", "green", "blue", "small", "large", "round", "flat", "old")


def embed(texts):
    counts = [[text.split().count(word) for word in WORDS] for text in texts]
    return np.array(counts, np.float32) + 0.01


@pytest.fixture
def folder(cwd):
    """Documents of two words each, and queries that ask for one of them in others."""
    found = cwd / "colours"
    (found / "qrels").mkdir(parents=True)
    documents = []
    queries = [{"_id": "unjudged", "text": "red"}]
    judged = ["query-id\tcorpus-id\tscore"]
    for row, (one, other) in enumerate(combinations(sorted(WORDS), 2)):
        documents.append({"_id": f"d{row}", "title": one, "text": other})
        queries.append({"_id": f"q{row}", "text": f"{other} {one} {one}"})
        judged.append(f"q{row}\td{row}\t1")
    for name, lines in (("corpus", documents), ("queries", queries)):
        text = "\n".join(json.dumps(line) for line in lines)
        (found / f"{name}.jsonl").write_text(text)
    (found / "qrels" / "test.tsv").write_text("\n".join(judged))
    return found


def test_a_folder_is_read_with_the_queries_that_are_judged(folder):
    beir = read_beir(folder)
    assert (len(beir.documents), len(beir.queries)) == (28, 28)
    assert beir.documents[beir.ids.index("d0")] == "blue flat"
    assert "unjudged" not in beir.query_ids


def test_files_that_are_missing_or_of_another_form_are_named(folder):
    (folder / "corpus.jsonl").write_text('{"id": 1}\n')
    with refused(InputError, r"corpus\.jsonl has no _id and text"):
        read_beir(folder)
    for name in ("corpus.jsonl", "qrels/test.tsv"):
        (folder / name).unlink()
        with refused(InputError, f"there is no file .*{name}"):
            read_beir(folder)


@pytest.mark.slow
def test_the_command_embeds_the_queries_and_the_corpus_or_reads_its_vectors(folder):
    rng = np.random.default_rng(1)
    np.save("bank.npy", rng.random((40, len(WORDS)), np.float32))
    np.save("corpus.npy", embed(read_beir(folder).documents))
    given = ["evaluate", "--queries", str(folder), "--embed", f"{__name__}:embed"]
    bank = ["--bank", "bank.npy", "--method", "is tau=0.1", "--report", "report.html"]
    for corpus, labels in ((bank, ["raw", "is tau=0.1"]), (["corpus.npy"], ["raw"])):
        told = asked(*given, *corpus)
        assert (told["queries"], told["judged"], told["targets"]) == (28, 28, 28)
        assert [method["label"] for method in told["methods"]] == labels
        assert told["methods"][0]["recall"]["1"]["value"] == 1.0
    assert Path("report.html").read_text().startswith("<!DOCTYPE html>")
