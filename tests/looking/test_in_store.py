"""A real store searched raw and corrected, against the whole matrix in float64."""

from __future__ import annotations

import json

import faiss
import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from typer.testing import CliRunner

import hubplugin
from hubplugin import InputError
from hubplugin.cli import app
from hubplugin.evaluation.true_ids import as_true_ids
from hubplugin.jobs.writing import write
from hubplugin.measures.hubness import skewness
from hubplugin.registry import open_store
from hubplugin_qdrant import QdrantStore

ROWS, QUERIES, FIRST = 400, 150, 1_000
"""Targets and queries of the example set; ids begin at FIRST."""


@pytest.fixture(scope="module")
def vectors(real):
    return unit(real["test_queries"][:QUERIES]), unit(real["test_targets"][:ROWS])


@pytest.fixture(scope="module")
def model(real, vectors):
    return hubplugin.fit(real["bank_queries"][:500], "nnn", targets=vectors[1])


@pytest.fixture
def store(vectors, tmp_path):
    index = faiss.IndexIDMap2(faiss.IndexFlatIP(384))
    index.add_with_ids(vectors[1], FIRST + np.arange(ROWS))
    faiss.write_index(index, str(tmp_path / "photos.faiss"))
    return open_store(f"faiss:{tmp_path / 'photos.faiss'}")


def unit(rows):
    rows = rows.astype(np.float64)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


TRUE = FIRST + np.arange(QUERIES)


def test_figures_are_those_of_the_whole_matrix(store, vectors, model):
    write(store, model)
    found = hubplugin.evaluate_store(store, vectors[0], TRUE)
    queries, targets = (part.astype(np.float64) for part in vectors)
    for ranking, offsets in ((found.raw, 0.0), (found.corrected, model.offsets(targets).astype(np.float64))):
        scores = queries @ targets.T + offsets
        ranks = (scores > scores[np.arange(QUERIES), np.arange(QUERIES)][:, None]).sum(axis=1) + 1
        occurrence = np.bincount(np.argsort(-scores, axis=1)[:, :10].ravel(), minlength=ROWS)
        assert ranking.recall[1].value == pytest.approx((ranks <= 1).mean())
        assert ranking.recall[10].value == pytest.approx((ranks <= 10).mean())
        assert ranking.worst == occurrence.max() / QUERIES
        assert ranking.never == pytest.approx((occurrence == 0).mean())
        assert ranking.skewness == pytest.approx(skewness(occurrence))
        assert ranking.most_found == pytest.approx(np.sort(occurrence)[-4:].sum() / occurrence.sum())
        values, times = np.unique(occurrence, return_counts=True)
        assert ranking.occurrences == dict(zip(values.tolist(), times.tolist(), strict=True))
    assert found.versus.won - found.versus.lost == pytest.approx(QUERIES * found.versus.difference.value)
    bank = model.terms[0].bank.astype(np.float64)
    asked = np.isin(np.arange(QUERIES), (bank @ targets.T).argmax(axis=1))
    assert (found.asked.queries, found.not_asked.queries) == (asked.sum(), (~asked).sum())
    assert (found.queries, found.judged, found.targets) == (QUERIES, QUERIES, ROWS)


def test_examples_show_queries_won_and_lost_with_both_answers(store, vectors, model):
    write(store, model)
    called = [f"what is {row}" for row in range(QUERIES)]
    found = hubplugin.evaluate_store(
        store, vectors[0], TRUE, query_names=called, names=lambda ids: [f"photo {key}" for key in ids]
    )
    outcomes = [example.outcome for example in found.examples]
    assert outcomes == ["won"] * min(3, found.versus.won) + ["lost"] * min(3, found.versus.lost)
    for example in found.examples:
        row = called.index(example.query)
        assert example.truth == [f"photo {FIRST + row} [{FIRST + row}]"]
        first = {"won": example.corrected, "lost": example.raw}[example.outcome][0]
        assert first.true
        assert first.name == example.truth[0]
        assert len(example.raw) == len(example.corrected) == 10


def test_a_store_without_a_correction_is_searched_raw(store, vectors):
    found = hubplugin.evaluate_store(store, vectors[0], TRUE, k=5)
    assert found.corrected is found.versus is None
    assert set(found.raw.recall) == {1, 5}
    assert "no active correction" in str(found)


def test_a_filter_is_part_of_the_search(vectors, model):
    client = QdrantClient(":memory:")
    client.create_collection("photos", models.VectorParams(size=384, distance=models.Distance.COSINE))
    client.upload_points(
        "photos",
        [
            models.PointStruct(id=row, vector=vector.tolist(), payload={"even": row % 2 == 0})
            for row, vector in enumerate(vectors[1])
        ],
    )
    condition = '{"must": [{"key": "even", "match": {"value": true}}]}'
    truth = [[row] if row % 2 == 0 else [] for row in range(QUERIES)]
    found = hubplugin.evaluate_store(QdrantStore(client, "photos"), vectors[0], truth, condition=condition)
    scores = vectors[0].astype(np.float64) @ vectors[1][::2].astype(np.float64).T
    right = scores[::2].argmax(axis=1) == np.arange(QUERIES // 2)
    assert found.judged == QUERIES // 2
    assert found.raw.recall[1].value == pytest.approx(right.mean())
    assert found.raw.never is None  # nobody knows how many meet the condition


def test_true_ids_come_as_arrays_lists_and_files(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([7, -1]))
    (tmp_path / "ids.json").write_text('[["a", "b"], []]')
    (tmp_path / "ids.qrels").write_text("q2 0 a 1\nq2 0 b 0\n")
    assert as_true_ids(tmp_path / "ids.npy", 2) == [{"7"}, set()]
    assert as_true_ids(tmp_path / "ids.json", 2) == [{"a", "b"}, set()]
    assert as_true_ids(tmp_path / "ids.qrels", 2, ["q1", "q2"]) == [set(), {"a"}]
    assert as_true_ids(["a", 3], 2) == [{"a"}, {"3"}]


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        ([3], "has 1 rows for 150 queries"),
        ([-1] * QUERIES, "names no true target for any query"),
        ([0.5] * QUERIES, "0.5 is no id"),
        (range(QUERIES), r"no query finds a true target in faiss:.*find ids such as 1\d\d\d; ground truth names '0'"),
        ("nowhere.npy", r"nowhere\.npy: cannot be read"),
    ],
)
def test_truth_that_cannot_be_used_is_told_in_one_line(store, vectors, truth, says):
    with pytest.raises(InputError, match=says):
        hubplugin.evaluate_store(store, vectors[0], list(truth) if isinstance(truth, range) else truth)


def test_the_command_prints_both_rankings_and_their_figures(store, vectors, model, tmp_path):
    write(store, model)
    np.save(tmp_path / "queries.npy", vectors[0])
    np.save(tmp_path / "truth.npy", TRUE)
    typed = ["evaluate", store.url, "--queries", str(tmp_path / "queries.npy"), "--truth", str(tmp_path / "truth.npy")]
    done = CliRunner().invoke(app, typed, catch_exceptions=False)
    assert done.exit_code == 0
    for part in ("R@1: ", "R@10: ", "queries won", "hubs: ", "asked before: "):
        assert part in done.output
    printed = json.loads(CliRunner().invoke(app, [*typed, "--json"]).stdout)
    assert printed["raw"]["recall"]["1"]["value"] > 0
    assert printed["corrected"]["worst"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["STORE", "--targets", "BANK"], "--targets is for files; a STORE is searched as it is"),
        (["STORE"], "a STORE needs --truth"),
        ([], "expected a STORE, to search it as it is, or --targets"),
        (["--targets", "BANK", "--filter", "{}"], "--filter is for a STORE"),
    ],
)
def test_a_store_and_files_are_not_mixed(store, vectors, tmp_path, options, says):
    np.save(tmp_path / "queries.npy", vectors[0])
    given = {"STORE": store.url, "BANK": str(tmp_path / "queries.npy")}
    typed = [given.get(option, option) for option in options]
    done = CliRunner().invoke(app, ["evaluate", *typed, "--queries", given["BANK"]])
    assert (done.exit_code, says in done.output) == (1, True)
