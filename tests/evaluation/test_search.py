"""The streamed search: ties, small galleries and memory."""

import subprocess
import sys

import numpy as np
import pytest

from hubplugin.compute import Compute, TopK, TruthCounts, search
from hubplugin.metric import Metric
from hubplugin.vectors import as_vectors, prepare


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
import resource
import numpy as np
from hubplugin import Compute
from hubplugin.metric import Metric
from hubplugin.compute import TopK, TruthCounts, search
from hubplugin.vectors import (as_vectors, prepare)
rng = np.random.default_rng(0)
queries = rng.normal(size=(4_000, 8)).astype(np.float32)
targets = as_vectors(rng.normal(size=(100_000, 8)).astype(np.float32), "targets")
def run(count):
    pairs = TruthCounts(np.arange(count), np.arange(count))
    search(queries[:count], targets, Metric.DOT, Compute("cpu", "64MiB"), TopK(10), pairs)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(run(200), run(4_000))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    few, many = (unit * int(peak) for peak in done.stdout.split())
    assert many - few < 100_000_000  # the scores of all pairs would take 1,600,000,000
