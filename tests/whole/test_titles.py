"""Titles in a field of a store teach a map beside a log without answers: read, sampled, embedded, applied."""

import numpy as np
import pytest
from qdrant_client import QdrantClient

from hubplugin import Bank, InputError, StoreError, apply, fit, open_store, refit
from hubplugin.bank import bank as banks
from hubplugin.cli.application import spell_command
from hubplugin.results import Step
from tests.commands import run, typed, unwrapped
from tests.galleries import assert_near, collection, flat_store, unit
from tests.refusals import refused

COUNT, DIM = 240, 384

ROWS = np.array([row for row in range(COUNT) if row % 8 > 2])
"""The targets that have a title."""


@pytest.fixture
def vectors(real):
    """Functions, the docstring of each as its title, and queries: docstrings of other functions."""
    names = ("test_targets", "test_queries", "bank_queries")
    return tuple(unit(real[name][:COUNT]) for name in names)


def title(row):
    """What stands in the field: every eighth target has a number, an empty text, or nothing."""
    odd = {0: {"title": row}, 1: {"title": "  "}, 2: {}}
    return odd.get(row % 8, {"title": f"title {row}"})


def in_qdrant(targets):
    client = QdrantClient(path="store")
    payload = [{"of": title(row)} | title(row) for row in range(COUNT)]
    collection(client, targets, payload)
    client.close()
    return "qdrant-local:store/photos"


def read_titles(store, field="title"):
    return Bank.from_field(store, field, "tests.embedding:embed")


@pytest.fixture
def url(vectors, cwd):
    """The URL of a store with titles, in a folder with the model that embeds them."""
    targets, titles, queries = vectors
    np.save("embedded.npy", titles)
    np.save("log.npy", queries)
    return in_qdrant(targets)


@pytest.fixture
def store(url):
    return open_store(url)


def test_a_field_is_read_as_pairs(store):
    pairs = read_titles(store)
    expected = [(f"title {row}", row) for row in ROWS]
    assert sorted(zip(pairs.queries, pairs.answers, strict=True)) == sorted(expected)


def test_of_many_titles_some_are_drawn(store, monkeypatch):
    monkeypatch.setattr(banks, "MOST_PAIRS", 30)
    pairs = read_titles(store)
    assert len(set(pairs.queries)) == 30
    assert list(pairs.queries) == [f"title {row}" for row in pairs.answers]
    assert min(pairs.answers) < COUNT / 3
    assert max(pairs.answers) > COUNT * 2 / 3


def test_a_correction_learns_from_them(url, vectors):
    targets, titles, queries = vectors
    given = ("--bank", "log.npy", "--pairs-from", "title")
    said = unwrapped(typed("apply", url, *given, "--embed", "tests.embedding:embed"))
    assert "150 pairs" in said
    assert "real queries gained 0 to 10 points" in said
    assert "right answers first" not in said, "nobody asked by titles"
    pairs = Bank(titles[ROWS], ROWS)
    model = fit(targets, queries, learn=pairs)
    store = open_store(url)
    written = store.correction().model
    for found, expected in (
        (written.query_map.step, model.query_map.step),
        (written.offsets(targets), model.offsets(targets)),
    ):
        assert_near(found, expected)
    refitted = refit(store, queries, learn=read_titles(store))
    assert refitted.versus.objection is None


def test_diagnose_says_what_they_would_teach(url):
    before = open_store(url).correction()
    embed = ["--embed", "tests.embedding:embed"]
    ran = run("diagnose", url, "--bank", "log.npy", "--pairs-from", "title", *embed)
    said = " ".join(ran.stdout.split())
    assert "A correction would change" in said
    assert "150 pairs" in said
    assert open_store(url).correction() is before is None


def test_a_step_that_learns_names_the_field_and_one_that_does_not_leaves_it_out(url):
    given = {"store": url, "bank": "log.npy", "embed": "m:embed", "pairs_from": "title"}
    learning = spell_command(given, Step("", "apply", learn=True))
    options = "--embed m:embed --pairs-from title --learn"
    assert learning == f"hubplugin apply {url} --bank log.npy {options}"
    plain = spell_command(given, Step("", "apply"))
    assert plain == f"hubplugin apply {url} --bank log.npy"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("refit", "--no-learn", "--pairs-from", "title"),
            "--pairs-from learns a map, and --no-learn drops it",
        ),
        (("apply", "--pairs-from", ""), "expected the name of a field"),
        (
            ("apply", "--pairs-from", "title", "--answers", "log.npy"),
            "the bank has vectors as answers",
        ),
    ],
)
def test_what_goes_wrong_is_one_line(url, words, said):
    command, *options = words
    given = ("--bank", "log.npy", "--embed", "tests.embedding:embed")
    done = run(command, url, *given, *options)
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]


def test_what_has_no_such_field_is_no_store_or_has_no_model_is_refused(
    store, vectors, tmp_path
):
    with refused(
        InputError, "no target has a text in 'headline'; the store has .*title"
    ):
        read_titles(store, "headline")
    said = r"expected a store, got ndarray; open one: hubplugin.open_store\(URL\)"
    with refused(InputError, said):
        read_titles(vectors[0])
    with refused(InputError, "need the model that embeds queries: pass embed="):
        Bank.from_field(store, "title", None)
    index = flat_store(tmp_path, vectors[0])
    said = "its targets are only vectors, without a field 'title'"
    with refused(StoreError, said):
        read_titles(index)


def test_what_becomes_of_the_map_is_said(store, vectors):
    queries = vectors[2]
    pairs = read_titles(store)
    apply(store, queries, learn=pairs)
    said = "no answers to learn a new one from: pass answers=, learn from pairs again .* learn=False"
    with refused(InputError, said):
        refit(store, queries[:200])
    refit(store, queries[:200], learn=False, force=True)
    assert store.correction().model.query_map is None
    apply(store, queries, learn=pairs)
    lost = "the previous correction had a query map, and this one has none: rollback returns to it"
    assert lost in apply(store, queries[:150], force=True).notes
    assert lost not in apply(store, queries[:140], force=True).notes
