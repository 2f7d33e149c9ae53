"""A real store searched raw and corrected, against the whole matrix in float64."""

import json
import sys
from collections import Counter
from pathlib import Path

import faiss
import numpy as np
import pytest
from qdrant_client import QdrantClient

import hubplugin_qdrant
from hubplugin import InputError, StoreError, apply, evaluate, fit, open_store
from hubplugin.measures.hubness import skewness
from tests.commands import asked, complains, run, typed
from tests.core.formulas import similarity
from tests.galleries import collection, flat_store, unit
from tests.refusals import refused

ROWS, QUERIES, FIRST = 400, 150, 1_000
"""Targets and queries of the example set; ids begin at FIRST."""


@pytest.fixture(scope="module")
def vectors(real):
    return unit(real["test_queries"][:QUERIES]), unit(real["test_targets"][:ROWS])


@pytest.fixture(scope="module")
def model(real, vectors):
    return fit(vectors[1], real["bank_queries"][:500], "nnn")


@pytest.fixture
def store(vectors, cwd):
    """A store in the folder of this process, and queries with their true ids."""
    np.save("queries.npy", vectors[0])
    np.save("truth.npy", TRUE)
    ids = FIRST + np.arange(ROWS)
    return flat_store(cwd, vectors[1], ids)


@pytest.fixture
def corrected(store, model):
    apply(store, model, force=True)
    return store


TRUE = FIRST + np.arange(QUERIES)


def test_figures_are_those_of_the_whole_matrix(corrected, vectors, model):
    found = evaluate(corrected, queries=vectors[0], truth=TRUE)
    raw = similarity(*vectors, "cosine")
    for ranking, scores in (
        (found.raw, raw),
        (found["corrected"], raw + model.offsets(vectors[1])),
    ):
        ranked = np.argsort(-scores, axis=1)[:, :10]
        right = ranked == np.arange(QUERIES)[:, None]
        occurrence = np.bincount(ranked.ravel(), minlength=ROWS)
        hubness = ranking.hubness
        for figure, expected in (
            (ranking.recall[1].value, right[:, 0].mean()),
            (ranking.recall[10].value, right.any(axis=1).mean()),
            (ranking.worst, occurrence.max() / QUERIES),
            (hubness.anti_hub_share, (occurrence == 0).mean()),
            (hubness.skewness, skewness(occurrence)),
        ):
            assert figure == pytest.approx(expected)
        assert ranking.occurrences == Counter(occurrence.tolist())
    versus = found["corrected"].versus_raw
    assert versus.won - versus.lost == pytest.approx(QUERIES * versus.change.value)
    assert (found.queries, found.judged, found.targets) == (QUERIES, QUERIES, ROWS)


ASKED = ("--queries", "queries.npy", "--truth", "truth.npy")


def test_an_emptied_store_is_told_in_one_line_whatever_is_asked(corrected):
    index = faiss.read_index("photos.faiss")
    index.remove_ids(FIRST + np.arange(ROWS))
    faiss.write_index(index, "photos.faiss")
    for words in (["evaluate", corrected.url, *ASKED], ["refresh", corrected.url]):
        complains(*words, said="is empty; ")
    told = typed("inspect", corrected.url, status=4)
    assert "no target is left in the store" in told.lower()


def test_examples_show_queries_won_and_lost_with_both_answers(corrected, vectors):
    called = [f"what is {row}" for row in range(QUERIES)]
    found = evaluate(
        corrected,
        queries=vectors[0],
        truth=TRUE,
        query_names=called,
        names=lambda ids: [f"photo {key}" for key in ids],
    )
    outcomes = [example.right for example in found.examples]
    versus = found["corrected"].versus_raw
    assert outcomes == [True] * min(3, versus.won) + [False] * min(3, versus.lost)
    for example in found.examples:
        row = called.index(example.query)
        query = vectors[0][row : row + 1]
        raw = corrected.search(query, 1, raw=True).ids[0][0]
        after = corrected.search(query, 1).ids[0][0]
        assert example.after == f"photo {after} [{after}]"
        assert example.right == (after == FIRST + row)
        assert example.right != (raw == FIRST + row)
    misled = [(hub.id, each) for hub in found.hubs for each in hub.misled]
    assert misled
    for hub, each in misled:
        query = vectors[0][called.index(each.query)][None]
        assert corrected.search(query, 1, raw=True).ids[0][0] == hub
        assert each.after == f"photo {corrected.search(query, 1).ids[0][0]}"


def test_a_store_without_a_correction_is_searched_raw(store, vectors):
    found = evaluate(store, queries=vectors[0], truth=TRUE, k=5)
    assert [method.label for method in found.methods] == ["raw"]
    assert found.shown is None
    assert set(found.raw.recall) == {1, 5}
    assert "there is no correction" in str(found)


def test_a_filter_is_part_of_the_search_and_what_is_none_is_refused(store, vectors):
    client = QdrantClient(":memory:")
    payload = [{"even": row % 2 == 0} for row in range(ROWS)]
    collection(client, vectors[1], payload)
    condition = '{"must": [{"key": "even", "match": {"value": true}}]}'
    truth = [[row] if row % 2 == 0 else [] for row in range(QUERIES)]
    photos = hubplugin_qdrant.open_store(client, "photos")
    found = evaluate(photos, queries=vectors[0], truth=truth, condition=condition)
    scores = similarity(vectors[0][::2], vectors[1][::2], "cosine")
    right = scores.argmax(axis=1) == np.arange(QUERIES // 2)
    assert found.judged == QUERIES // 2
    assert found.raw.recall[1].value == pytest.approx(right.mean())
    assert found.raw.hubness is None  # nobody knows how many meet the condition
    with refused(InputError, "is not a Qdrant filter in JSON"):
        photos.with_filter('{"musst": []}')
    with refused(StoreError, "does not support filters"):
        store.with_filter(condition)


def test_ids_of_another_kind_are_told_in_one_line(store, vectors):
    with refused(InputError, r"find ids such as 1\d\d\d, the ground truth names 0"):
        evaluate(store, queries=vectors[0], truth=range(QUERIES))


def test_a_store_is_asked_no_zero_vectors(store, vectors):
    queries = np.insert(vectors[0], 3, 0, axis=0)
    store = open_store(f"{store.url}?metric=cosine")
    with refused(InputError, "queries: row 3 is a zero vector"):
        evaluate(store, queries=queries, truth=np.zeros(len(queries), int))


@pytest.fixture
def texts(store, vectors):
    """Test queries as a user of texts has them, in a file, and the model that embeds them."""
    np.save("embedded.npy", vectors[0])
    lines = [json.dumps({"question": f"question {row}"}) for row in range(QUERIES)]
    Path("test.jsonl").write_text("\n".join(lines))
    return ["--queries", "test.jsonl", "--embed", "tests.embedding:embed"]


def figures(*words):
    return asked("evaluate", *words)


def test_test_queries_are_texts_where_a_model_is_named(store, texts):
    # The first thing wrong is named first.
    wrong = ("--queries", "test.jsonl", "--embed", "nowhere:embed")
    complains("evaluate", store.url, *wrong, said="--truth")
    by_texts = figures(store.url, *texts, "--truth", "truth.npy")
    assert by_texts == figures(store.url, *ASKED)
    # Among files the bank may be texts as well.
    files = ("queries.npy", "--method", "is")
    by_vectors = figures(*files, "--queries", "queries.npy", "--bank", "queries.npy")
    for bank in ("test.jsonl", "queries.npy"):
        assert figures(*files, *texts, "--bank", bank) == by_vectors


def test_targets_in_a_file_are_called_by_texts_of_another(store):
    names = [f"photo {row}" for row in range(QUERIES)]
    Path("names.txt").write_text("\n".join(names))
    found = figures("queries.npy", "--queries", "queries.npy", "--show", "names.txt")
    assert {hub["name"] for hub in found["hubs"]} <= set(names)


def test_a_test_query_without_a_text_is_told_since_truth_goes_by_rows(store, texts):
    lines = Path("test.jsonl").read_text().splitlines()
    lines[7] = "{}"
    Path("test.jsonl").write_text("\n".join(lines))
    done = run("evaluate", store.url, *texts, "--truth", "truth.npy")
    assert done.returncode == 1
    said = "queries (test.jsonl): row 7, counted from 0, has no text"
    assert said in done.stderr


def test_a_store_and_files_are_evaluated_without_the_extra_but_for_plans(
    corrected, vectors, monkeypatch
):
    """So that the commands of the README run in what `make demo` installs."""
    extra = ("scipy", "ot", "jinja2")
    for name in [*sys.modules, *extra]:
        if name.partition(".")[0] in extra:
            monkeypatch.setitem(sys.modules, name, None)
    assert evaluate(corrected, queries=vectors[0], truth=TRUE).shown is not None
    given = {"queries": vectors[0], "truth": TRUE - FIRST}
    assert evaluate(vectors[1], **given).raw.recall[1].value > 0
    with refused(InputError, r"'hn' needs scipy; .*evaluation"):
        evaluate(vectors[1], **given, methods=["hn"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("STORE", *ASKED, "--bank", "queries.npy"), "--bank is for arrays"),
        (("STORE", *ASKED, "--metric", "dot"), "--metric is for arrays"),
        (("STORE", *ASKED[:2]), "a store needs ids of true targets: pass --truth"),
    ],
)
def test_a_store_and_files_are_not_mixed(store, words, said):
    words = [store.url if word == "STORE" else word for word in words]
    complains("evaluate", *words, said=said)
