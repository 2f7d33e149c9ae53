"""Rankings of other searches are read, and our own written, as TREC and ranx have them."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from ranx import Qrels, Run
from ranx import evaluate as by_ranx
from typer.testing import CliRunner

import hubplugin
from hubplugin.cli import app

K = 7


@pytest.fixture(scope="module")
def vectors():
    rng = np.random.default_rng(0)
    targets = rng.standard_normal((60, 16)).astype(np.float32)
    return targets, (targets + 0.9 * rng.standard_normal((60, 16))).astype(np.float32)


@pytest.fixture
def written(vectors, tmp_path):
    targets, queries = vectors
    names, asked = [f"t{row}" for row in range(60)], [f"q{row}" for row in range(60)]
    bank = queries[::-1] + 0.1
    results = hubplugin.evaluate(
        targets, bank, queries=queries, methods=["csls k=3"], names=names, query_names=asked, k=K
    )
    results.to_runs(tmp_path)
    return results, tmp_path


def test_ranx_reads_what_is_written_and_finds_the_same_recall(written):
    results, folder = written
    qrels = Qrels({f"q{row}": {f"t{row}": 1} for row in range(60)})
    for method, file in zip(results.methods, ("raw.trec", "csls_k=3.trec"), strict=True):
        run = Run.from_file(str(folder / file), kind="trec")
        for k in (1, 5, K):
            assert by_ranx(qrels, run, f"recall@{k}") == pytest.approx(method.recall[k].value)


def test_a_run_that_ranx_writes_stands_beside_our_own(vectors, tmp_path):
    targets, queries = vectors
    rng = np.random.default_rng(1)
    scores = {f"q{row}": {f"t{each}": float(rng.random()) for each in rng.choice(60, 9, False)} for row in range(59)}
    Run(scores, name="other").save(str(tmp_path / "other.trec"), kind="trec")
    names, asked = [f"t{row}" for row in range(60)], [f"q{row}" for row in range(60)]
    results = hubplugin.evaluate(
        targets, queries=queries, names=names, query_names=asked, k=K, runs={"hybrid": tmp_path / "other.trec"}
    )
    lists = [sorted(scores.get(f"q{row}", {}), key=lambda name: -scores[f"q{row}"][name]) for row in range(60)]
    places = [found.index(f"t{row}") + 1 if f"t{row}" in found else np.inf for row, found in enumerate(lists)]
    assert results["hybrid"].best_ranks.tolist() == places
    counts = np.bincount([int(name[1:]) for found in lists for name in found[:K]], minlength=60)
    assert results["hybrid"].hubness.largest == counts.max()
    assert "hybrid" in str(results)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("q0 Q0 t1 1 0.5 a\n", "names 'q0', which is not among the 60 known; pass query_names"),
        ("0 t1 0.5\n", "is no run file: expected lines of 'query Q0 target rank score tag'"),
        ("0 Q0 61 1 0.5 a\n", "names '61', which is not among the 60 known; pass names"),
    ],
)
def test_what_is_no_run_of_these_queries_is_refused(vectors, tmp_path, content, says):
    path = tmp_path / "other.trec"
    path.write_text(content)
    with pytest.raises(hubplugin.InputError, match=says):
        hubplugin.evaluate(vectors[0], queries=vectors[1], runs={"other": path})


def test_names_with_spaces_are_not_written(vectors, tmp_path):
    names = [f"target {row}" for row in range(60)]
    results = hubplugin.evaluate(vectors[0], queries=vectors[1], names=names)
    with pytest.raises(hubplugin.InputError, match="cannot stand in a run file: expected names without spaces"):
        results.to_runs(tmp_path)


def test_a_run_has_a_label_of_its_own(vectors, tmp_path):
    path = tmp_path / "raw.trec"
    path.write_text("0 Q0 1 1 0.5 a\n")
    with pytest.raises(hubplugin.InputError, match="a run cannot be labelled 'raw', as a method is"):
        hubplugin.evaluate(vectors[0], queries=vectors[1], runs={"raw": path})


def test_a_store_is_written_raw_and_corrected_as_it_answers(vectors, tmp_path):
    targets, queries = vectors
    index = faiss.IndexFlatIP(16)
    index.add(targets)
    faiss.write_index(index, str(tmp_path / "photos.faiss"))
    store = hubplugin.open_store(f"faiss:{tmp_path / 'photos.faiss'}?metric=dot")
    hubplugin.apply(store, hubplugin.fit(targets, queries, "csls", metric="dot", k=3))
    hubplugin.evaluate(store, queries=queries, truth=np.arange(60), k=K).to_runs(tmp_path)
    for name, raw in (("raw", True), ("corrected", False)):
        lines = [line.split() for line in (tmp_path / f"{name}.trec").read_text().splitlines()]
        ids = store.search(queries, K, raw=raw).ids
        assert [(line[0], line[2]) for line in lines] == [(str(row), str(key)) for row in range(60) for key in ids[row]]


def test_the_command_reads_and_writes_runs(vectors, tmp_path):
    for name, array in zip(("targets", "queries"), vectors, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "runs").mkdir()
    files = ["--queries", str(tmp_path / "queries.npy"), "--targets", str(tmp_path / "targets.npy")]
    assert CliRunner().invoke(app, ["evaluate", *files, "--write-runs", str(tmp_path / "runs")]).exit_code == 0
    again = tmp_path / "again.trec"
    (tmp_path / "runs" / "raw.trec").rename(again)
    shown = CliRunner().invoke(app, ["evaluate", *files, "--run", str(again), "--json"])
    assert shown.exit_code == 0, shown.output
    assert '"label": "again"' in shown.stdout
