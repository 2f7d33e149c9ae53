"""Banks are read once, and what is asked of them."""

from pathlib import Path

import numpy as np
import pytest
import torch

import hubplugin
from hubplugin import Bank, Compute
from hubplugin.guard import judge
from hubplugin.metric import Metric
from hubplugin.validation import sample_of
from hubplugin.vectors import Sliceable
from tests.galleries import flat_store
from tests.refusals import refused


@pytest.fixture
def read(real):
    """The banks and the gallery of the example set, a part of them, and how often each was read, by name."""
    counts: dict[str, int] = {}

    class Counted(Sliceable):
        def raw_blocks(self, size):
            counts[self.name] = counts.get(self.name, 0) + 1
            return super().raw_blocks(size)

    parts = []
    for name in ("bank_queries", "test_targets", "bank_targets"):
        array = real[name][:400]
        parts.append(Counted(name, array, array.shape, np.asarray))
    return parts, counts


def test_a_store_is_corrected_with_each_bank_read_once(read, tmp_path):
    (queries, targets, second), counts = read
    store = flat_store(tmp_path, targets.array())
    counts.clear()
    hubplugin.apply(store, hubplugin.Bank(queries, second))
    assert counts == {"bank_queries": 1, "bank_targets": 1}


def test_the_experiment_of_a_large_gallery_reads_its_sample_alone(read, monkeypatch):
    monkeypatch.setattr("hubplugin.validation.FIT_ROWS", 50)
    (queries, targets, _), counts = read
    banks = Bank(queries).prepare(Metric.COSINE, Compute()).against(targets)
    assert len(sample_of(banks)) == 100
    assert counts == {"bank_queries": 1, "test_targets": 1}, "read for zero vectors"


QUERIES = np.eye(20, 30)
GALLERY = np.eye(30)
ROWS = np.arange(20)


@pytest.mark.parametrize(
    "answers",
    [ROWS, ROWS.tolist(), torch.from_numpy(ROWS), "ids.npy", "clicks.csv"],
    ids=repr,
)
def test_answers_one_for_each_query_are_rows_or_ids(answers, cwd):
    np.save("ids.npy", ROWS)
    lines = ["query,target", *(f"{row},{row}" for row in ROWS)]
    Path("clicks.csv").write_text("\n".join(lines))
    prepared = Bank(QUERIES, answers).prepare("cosine", Compute()).against(GALLERY)
    assert prepared.clicks.tolist() == ROWS.tolist()
    assert prepared.target_bank is None


@pytest.mark.parametrize(
    "answers",
    [GALLERY[:20], GALLERY[:20].tolist(), torch.eye(20, 30), list(GALLERY), "few.npy"],
)
def test_answers_that_are_vectors_are_a_target_bank(answers, cwd):
    np.save("few.npy", GALLERY[:5])
    prepared = Bank(QUERIES, answers).prepare("cosine", Compute()).against(GALLERY)
    assert prepared.target_bank.shape[1] == 30
    assert prepared.clicks is None


def test_equal_answers_of_pairs_are_one_target():
    asked = np.tile(ROWS[::-1], 2)
    queries = GALLERY[asked] + 0.1
    bank = Bank(queries, GALLERY[asked]).prepare("cosine", Compute())
    np.testing.assert_array_equal(bank.target_bank, GALLERY[ROWS[::-1]])
    np.testing.assert_array_equal(bank.target_bank[bank.pairs], GALLERY[asked])


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ("log.txt", "there is no file 'log.txt'"),
        (
            np.arange(19),
            "answers: 19 were given; expected one id or row of the gallery for each of "
            "the 20 bank queries",
        ),
        (
            np.full(20, 30),
            "query 0 belongs to row 30, which is outside the gallery of 30 rows",
        ),
        (np.full(20, -1), "all of them are -1, which means none"),
        (["a"] * 20, "'a' was given; expected row numbers of the gallery"),
        (
            np.full(20, 3),
            "answers name 1 targets; holding some of them out needs at least 10",
        ),
    ],
)
def test_answers_that_cannot_be_used_are_refused_in_one_line(answers, says):
    with refused(hubplugin.InputError, says):
        judge(GALLERY, Bank(QUERIES, answers))


@pytest.mark.parametrize(
    ("queries", "targets", "says"),
    [
        (None, GALLERY, "no queries were given"),
        (np.eye(9, 30), GALLERY, "9 distinct queries; .* needs at least 10"),
        (QUERIES, GALLERY[:1], "has one row; hubness needs at least 2 targets"),
    ],
)
def test_a_bank_or_gallery_that_cannot_be_tried_is_refused(queries, targets, says):
    with refused(hubplugin.InputError, says):
        judge(targets, Bank(queries))
