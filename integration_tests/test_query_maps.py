"""A map of the query that pairs have taught: a server ranks as model.queries(q) @ t + offset does in float64."""

import numpy as np
import pytest

import hubplugin
from hubplugin import OffsetModel
from hubplugin.jobs.write import write
from integration_tests.galleries import EXACT, PAIRS, QUERIES, TARGETS, K, exact_scores
from tests.qdrant.conftest import widen

pytestmark = pytest.mark.needs("server")


@pytest.fixture(scope="module")
def model() -> OffsetModel:
    """A default model with the map that 2,500 pairs teach."""
    return hubplugin.fit(TARGETS, PAIRS, learn=True)


def test_an_exact_search_scores_by_the_mapped_query(backend, fill, storage, model):
    gallery = fill(using="code")
    write(gallery.store(storage), model)
    widen(gallery.store(), len(gallery.ids) / K)
    scores = exact_scores(QUERIES, gallery.vectors, model)
    unit = gallery.search(backend.wrapped(), search_params=EXACT)
    longer = gallery.search(backend.wrapped(), queries=2 * QUERIES, search_params=EXACT)
    best = -np.sort(-scores, axis=1)[:, :K]
    for found in (unit, longer):
        given = [[point.score for point in points] for points in found]
        # What float32 loses of an offset, a sum over the bank, is most of it.
        np.testing.assert_allclose(given, best, rtol=0, atol=1e-5)


def test_a_graph_finds_as_much_of_the_mapped_ranking_as_of_the_raw_one(
    fill, storage, model
):
    gallery = fill(using="code", graph=True)
    store = gallery.store(storage)
    write(store, model)
    raw = gallery.agreement(store.search(QUERIES, K, raw=True).ids, None)
    corrected = gallery.agreement(gallery.store().search(QUERIES, K).ids, model)
    assert corrected >= raw - 0.02
