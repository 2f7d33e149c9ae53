"""`apply` where there is nothing to mend: nothing is written, unless that is asked for."""

from types import SimpleNamespace

import numpy as np
import pytest

import hubplugin
from hubplugin.jobs.correct import Fit
from hubplugin.measures.hubness import (
    count_targets,
    k_occurrence,
    skewness,
)
from hubplugin.measures.significance import Figure, Side
from tests.galleries import flat_index, normal, unit


@pytest.mark.slow
def test_a_sound_gallery_is_left_alone_but_by_force(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "sound.faiss"
    store = hubplugin.open_store(flat_index(path, unit(rng.normal(size=(20_000, 4)))))
    queries = normal(rng, 1_000, 4)
    queries[:, 0] += 1 / 2
    before = path.read_bytes()
    done = hubplugin.apply(store, queries)
    assert (done.sound, done.written) == (True, False)
    assert "no hubness to correct" in str(done).lower()
    assert path.read_bytes() == before
    assert hubplugin.apply(store, queries, force=True).written


def side(low, high):
    return Side(0.5, 0.5, 0.01, 100, "queries", Figure((low + high) / 2, low, high))


@pytest.mark.parametrize(
    ("skewness", "worst", "right", "mapped", "idle"),
    [
        (0.5, 10, None, False, True),
        (0.5, 10, side(-0.01, 0.02), False, True),
        (0.5, 10, side(0.01, 0.02), False, False),
        (0.5, 10, None, True, False),
        (0.9, 10, None, False, False),
        (0.5, 40, None, False, False),
    ],
)
def test_hubness_a_gain_or_a_map_are_reasons_to_write(
    skewness, worst, right, mapped, idle
):
    raw = SimpleNamespace(
        skewness=skewness, largest=worst / 1000, occurrences={0: 1000}
    )
    trial = SimpleNamespace(raw=raw, right=right, asked=None, queries=1000)
    model = SimpleNamespace(query_map=object() if mapped else None)
    assert Fit(model, None, trial, None).is_idle == idle


@pytest.mark.parametrize("dimensions", [4, 16, 128])
def test_random_vectors_are_left_alone_though_they_do_not_lie_evenly(dimensions):
    """Queries lean to one side; of a large gallery 4,096 targets are tried."""
    model = SimpleNamespace(query_map=None)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        gallery = unit(rng.normal(size=(4_096, dimensions)))
        queries = rng.normal(size=(1_000, dimensions))
        queries[:, 0] += 0.2
        nearest = np.argsort(-(unit(queries) @ gallery.T), axis=1)[:, :10]
        occurrence = k_occurrence(nearest, len(gallery))
        raw = SimpleNamespace(
            skewness=skewness(occurrence),
            largest=occurrence.max() / 1_000,
            occurrences=count_targets(occurrence),
        )
        trial = SimpleNamespace(raw=raw, right=None, asked=None, queries=1_000)
        assert Fit(model, None, trial, None).is_idle
