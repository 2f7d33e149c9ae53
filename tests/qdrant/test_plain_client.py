"""What hubplugin uses of qdrant-client's privates is there, and does what hubplugin takes it to do."""

import functools
import inspect
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient, QdrantClient, models
from qdrant_client.conversions.conversion import RestToGrpc

from hubplugin_qdrant import HubQdrantClient, plain_client
from hubplugin_qdrant.client import like
from hubplugin_qdrant.transport import Fault, fault_of


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


def test_a_coroutine_within_a_plain_function_is_taken_for_a_coroutine():
    @functools.wraps(AsyncQdrantClient.query_points)
    def traced(*args, **kwargs):
        return AsyncQdrantClient.query_points(*args, **kwargs)

    @like(traced)
    async def corrected(self, arguments):
        return None

    assert inspect.iscoroutinefunction(corrected)


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


POINT = models.PointStruct(id=1, vector=[1.0, 2.0], payload={"n": 1})
FORMS = {
    "structure": POINT,
    "record": models.Record(id=1, vector=[1.0, 2.0], payload={"n": 1}),
    "namespace": SimpleNamespace(id=1, vector=[1.0, 2.0], payload={"n": 1}),
    "message": RestToGrpc.convert_point_struct(POINT),
    "dict": {"id": 1, "vector": [1.0, 2.0], "payload": {"n": 1}},
    "dict of too little": {"id": 1},
    "none": None,
    "text": "x",
}
CHANGES = {
    "structure": models.PointVectors(id=1, vector=[1.0, 2.0]),
    "namespace": SimpleNamespace(id=1, vector=[1.0, 2.0]),
    "message": RestToGrpc.convert_point_vectors(
        models.PointVectors(id=1, vector=[1.0, 2.0])
    ),
    "dict": {"id": 1, "vector": [1.0, 2.0]},
    "none": None,
    "no id": models.PointVectors.model_construct(id=None, vector=[1.0, 2.0]),
}
OPERATION = models.UpsertOperation(upsert=models.PointsList(points=[POINT]))
OPERATIONS = {
    "structure": OPERATION,
    "message": RestToGrpc.convert_update_operation(OPERATION),
    "dict": {"upsert": {"points": [FORMS["dict"]]}},
    "none": None,
}


@pytest.fixture(params=[False, True], ids=["rest", "grpc"])
def of_a_server(request):
    """Clients of a server that nobody runs; test_refused_writes.py is of local mode."""
    return QdrantClient(
        "http://127.0.0.1:1",
        grpc_port=1,
        prefer_grpc=request.param,
        check_compatibility=False,
    )


def is_taken(call: Callable[[], object]) -> bool:
    """Whether it does something, or gets as far as to the server that is not there."""
    try:
        call()
    except Exception as error:
        return fault_of(error) is Fault.AWAY
    return True


@pytest.mark.parametrize("container", [list, tuple, deque])
@pytest.mark.parametrize("form", FORMS)
def test_points_are_taken_that_the_client_takes(of_a_server, form, container):
    points = container([FORMS[form]])
    by_client = is_taken(lambda: of_a_server.upsert("photos", points))
    if container is not list and not plain_client._speaks_grpc(of_a_server):
        by_client = False  # it sends whatever it is, and the server refuses it
    assert is_taken(lambda: plain_client.read_points(of_a_server, points)) == by_client
    if by_client:
        assert plain_client.read_points(of_a_server, points) == [POINT]


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


@pytest.mark.parametrize("container", [list, tuple, deque])
@pytest.mark.parametrize("form", CHANGES)
def test_vectors_are_taken_that_the_client_takes(of_a_server, form, container):
    points = container([CHANGES[form]])
    by_client = (
        is_taken(lambda: of_a_server.update_vectors("photos", points))
        and form != "no id"
    )  # for the server
    assert is_taken(lambda: plain_client.read_updates(of_a_server, points)) == by_client
    if by_client:
        assert plain_client.read_updates(of_a_server, points) == [CHANGES["structure"]]


@pytest.mark.parametrize("form", OPERATIONS)
def test_operations_that_the_client_refuses_are_left_as_they_are(of_a_server, form):
    operations = [OPERATIONS[form]]
    if is_taken(lambda: of_a_server.batch_update_points("photos", operations)):
        assert plain_client.read_operations(of_a_server, operations) == [OPERATION]
    elif plain_client._speaks_grpc(of_a_server):
        assert plain_client.read_operations(of_a_server, operations) == operations
    else:
        with pytest.raises(plain_client.UNREADABLE):
            plain_client.read_operations(of_a_server, operations)


def test_a_stream_is_taken(of_a_server):
    assert plain_client.read_updates(of_a_server, iter([CHANGES["structure"]])) == [
        CHANGES["structure"]
    ]
    assert plain_client.read_operations(of_a_server, iter([OPERATION])) == [OPERATION]
