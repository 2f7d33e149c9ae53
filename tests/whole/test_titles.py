"""Titles in a field of a store teach a map beside a log without answers: read, sampled, embedded, applied."""

import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from typer.testing import CliRunner

import hubplugin
from hubplugin.bank import bank as banks
from hubplugin.cli import app
from hubplugin.cli.application import spell_command
from hubplugin.errors import InputError, StoreError
from hubplugin.results import Step
from tests.galleries import flat_index, unit

COUNT, DIM = 240, 384

MODEL = """
import numpy as np
VECTORS = np.load("titles.npy")
def embed(texts):
    return VECTORS[[int(text.split()[1]) for text in texts]]
"""


@pytest.fixture
def vectors(real):
    """Functions, the docstring of each as its title, and queries: docstrings of other functions."""
    return tuple(
        unit(real[name][:COUNT])
        for name in ("test_targets", "test_queries", "bank_queries")
    )


def title(row):
    """What stands in the field: every eighth target has a number, an empty text, or nothing."""
    return {0: {"title": row}, 1: {"title": "  "}, 2: {}}.get(
        row % 8, {"title": f"title {row}"}
    )


def in_qdrant(folder, targets):
    with_title = [
        models.PointStruct(
            id=row, vector=target.tolist(), payload={"of": title(row)} | title(row)
        )
        for row, target in enumerate(targets)
    ]
    client = QdrantClient(path=str(folder))
    client.create_collection(
        "a", models.VectorParams(size=DIM, distance=models.Distance.COSINE)
    )
    client.upsert("a", with_title)
    client.close()
    return f"qdrant-local:{folder}/a"


@pytest.fixture
def url(vectors, tmp_path, monkeypatch):
    """The URL of a store with titles, in a folder with the model that embeds them."""
    np.save(tmp_path / "titles.npy", vectors[1])
    np.save(tmp_path / "log.npy", vectors[2])
    (tmp_path / "titles_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return in_qdrant(tmp_path / "store", vectors[0])


def test_a_field_is_read_as_pairs(url):
    pairs = hubplugin.Bank.from_field(
        hubplugin.open_store(url), "title", "titles_model:embed"
    )
    rows = [row for row in range(COUNT) if row % 8 > 2]
    expected = [(f"title {row}", row) for row in rows]
    assert sorted(zip(pairs.queries, pairs.answers, strict=True)) == sorted(expected)


def test_of_many_titles_some_are_drawn(url, monkeypatch):
    monkeypatch.setattr(banks, "MOST_PAIRS", 30)
    pairs = hubplugin.Bank.from_field(
        hubplugin.open_store(url), "title", "titles_model:embed"
    )
    assert len(set(pairs.queries)) == 30
    assert all(
        text == f"title {id}"
        for text, id in zip(pairs.queries, pairs.answers, strict=True)
    )
    rows = np.array([int(text.split()[1]) for text in pairs.queries])
    assert rows.min() < COUNT / 3
    assert rows.max() > COUNT * 2 / 3


def test_a_correction_learns_from_them(url, vectors):
    targets, titles, queries = vectors
    arguments = [
        "apply",
        url,
        "--bank",
        "log.npy",
        "--pairs-from",
        "title",
        "--embed",
        "titles_model:embed",
    ]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "as 150 pairs taught" in ran.output
    assert "real queries gained 0 to 6 points" in " ".join(ran.output.split())
    assert "right answers first" not in ran.output, "nobody asked by titles"
    rows = np.array([row for row in range(COUNT) if row % 8 > 2])
    model = hubplugin.fit(targets, queries, learn=hubplugin.Bank(titles[rows], rows))
    store = hubplugin.open_store(url)
    written = store.correction().model
    np.testing.assert_allclose(
        written.query_map.step, model.query_map.step, rtol=0, atol=1e-5
    )
    np.testing.assert_allclose(
        written.offsets(targets), model.offsets(targets), rtol=0, atol=1e-5
    )
    refitted = hubplugin.refit(
        store,
        queries,
        learn=hubplugin.Bank.from_field(store, "title", "titles_model:embed"),
    )
    assert refitted.versus.objection is None


def test_diagnose_says_what_they_would_teach(url):
    before = hubplugin.open_store(url).correction()
    typed = ["--bank", "log.npy", "--pairs-from", "title"]
    embed = ["--embed", "titles_model:embed"]
    ran = CliRunner().invoke(app, ["diagnose", url, *typed, *embed])
    assert ran.exit_code == 0, ran.output
    said = " ".join(ran.output.split())
    assert "A map of the query would change" in said
    assert "as 150 pairs taught" in said
    assert hubplugin.open_store(url).correction() is before is None


def test_a_step_that_learns_names_the_field_and_one_that_does_not_leaves_it_out(url):
    typed = {
        "store": url,
        "bank": "log.npy",
        "embed": "titles_model:embed",
        "pairs_from": "title",
    }
    learning = spell_command(typed, Step("", "apply", learn=True))
    options = "--embed titles_model:embed --pairs-from title --learn"
    assert learning == f"hubplugin apply {url} --bank log.npy {options}"
    plain = spell_command(typed, Step("", "apply"))
    assert plain == f"hubplugin apply {url} --bank log.npy"


def test_a_field_that_nothing_has_is_named(url):
    line = "no target has a text in 'headline'; there are .*title"
    with pytest.raises(InputError, match=line):
        hubplugin.Bank.from_field(
            hubplugin.open_store(url), "headline", "titles_model:embed"
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("refit", "--no-learn", "--pairs-from", "title"),
            "--pairs-from teaches a map, and --no-learn wants none",
        ),
        (("apply", "--pairs-from", ""), "expected the name of a field"),
        (
            ("apply", "--pairs-from", "title", "--answers", "log.npy"),
            "the bank has vectors as answers",
        ),
    ],
)
def test_what_goes_wrong_is_one_line(url, arguments, said):
    name, *options = arguments
    ran = CliRunner().invoke(
        app, [name, url, "--bank", "log.npy", "--embed", "titles_model:embed", *options]
    )
    assert ran.exit_code == 1, ran.output
    assert said in ran.output


def test_what_is_no_store_or_has_no_model_is_refused(url, vectors):
    with pytest.raises(
        InputError,
        match=r"expected a store, got ndarray; open one: hubplugin.open_store\(URL\)",
    ):
        hubplugin.Bank.from_field(vectors[0], "title", "titles_model:embed")
    with pytest.raises(
        InputError, match="need the model that embeds queries: pass embed="
    ):
        hubplugin.Bank.from_field(hubplugin.open_store(url), "title", None)


def test_an_index_file_has_no_fields(vectors, tmp_path):
    store = hubplugin.open_store(flat_index(tmp_path / "a.faiss", vectors[0]))
    with pytest.raises(
        StoreError, match="its targets are vectors alone, without a field 'title'"
    ):
        hubplugin.Bank.from_field(store, "title", "titles_model:embed")


def test_what_becomes_of_the_map_is_said(url, vectors):
    queries = vectors[2]
    store = hubplugin.open_store(url)
    pairs = hubplugin.Bank.from_field(store, "title", "titles_model:embed")
    hubplugin.apply(store, queries, learn=pairs)
    with pytest.raises(
        InputError,
        match=r"nothing here teaches a new one: pass answers=, the pairs again .* or learn=False",
    ):
        hubplugin.refit(store, queries[:200])
    hubplugin.refit(store, queries[:200], learn=False, force=True)
    assert store.correction().model.query_map is None
    hubplugin.apply(store, queries, learn=pairs)
    lost = "the correction of before had a map of queries, and this one has none: rollback returns to it"
    assert lost in hubplugin.apply(store, queries[:150], force=True).notes
    assert lost not in hubplugin.apply(store, queries[:140], force=True).notes
