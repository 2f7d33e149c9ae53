"""What hubplugin uses of qdrant-client's privates is there, and does what hubplugin
takes it to do."""

import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient

from hubplugin_qdrant import HubQdrantClient, plain_client


@pytest.mark.parametrize("kind", [QdrantClient, AsyncQdrantClient])
def test_local_mode_is_told_from_a_server(kind):
    assert plain_client.is_local(kind(":memory:"))
    assert not plain_client.is_local(
        kind("http://localhost:1", check_compatibility=False)
    )


def test_a_client_over_the_connection_of_another_sees_the_same_collections():
    client = QdrantClient(":memory:")
    other = plain_client.clone_client(client, HubQdrantClient)
    client.create_collection("photos", {})
    assert QdrantClient.collection_exists(other, "photos")
