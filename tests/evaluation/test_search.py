"""The streamed search: ties, small galleries and memory."""

import numpy as np
import pytest

from hubplugin.compute import Compute, TopK, TruthCounts, search
from hubplugin.metric import Metric
from hubplugin.vectors import as_vectors, prepare
from tests.peaks import peak_memory


def run(queries, targets, metric, collector):
    bank = prepare(as_vectors(queries, "queries"), metric)
    gallery = as_vectors(targets, "targets")
    search(bank, gallery, metric, Compute("cpu", "1MiB"), collector)


@pytest.mark.parametrize("metric", Metric)
def test_copies_of_the_true_target_tie_with_it_wherever_they_stand(rng, metric):
    copies = np.broadcast_to(rng.normal(size=384), (17_001, 384))
    counts = TruthCounts(np.arange(70), rng.integers(0, 17_001, 70))
    run(rng.normal(size=(70, 384)), copies, metric, counts)
    assert (counts.greater == 0).all()
    assert (counts.equal == 17_000).all()


def test_a_gallery_smaller_than_k_is_returned_whole(rng):
    top = TopK(10)
    run(rng.normal(size=(3, 4)), rng.normal(size=(5, 4)), Metric.DOT, top)
    assert (np.sort(top.rows[0], axis=1) == np.arange(5)).all()


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_number_of_similarities():
    program = """
import sys
import numpy as np
from hubplugin import Compute
from hubplugin.metric import Metric
from hubplugin.compute import TopK, TruthCounts, search
from hubplugin.vectors import as_vectors
rng = np.random.default_rng(0)
count = int(sys.argv[1])
queries = rng.normal(size=(count, 8)).astype(np.float32)
targets = as_vectors(rng.normal(size=(100_000, 8)).astype(np.float32), "targets")
pairs = TruthCounts(np.arange(count), np.arange(count))
search(queries, targets, Metric.DOT, Compute("cpu", "64MiB"), TopK(10), pairs)
"""
    few, many = (peak_memory(program, count) for count in (200, 4_000))
    assert many - few < 100  # the scores of all pairs would take 1,600
