"""What hubplugin uses of qdrant-client's privates is there, and does what hubplugin takes it to do."""

import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models

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
    assert isinstance(other, HubQdrantClient)
    client.create_collection(
        "photos", models.VectorParams(size=2, distance=models.Distance.DOT)
    )
    assert QdrantClient.collection_exists(other, "photos")


def test_prefetches_of_groups_name_no_points_where_local_mode_would_not_look_them_up():
    client = QdrantClient(":memory:")
    client.create_collection(
        "photos", {"image": models.VectorParams(size=2, distance=models.Distance.DOT)}
    )
    client.upsert("photos", [models.PointStruct(id=7, vector={"image": [1.0, 2.0]})])
    by_id = models.Prefetch(query=models.NearestQuery(nearest=7), using="image")
    (found,) = plain_client.resolve_prefetches(client, "photos", [by_id])
    assert found.query.nearest == [1.0, 2.0]


@pytest.mark.parametrize(
    "given",
    [models.QueryRequest(limit=3, using="a"), models.Prefetch(), models.SearchParams()],
)
def test_a_changed_copy_is_that_of_pydantic(given):
    fields = (
        {"limit": 7, "filter": None}
        if "limit" in type(given).model_fields
        else {"exact": True}
    )
    before, expected = given.model_dump(), given.model_copy(update=fields)
    made = plain_client.copy_with(given, fields)
    assert made == expected
    assert made.model_dump_json(exclude_unset=True) == expected.model_dump_json(
        exclude_unset=True
    )
    assert given.model_dump() == before


@pytest.mark.parametrize(
    "vectors",
    [np.eye(2), {"image": np.eye(2)}, iter(np.eye(2).tolist())],
    ids=["array", "by name", "stream"],
)
def test_columns_of_an_upload_are_taken_as_points_with_ids_of_their_own(vectors):
    points = list(
        plain_client.read_rows(vectors, None, ({"n": row} for row in range(9)))
    )
    assert [point.payload for point in points] == [{"n": 0}, {"n": 1}]
    assert len({point.id for point in points}) == 2
    rows = [[1.0, 0.0], [0.0, 1.0]]
    by_name = [{"image": row} for row in rows]
    assert [point.vector for point in points] == (
        by_name if isinstance(vectors, dict) else rows
    )
