"""What `diagnose` says of the next steps: what was measured, what is typical by a table, what cannot be known."""

from pathlib import Path

import numpy as np
import pytest

import hubplugin
from hubplugin import Bank
from hubplugin.jobs.diagnose import LEARNED
from tests.galleries import flat_index, unit

ROOT = Path(__file__).parents[2]
QUERIES = 300

WORDS = [f"word{number}" for number in range(2_000)]


@pytest.fixture(scope="module")
def example(real):
    return unit(real["test_queries"][:QUERIES]), unit(real["test_targets"][:600])


def texts_of(rng):
    """600 documents of ten words, and queries of five, of which three are in the document of their row."""
    documents = [list(rng.choice(WORDS[:1_000], 10, replace=False)) for _ in range(600)]
    queries = [
        [*document[:3], *rng.choice(WORDS[1_000:], 2, replace=False)]
        for document in documents[:QUERIES]
    ]
    return [" ".join(words) for words in queries], [
        " ".join(words).upper() for words in documents
    ]


def steps(diagnosis):
    """The next steps as they stand in the last line, by name, and where their figures come from."""
    told = str(diagnosis).splitlines()[-1]
    assert (
        told
        == f"what next: {'; '.join(f'{each.step}: {each.says}' for each in diagnosis.next_steps)}"
    )
    return {each.step: (each.source, each.says) for each in diagnosis.next_steps}


def test_without_answers_it_says_what_would_tell_and_what_is_typical(example):
    told = steps(hubplugin.diagnose(example[1], example[0]))
    assert told["as it is"][0] == "unknown"
    assert (
        "not known without answers (--answers): fifty queries show"
        in told["as it is"][1]
    )
    assert told["with 50 clicks or more and learn"][0] == "table"
    assert told["BM25 beside it"] == (
        "unknown",
        "not known without clicks, and the texts of queries and documents",
    )


def test_fewer_answers_than_a_map_needs_do_not_promise_that_learn_would_run(example):
    told = steps(hubplugin.diagnose(example[1], Bank(example[0][:40], np.arange(40))))
    assert told["as it is"][0] == "measured"
    assert "with 50 clicks or more and learn" in told


def test_with_answers_it_says_what_was_measured_on_held_out_queries(example):
    diagnosis = hubplugin.diagnose(example[1], Bank(example[0], np.arange(QUERIES)))
    told, change = steps(diagnosis), diagnosis.trial.change
    source, says = told["as it is"]
    assert source == "measured"
    assert (
        f"{100 * change.value:+.1f} points (95 % interval {100 * change.low:+.1f} to {100 * change.high:+.1f})"
        in says
    )
    assert f"{diagnosis.trial.right.queries} held-out queries" in says
    assert told["with learn (--learn)"][0] == "table"


def test_what_was_learned_takes_the_place_of_what_is_typical(example):
    diagnosis = hubplugin.diagnose(
        example[1], Bank(example[0], np.arange(QUERIES)), learn=True
    )
    source, says = steps(diagnosis)["with learn"]
    assert source == "measured"
    assert f"{100 * diagnosis.lesson.other.change.value:+.1f} points" in says


def test_a_map_is_not_promised_where_none_can_be(example):
    told = steps(hubplugin.diagnose(example[1], example[0], metric="euclidean"))
    assert told["with learn"] == (
        "unknown",
        "not here: a map needs cosine or dot product, and a store that holds it",
    )


@pytest.mark.parametrize("where", ["texts", "names"])
def test_words_that_queries_share_with_their_answers_are_counted(
    example, rng, tmp_path, where
):
    queries, documents = texts_of(rng)
    store = hubplugin.open_store(
        flat_index(tmp_path / "texts.faiss", example[1], 1_000 + np.arange(600))
    )
    vectors = dict(zip(queries, example[0], strict=True))
    bank = Bank(
        queries,
        1_000 + np.arange(QUERIES),
        embed=lambda texts: np.stack([vectors[text] for text in texts]),
    )
    diagnosis = hubplugin.diagnose(
        store, bank, **{where: lambda ids: [documents[key - 1_000] for key in ids]}
    )
    figures = diagnosis.as_json()["next_steps"][-1]["figures"]
    assert figures["share"] == pytest.approx(3 / 5)
    assert figures["by_chance"] < 0.02
    assert "60.0 % of their words" in steps(diagnosis)["BM25 beside it"][1]


def test_what_is_typical_is_the_table_of_the_page():
    """Run `python -m benchmarks.learning --write docs/learning.md`, then copy "map over raw" to LEARNED."""
    table = (
        (ROOT / "docs" / "learning.md")
        .read_text()
        .partition("<!-- learning -->")[2]
        .partition("<!-- end -->")[0]
    )
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")]
        for line in table.strip().splitlines()
    )
    column = head.index("map over raw")
    stated = {
        row[1].partition(",")[0]: tuple(map(float, row[column].split(" / ")))
        for row in rows
    }
    assert {side: stated[side] for side in LEARNED} == LEARNED


def test_hubs_have_their_own_names_where_the_gallery_has_a_zero_vector(example):
    queries, targets = example
    zero = np.concatenate([np.zeros((1, targets.shape[1]), np.float32), targets])
    plain, shifted = (
        hubplugin.diagnose(gallery, queries) for gallery in (targets, zero)
    )
    assert [hub.id - 1 for hub in shifted.hubs] == [hub.id for hub in plain.hubs]
