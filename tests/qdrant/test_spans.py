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
    exporter, provider, instrumentor = (
        InMemorySpanExporter(),
        TracerProvider(),
        QdrantInstrumentor(),
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor.instrument(tracer_provider=provider)
    try:
        yield exporter
    finally:
        instrumentor.uninstrument()


@pytest.fixture(params=["payload", "vector"])
def photos(request: pytest.FixtureRequest) -> Photos:
    return Photos(
        QdrantClient(":memory:"), "image", models.Distance.COSINE, request.param
    )


def told(exporter: InMemorySpanExporter) -> list[str]:
    """The name of each span since the last look."""
    found = exporter.get_finished_spans()
    exporter.clear()
    return [span.name for span in found]


@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
def test_a_call_of_a_wrapped_client_is_one_span(photos, awaited, spans):
    photos.awaited = awaited
    client = photos.apply(method="nnn", k=8)
    spans.clear()
    new, request = (
        photos.point(ROWS, np.ones(8)),
        models.QueryRequest(query=photos.queries[0].tolist(), using="image"),
    )
    client.upsert("photos", [new])
    client.upload_points("photos", [new])
    client.set_payload("photos", {"colour": "red"}, [ROWS])
    assert told(spans) == [
        "qdrant.upsert",
        "qdrant.upload_points",
        "qdrant.set_payload",
    ]
    if awaited:
        return  # of an async client the instrumentation covers the writes alone
    for searched in (
        client,
        client,
        client.raw,
    ):  # with the manifest to be read, without, and the plain client of it
        searched.query_points(
            "photos", query=photos.queries[0], using="image", limit=10
        )
        assert told(spans) == ["qdrant.query_points"]
    client.query_batch_points("photos", [request, request])
    assert told(spans) == ["qdrant.query_batch_points"]
