"""With OpenTelemetry's instrumentation of qdrant-client a wrapped call is one span."""

from collections.abc import Iterator

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from tests.qdrant.conftest import ROWS, Photos

pytest.importorskip(
    "opentelemetry.instrumentation.qdrant",
    reason="to run it: pip install opentelemetry-instrumentation-qdrant opentelemetry-sdk",
)

from opentelemetry.instrumentation.qdrant import QdrantInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider, instrumentor = InMemorySpanExporter(), TracerProvider(), QdrantInstrumentor()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor.instrument(tracer_provider=provider)
    try:
        yield exporter
    finally:
        instrumentor.uninstrument()


@pytest.fixture(params=["payload", "vector"])
def photos(request: pytest.FixtureRequest) -> Photos:
    return Photos(QdrantClient(":memory:"), "image", models.Distance.COSINE, request.param)


def told(exporter: InMemorySpanExporter) -> list[str]:
    """The name of each span since the last look."""
    found = exporter.get_finished_spans()
    exporter.clear()
    return [span.name for span in found]


def test_a_search_is_one_span(photos, spans):
    client = photos.apply(method="nnn", k=8)
    spans.clear()
    for _ in range(2):  # with the manifest to be read, and without
        client.query_points("photos", query=photos.queries[0], using="image", limit=10)
        assert told(spans) == ["qdrant.query_points"]
    request = models.QueryRequest(query=photos.queries[0].tolist(), using="image", limit=10)
    client.query_batch_points("photos", [request, request])
    assert told(spans) == ["qdrant.query_batch_points"]


@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
def test_a_write_is_one_span(photos, awaited, spans):
    photos.awaited = awaited
    client = photos.apply()
    spans.clear()
    new = photos.point(ROWS, np.ones(8))
    client.upsert("photos", [new])
    client.upload_points("photos", [new])
    client.set_payload("photos", {"colour": "red"}, [ROWS])
    assert told(spans) == ["qdrant.upsert", "qdrant.upload_points", "qdrant.set_payload"]


def test_the_plain_client_of_a_wrapped_one_is_traced(photos, spans):
    client = photos.apply()
    spans.clear()
    client.raw.query_points("photos", query=photos.queries[0], using="image")
    assert told(spans) == ["qdrant.query_points"]
