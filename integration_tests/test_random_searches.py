"""Random requests to a server that others write to, against a search written from the definition."""

import uuid

import pytest

from tests.qdrant.test_random_searches import (
    DISTANCES,
    Disturbed,
    World,
    check_random_searches,
)

pytestmark = pytest.mark.needs("server")


@pytest.mark.parametrize("distance", DISTANCES, ids=lambda distance: distance.value)
def test_random_requests_find_what_the_definition_says_while_others_write(
    backend, storage, distance
):
    backend.require((1, 17), "a score threshold in a prefetch over a formula")
    name = f"hubplugin-test-{uuid.uuid4().hex[:12]}"
    client = Disturbed(**backend.address.options())
    try:
        check_random_searches(
            World(client, distance, storage, name=name, by_server=True)
        )
    finally:
        for collection in (name, f"{name}--hub"):
            client.delete_collection(collection)
        client.close()
