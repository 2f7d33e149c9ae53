"""A shard whose model maps queries ranks as model.queries(q) @ t + offset."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hubplugin
from hubplugin.jobs.write import write
from hubplugin.model import QueryMap

edge = pytest.importorskip("qdrant_edge", reason="pip install '.[edge]' to test Qdrant Edge")

from hubplugin_qdrant.edge import EdgeStore  # noqa: E402

ROWS, DIM, K = 200, 16, 10


@pytest.fixture(params=["cosine", "dot"])
def store(request, tmp_path):
    """A shard with a model whose map turns and stretches."""
    rng = np.random.default_rng(3)
    path = tmp_path / "shard"
    path.mkdir()
    distance = {"cosine": edge.Distance.Cosine, "dot": edge.Distance.Dot}[request.param]
    shard = edge.EdgeShard.create(str(path), edge.EdgeConfig(edge.EdgeVectorParams(DIM, distance)))
    targets = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    shard.update(
        edge.UpdateOperation.upsert_points([edge.Point(row, each.tolist(), {}) for row, each in enumerate(targets)])
    )
    step = 0.4 * rng.normal(size=(DIM, DIM)).astype(np.float32)
    model = hubplugin.fit(targets, rng.normal(size=(60, DIM)), "is", tau=0.2, metric=request.param)
    opened = EdgeStore(shard, path)
    write(opened, replace(model, query_map=QueryMap(step, 1.0, 200)).centred_on(targets))
    yield opened
    shard.close()


def similarities(store, query):
    """Corrected similarities of the gallery to the mapped query, in float64 and straight from the definition."""
    targets = np.concatenate([batch.vectors for batch in store.scan()]).astype(np.float64)
    model, q = store.correction().model, query.astype(np.float64)
    if model.metric is hubplugin.Metric.COSINE:
        targets, q = targets / np.linalg.norm(targets, axis=1, keepdims=True), q / np.linalg.norm(q)
    return targets @ (q + model.query_map.step.astype(np.float64) @ q) + model.offsets(targets.astype(np.float32))


@pytest.fixture
def queries():
    return 3 * np.random.default_rng(5).normal(size=(8, DIM)).astype(np.float32)


def test_scores_pages_and_thresholds_are_of_the_mapped_query(store, queries):
    for query in queries:
        expected = similarities(store, query)
        found = store.query(query, ROWS)
        assert [point.id for point in found] == np.argsort(-expected).tolist()
        np.testing.assert_allclose([p.score for p in found], np.sort(expected)[::-1], rtol=1e-4, atol=1e-4)
        assert [p.id for p in store.query(query, 20, offset=10)] == [p.id for p in found[10:30]]
        limit = float(np.sort(expected)[-30]) - 1e-4
        assert len(store.query(query, ROWS, score_threshold=limit)) == 30


def test_raw_searches_are_not_mapped(store, queries):
    raw = [point.id for point in store.query(queries[0], K, raw=True)]
    nearest = edge.Query.Nearest(queries[0].tolist())
    assert raw == [point.id for point in store.shard.query(edge.QueryRequest(K, 0, nearest, with_payload=False))]


def test_the_printed_request_holds_the_mapped_query_and_says_how_it_was_made(store, queries):
    explained = store.explain(queries[0], K)
    model = store.correction().model
    sent = explained.request["body"]["prefetch"][0]["query"]
    np.testing.assert_allclose(sent, model.queries(queries[:1])[0], rtol=1e-4, atol=1e-6)
    assert "is mapped: q + S q" in explained.text
    assert f"hub/{model.fingerprint}.hub" in explained.text
    if model.metric is hubplugin.Metric.COSINE:
        (product, _) = explained.request["body"]["query"]["formula"]["sum"]
        assert product["mult"] == [pytest.approx(np.linalg.norm(model.queries(queries[:1])), rel=1e-5), "$score"]
