"""A sample of a gallery, and how much of it a bank covers, against hand counts."""

import numpy as np

import hubplugin
from hubplugin import Metric
from hubplugin.vectors import as_vectors, sampled


def test_a_sample_is_of_rows_that_are_there_each_at_most_once(rng):
    source = np.arange(40_000, dtype=np.float32)[:, None]
    drawn = sampled(as_vectors(source, "targets"), 500, Metric.DOT, np.random.default_rng(0))[:, 0]
    assert len(np.unique(drawn)) == 500
    assert (np.diff(drawn) > 0).all()


def test_coverage_is_the_share_of_targets_that_some_bank_row_finds_first():
    targets = np.eye(8)
    bank = np.array([[1, 0.1, 0, 0, 0, 0, 0, 0], [1, 0, 0.2, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0]], np.float32)
    found = hubplugin.evaluate(targets, bank, queries=targets, metric="dot", methods=[], k=1)
    assert found.coverage == 2 / 8
