"""A server that takes connections and never answers: the client's own error, and
nothing that waits without an end."""

import socket
import threading

import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models

from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient
from tests.qdrant.conftest import DOT, Awaited, Photos

PATIENCE = 60.0
"""Seconds after which a call that should have ended long ago is taken for one without
an end."""


@pytest.fixture
def port():
    """A port where the system takes connections, and nobody reads."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(100)
        yield listening.getsockname()[1]


QUERY = Photos.queries[0].tolist()
POINT = models.PointStruct(id=3, vector={"image": QUERY})
CALLS = {
    "query_points": {"query": QUERY, "using": "image"},
    "query_points_groups": {"group_by": "n", "query": QUERY, "using": "image"},
    "scroll": {"with_vectors": True},
    "upsert": {"points": [POINT]},
    "get_collection": {},
}


def errors_of(clients):
    """Return what each call raises with each of `clients`, all at once."""
    found = {}

    def ask(number, name):
        try:
            getattr(clients[number](), name)("photos", **CALLS[name])
        except Exception as error:
            found[name, number] = error

    threads = [
        threading.Thread(target=ask, args=(number, name), daemon=True)
        for number in range(len(clients))
        for name in CALLS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.mark.parametrize(
    "storage", [None, "payload", "vector"], ids=["nothing known", "payload", "vector"]
)
@pytest.mark.parametrize(
    ("awaited", "prefer_grpc"),
    [
        (False, False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(False, True), (True, False), (True, True)]
        ),
    ],
    ids=["sync REST", "sync gRPC", "async REST", "async gRPC"],
)
@pytest.mark.filterwarnings("ignore:the manifest of 'photos' cannot be read at present")
def test_a_timeout_is_the_clients_own_error_and_nothing_hangs(
    port, storage, awaited, prefer_grpc
):
    def connect():
        kind = AsyncQdrantClient if awaited else QdrantClient
        ports = {"port": port, "grpc_port": port, "prefer_grpc": prefer_grpc}
        return kind("127.0.0.1", check_compatibility=False, timeout=1, **ports)

    def plain():
        return Awaited(connect()) if awaited else connect()

    def wrapped():
        if storage is not None:
            photos = Photos("image", DOT, storage, awaited)
            photos.corrected()
            return photos.knowing(connect())
        if awaited:
            return Awaited(AsyncHubQdrantClient.wrap(connect()))
        return HubQdrantClient.wrap(connect())

    found = errors_of([plain, wrapped])
    for name in CALLS:
        ours, own = found[name, 1], found[name, 0]
        assert type(ours) is type(own), name
        assert str(getattr(ours, "source", "")) == str(getattr(own, "source", "")), name
        assert getattr(ours, "code", str)() == getattr(own, "code", str)(), name
