"""A server that takes connections and never answers: the client's own error, and nothing that waits without an end."""

import asyncio
import inspect
import socket
import threading

import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models

from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient
from hubplugin_qdrant.manifest import QdrantManifest
from tests.qdrant.conftest import Photos, know

PATIENCE = 60.0
"""Seconds after which a call that should have ended long ago is taken for one without an end."""


@pytest.fixture
def port():
    """Where connections are taken, by the system, and nobody reads."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(100)
        yield listening.getsockname()[1]


QUERY = Photos.queries[0].tolist()
CALLS = {
    "query_points": lambda client: client.query_points("photos", QUERY, "image"),
    "query_points_groups": lambda client: client.query_points_groups(
        "photos", "n", QUERY, "image"
    ),
    "scroll": lambda client: client.scroll("photos", with_vectors=True),
    "upsert": lambda client: client.upsert(
        "photos", [models.PointStruct(id=3, vector={"image": QUERY})]
    ),
    "get_collection": lambda client: client.get_collection("photos"),
}


def errors_of(clients):
    """What each call raises with each of `clients`, all at once."""
    found = {}

    def ask(number, name):
        async def awaited():
            answer = CALLS[name](clients[number]())
            return await answer if inspect.isawaitable(answer) else answer

        try:
            asyncio.run(awaited())
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
@pytest.mark.filterwarnings("ignore:what is known of 'photos' cannot be read just now")
def test_a_timeout_is_the_clients_own_error_and_nothing_hangs(
    port, storage, awaited, prefer_grpc
):
    kind, corrected = (
        (AsyncQdrantClient, AsyncHubQdrantClient)
        if awaited
        else (QdrantClient, HubQdrantClient)
    )
    manifest = None
    if storage is not None:
        photos = Photos(QdrantClient(":memory:"), "image", models.Distance.DOT, storage)
        photos.apply()
        manifest, fit = QdrantManifest(active={"image": photos.version}), photos.model

    def plain():
        options = {
            "port": port,
            "grpc_port": port,
            "prefer_grpc": prefer_grpc,
            "timeout": 1,
        }
        return kind("127.0.0.1", https=False, check_compatibility=False, **options)

    def wrapped():
        client = corrected.wrap(plain())
        if manifest is not None:
            know(client, "photos", manifest)
            client._corrections.fits[manifest.active["image"].model] = fit
        return client

    found = errors_of([plain, wrapped])
    for name in CALLS:
        ours, own = found[name, 1], found[name, 0]
        assert type(ours) is type(own), name
        assert str(getattr(ours, "source", "")) == str(getattr(own, "source", "")), name
        assert getattr(ours, "code", str)() == getattr(own, "code", str)(), name
