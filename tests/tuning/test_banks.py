"""Banks are read once, and what is asked of them."""

from pathlib import Path

import numpy as np
import pytest
import torch

import hubplugin
from hubplugin.bank import Bank
from hubplugin.compute import Compute
from hubplugin.guard import judge
from hubplugin.metric import Metric
from hubplugin.validation import sample_of
from hubplugin.vectors import Sliceable
from tests.galleries import flat_index


@pytest.fixture
def read(real):
    """The banks and the gallery of the example set, a part of them, and how often each was read, by name."""
    counts: dict[str, int] = {}

    class Counted(Sliceable):
        def raw_blocks(self, size):
            counts[self.name] = counts.get(self.name, 0) + 1
            return super().raw_blocks(size)

    def counted(name, array):
        return Counted(name, array, array.shape, np.asarray)

    parts = [
        (name, real[name][:400])
        for name in ("bank_queries", "test_targets", "bank_targets")
    ]
    return [counted(name, array) for name, array in parts], counts


def test_a_store_is_corrected_with_each_bank_read_once(read, tmp_path):
    (queries, targets, second), counts = read
    store = hubplugin.open_store(flat_index(tmp_path / "photos.faiss", targets.array()))
    counts.clear()
    hubplugin.apply(store, hubplugin.Bank(queries, second))
    assert counts == {"bank_queries": 1, "bank_targets": 1}


def test_the_experiment_of_a_large_gallery_reads_its_sample_alone(read, monkeypatch):
    monkeypatch.setattr("hubplugin.validation.FIT_ROWS", 50)
    (queries, targets, _), counts = read
    banks = Bank(queries).prepare(Metric.COSINE, Compute()).against(targets)
    assert len(sample_of(banks)) == 100
    assert counts == {"bank_queries": 1, "test_targets": 1}, "read for zero vectors"


QUERIES, GALLERY, ROWS = np.eye(20, 30), np.eye(30), np.arange(20)
VECTORS = {"answers": GALLERY[:20]}


@pytest.mark.parametrize(
    "answers",
    [ROWS, ROWS.tolist(), torch.from_numpy(ROWS), "ids.npy", "clicks.csv"],
    ids=repr,
)
def test_answers_one_for_each_query_are_rows_or_ids(answers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", ROWS)
    Path("clicks.csv").write_text(
        "query,target\n" + "".join(f"{row},{row}\n" for row in ROWS)
    )
    prepared = Bank(QUERIES, answers).prepare("cosine", Compute()).against(GALLERY)
    assert prepared.clicks.tolist() == ROWS.tolist()
    assert prepared.target_bank is None


@pytest.mark.parametrize(
    "answers",
    [GALLERY[:20], GALLERY[:20].tolist(), torch.eye(20, 30), list(GALLERY), "few.npy"],
)
def test_answers_that_are_vectors_are_a_target_bank(answers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("few.npy", GALLERY[:5])
    prepared = Bank(QUERIES, answers).prepare("cosine", Compute()).against(GALLERY)
    assert prepared.target_bank.shape[1] == 30
    assert prepared.clicks is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answers": ROWS, "pairs": ROWS}, "pairs are of answers that are vectors"),
        ({"answers": "log.txt"}, "there is no file 'log.txt'"),
        (
            {"answers": np.arange(19)},
            "answers: 19 were given; expected one id or row of the gallery for each of the 20 bank queries",
        ),
        (
            {"answers": np.full(20, 30)},
            "bank query 0 belongs to row 30, which is outside the gallery of 30 rows",
        ),
        ({"answers": np.full(20, -1)}, "all of them are -1, which stands for none"),
        ({"answers": ["a"] * 20}, "must be rows of the gallery, which are numbers"),
        ({"queries": None}, "no queries were given"),
        (
            {"queries": np.eye(9, 30)},
            "9 distinct queries; holding some of them out needs at least 10",
        ),
        ({"targets": np.eye(1, 30)}, "has one row; hubness needs at least 2 targets"),
        ({"pairs": [0] * 20}, "without answers"),
        (
            {"pairs": [0] * 19 + [20], **VECTORS},
            "query 19 belongs to row 20, which is outside the target bank of 20",
        ),
        (
            {"pairs": [0.5] * 20, **VECTORS},
            "pairs are float64; expected one row of the target bank for each of the 20 bank queries",
        ),
        (
            {"pairs": [3] * 20, **VECTORS},
            "answers name 1 targets; holding some of them out needs at least 10",
        ),
    ],
)
def test_a_bank_that_cannot_be_used_is_refused_in_one_line(change, says):
    given = {
        "queries": QUERIES,
        "answers": None,
        "pairs": None,
        "targets": GALLERY,
        "metric": "cosine",
    } | change
    with pytest.raises(hubplugin.InputError, match=says) as caught:
        judge(
            given["targets"],
            Bank(given["queries"], given["answers"], pairs=given["pairs"]),
            metric=given["metric"],
        )
    assert "\n" not in str(caught.value)
