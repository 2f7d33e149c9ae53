"""A real store searched raw and corrected, against the whole matrix in float64."""

import json
import sys
from importlib import invalidate_caches
from pathlib import Path

import faiss
import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from typer.testing import CliRunner

import hubplugin
import hubplugin_qdrant
from hubplugin import InputError, StoreError
from hubplugin.cli import app
from hubplugin.jobs.write import write
from hubplugin.measures.hubness import skewness
from hubplugin.registry import open_store
from tests.galleries import flat_index, unit

ROWS, QUERIES, FIRST = 400, 150, 1_000
"""Targets and queries of the example set; ids begin at FIRST."""


@pytest.fixture(scope="module")
def vectors(real):
    return unit(real["test_queries"][:QUERIES]), unit(real["test_targets"][:ROWS])


@pytest.fixture(scope="module")
def model(real, vectors):
    return hubplugin.fit(vectors[1], real["bank_queries"][:500], "nnn")


@pytest.fixture
def store(vectors, tmp_path):
    return open_store(
        flat_index(tmp_path / "photos.faiss", vectors[1], FIRST + np.arange(ROWS))
    )


TRUE = FIRST + np.arange(QUERIES)


def test_figures_are_those_of_the_whole_matrix(store, vectors, model):
    write(store, model)
    found = hubplugin.evaluate(store, queries=vectors[0], truth=TRUE)
    queries, targets = (part.astype(np.float64) for part in vectors)
    for ranking, offsets in (
        (found.raw, 0.0),
        (found["corrected"], model.offsets(targets).astype(np.float64)),
    ):
        scores = queries @ targets.T + offsets
        ranks = (scores > scores[np.arange(QUERIES), np.arange(QUERIES)][:, None]).sum(
            axis=1
        ) + 1
        occurrence = np.bincount(
            np.argsort(-scores, axis=1)[:, :10].ravel(), minlength=ROWS
        )
        assert ranking.recall[1].value == pytest.approx((ranks <= 1).mean())
        assert ranking.recall[10].value == pytest.approx((ranks <= 10).mean())
        assert ranking.worst == occurrence.max() / QUERIES
        assert ranking.hubness.anti_hub_share == pytest.approx((occurrence == 0).mean())
        assert ranking.hubness.skewness == pytest.approx(skewness(occurrence))
        assert ranking.most_found == pytest.approx(
            np.sort(occurrence)[-4:].sum() / occurrence.sum()
        )
        values, times = np.unique(occurrence, return_counts=True)
        assert ranking.occurrences == dict(
            zip(values.tolist(), times.tolist(), strict=True)
        )
    versus = found["corrected"].versus_raw
    assert versus.won - versus.lost == pytest.approx(QUERIES * versus.change.value)
    assert (found.queries, found.judged, found.targets) == (QUERIES, QUERIES, ROWS)


def test_an_emptied_store_is_told_in_one_line_whatever_is_asked(
    store, vectors, model, tmp_path
):
    write(store, model)
    url = store.url
    path = url.partition(":")[2]
    index = faiss.read_index(path)
    index.remove_ids(FIRST + np.arange(ROWS))
    faiss.write_index(index, path)
    np.save(tmp_path / "queries.npy", vectors[0])
    np.save(tmp_path / "truth.npy", TRUE)
    asked = ["--queries", f"{tmp_path}/queries.npy", "--truth", f"{tmp_path}/truth.npy"]
    for typed in (["evaluate", url, *asked], ["refresh", url]):
        said = CliRunner().invoke(app, typed)
        assert (said.exit_code, said.output.count("\n")) == (1, 1), said.output
        assert "is empty; " in said.output
    inspected = CliRunner().invoke(app, ["inspect", url])
    assert inspected.exit_code == 4
    assert "no target is left in the store" in inspected.stdout.lower()


def test_examples_show_queries_won_and_lost_with_both_answers(store, vectors, model):
    write(store, model)
    called = [f"what is {row}" for row in range(QUERIES)]
    found = hubplugin.evaluate(
        store,
        queries=vectors[0],
        truth=TRUE,
        query_names=called,
        names=lambda ids: [f"photo {key}" for key in ids],
    )
    outcomes = [example.outcome for example in found.examples]
    versus = found["corrected"].versus_raw
    assert outcomes == ["won"] * min(3, versus.won) + ["lost"] * min(3, versus.lost)
    for example in found.examples:
        row = called.index(example.query)
        assert example.right == f"photo {FIRST + row} [{FIRST + row}]"
        first = store.search(vectors[0][row : row + 1], 1, raw=example.outcome == "won")
        assert example.wrong == f"photo {first.ids[0][0]} [{first.ids[0][0]}]"


def test_a_store_without_a_correction_is_searched_raw(store, vectors):
    found = hubplugin.evaluate(store, queries=vectors[0], truth=TRUE, k=5)
    assert [method.label for method in found.methods] == ["raw"]
    assert found.shown is None
    assert set(found.raw.recall) == {1, 5}
    assert "No active correction" in str(found)


def test_a_filter_is_part_of_the_search_and_what_is_none_is_refused(
    store, vectors, model
):
    client = QdrantClient(":memory:")
    client.create_collection(
        "photos", models.VectorParams(size=384, distance=models.Distance.COSINE)
    )
    payload = [{"even": row % 2 == 0} for row in range(ROWS)]
    client.upload_collection("photos", vectors[1], payload, ids=range(ROWS))
    condition = '{"must": [{"key": "even", "match": {"value": true}}]}'
    truth = [[row] if row % 2 == 0 else [] for row in range(QUERIES)]
    photos = hubplugin_qdrant.open_store(client, "photos")
    found = hubplugin.evaluate(
        photos, queries=vectors[0], truth=truth, condition=condition
    )
    scores = vectors[0].astype(np.float64) @ vectors[1][::2].astype(np.float64).T
    right = scores[::2].argmax(axis=1) == np.arange(QUERIES // 2)
    assert found.judged == QUERIES // 2
    assert found.raw.recall[1].value == pytest.approx(right.mean())
    assert found.raw.hubness is None  # nobody knows how many meet the condition
    with pytest.raises(InputError, match="is no Qdrant filter in JSON"):
        photos.with_filter('{"musst": []}')
    with pytest.raises(StoreError, match="searches without filters"):
        store.with_filter(condition)


def test_ids_of_another_kind_are_told_in_one_line(store, vectors):
    with pytest.raises(
        InputError, match=r"find ids such as 1\d\d\d; ground truth names 0"
    ):
        hubplugin.evaluate(store, queries=vectors[0], truth=range(QUERIES))


def test_a_store_is_asked_no_zero_vectors(store, vectors):
    queries = np.insert(vectors[0], 3, 0, axis=0)
    store = open_store(f"{store.url}?metric=cosine")
    with pytest.raises(hubplugin.InputError, match="queries: row 3 is a zero vector"):
        hubplugin.evaluate(store, queries=queries, truth=np.zeros(len(queries), int))


MODEL = """
import numpy as np
def embed(texts):
    return np.load("queries.npy")[[int(text.removeprefix("question ")) for text in texts]]
"""


@pytest.fixture
def texts(vectors, tmp_path, monkeypatch):
    """Test queries as a user of texts has them: questions in a file, and a module of his own that embeds them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "my_queries", raising=False)
    invalidate_caches()
    np.save("queries.npy", vectors[0])
    np.save("truth.npy", TRUE)
    Path("my_queries.py").write_text(MODEL)
    lines = [{"question": f"question {row}"} for row in range(QUERIES)]
    Path("test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    yield ["--queries", "test.jsonl", "--embed", "my_queries:embed"]
    sys.modules.pop("my_queries", None)


def evaluated(*typed):
    return CliRunner().invoke(app, ["evaluate", *map(str, typed)])


def figures(*typed):
    return json.loads(evaluated(*typed, "--json").stdout)


def test_test_queries_are_texts_where_a_model_is_named(store, texts):
    said = evaluated(store.url, "--queries", "test.jsonl", "--embed", "nowhere:embed")
    assert "--truth" in said.output, "the first thing wrong is named first"
    by_vectors = figures(store.url, "--queries", "queries.npy", "--truth", "truth.npy")
    assert figures(store.url, *texts, "--truth", "truth.npy") == by_vectors
    np.save(
        "targets.npy", np.load("queries.npy")
    )  # among files, too, where the bank may be texts as well
    files = ("targets.npy", "--method", "is")
    by_vectors = figures(*files, "--queries", "queries.npy", "--bank", "queries.npy")
    assert figures(*files, *texts, "--bank", "test.jsonl") == by_vectors
    assert figures(*files, *texts, "--bank", "queries.npy") == by_vectors


def test_a_test_query_without_a_text_is_told_since_truth_goes_by_rows(store, texts):
    lines = Path("test.jsonl").read_text().splitlines()
    lines[7] = "{}"
    Path("test.jsonl").write_text("\n".join(lines))
    done = evaluated(store.url, *texts, "--truth", "truth.npy")
    assert done.exit_code == 1
    assert "queries (test.jsonl): row 7, counted from 0, has no text" in done.output


def test_a_store_and_files_are_evaluated_without_the_extra_but_for_plans(
    store, vectors, model, monkeypatch
):
    """So that the commands of the README run in what `make demo` installs."""
    write(store, model)
    extra = ("scipy", "ot", "jinja2")
    for name in [*sys.modules, *extra]:
        if name.partition(".")[0] in extra:
            monkeypatch.setitem(sys.modules, name, None)
    assert hubplugin.evaluate(store, queries=vectors[0], truth=TRUE).shown is not None
    asked = {"queries": vectors[0], "truth": TRUE - FIRST}
    assert hubplugin.evaluate(vectors[1], **asked).raw.recall[1].value > 0
    with pytest.raises(InputError, match=r"'hn' needs scipy; .*evaluation"):
        hubplugin.evaluate(vectors[1], **asked, methods=["hn"])


def test_a_store_and_files_are_not_mixed(store, vectors, tmp_path):
    np.save(tmp_path / "queries.npy", vectors[0])
    np.save(tmp_path / "truth.npy", TRUE)
    queries = ("--queries", tmp_path / "queries.npy")
    of_store = (store.url, "--truth", tmp_path / "truth.npy", *queries)
    for typed, says in (
        ((*of_store, "--bank", tmp_path / "queries.npy"), "--bank is for arrays"),
        ((*of_store, "--metric", "dot"), "--metric is for arrays"),
        ((store.url, *queries), "a store needs ids of true targets: pass --truth"),
        (queries, "expected a STORE, or a file of vectors"),
    ):
        done = evaluated(*typed)
        assert (done.exit_code, says in done.output) == (1, True), done.output
