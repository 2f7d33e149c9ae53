"""Whatever the plain client refuses, the wrapped one refuses with the same error and leaves the same content; whatever
it takes, the wrapped one takes, and gives it its offset."""

from __future__ import annotations

import copy
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from qdrant_client import AsyncQdrantClient, QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant import AsyncHubQdrantClient, HubQdrantClient
from tests.qdrant.conftest import DIM, Awaited, Photos, clustered

NEW = clustered(9, 6)
SETTINGS = [
    pytest.param("", models.Distance.COSINE, "payload", False, id="unnamed-payload"),
    pytest.param(
        "image", models.Distance.EUCLID, "vector", True, id="named-vector-async"
    ),
]


@lru_cache
def corrected(using: str, distance: models.Distance, storage: str) -> Photos:
    photos = Photos(QdrantClient(":memory:"), using, distance, storage)
    photos.apply()
    return photos


class Pair:
    """Two copies of a corrected collection: one that the plain client writes to, one that the wrapped client does."""

    def __init__(
        self, using: str, distance: models.Distance, storage: str, is_async: bool
    ):
        self._photos, self._is_async = corrected(using, distance, storage), is_async
        self.using = using
        # To make a client takes longer than all that an example does with it.
        self.stores = [QdrantClient(":memory:") for _ in range(2)]
        self._plain: list[Any] = (
            [AsyncQdrantClient(":memory:") for _ in range(2)]
            if is_async
            else self.stores
        )

    def clients(self) -> list[Any]:
        """A plain and a wrapped client, each on a new copy."""
        for store, plain in zip(self.stores, self._plain, strict=True):
            collections = copy.deepcopy(self._photos.plain._client.collections)
            store._client.collections = plain._client.collections = collections
        plain, other = self._plain
        if not self._is_async:
            return [plain, HubQdrantClient.wrap(other)]
        return [Awaited(plain), Awaited(AsyncHubQdrantClient.wrap(other))]

    def points(self) -> list[list[models.Record]]:
        return [
            store.scroll("photos", limit=1_000, with_vectors=True)[0]
            for store in self.stores
        ]

    def is_readable(self) -> bool:
        """Local mode may keep half of a point that it refused, and then reads no more."""
        try:
            self.stores[0].scroll("photos", limit=1_000, with_vectors=True)
        except IndexError:
            return False
        return True

    def contents(self) -> list[list[str]]:
        return [sorted(map(_of_the_user, points)) for points in self.points()]

    def wrong(self) -> tuple[int, int, list[Any]]:
        """How many offsets are missing, how many are stale, and which points have one and no vector."""
        store = hubplugin_qdrant.open_store(self.stores[1], "photos", vector=self.using)
        found = hubplugin.inspect(store, queries=0)
        left = [
            each.id
            for each in self.points()[1]
            if _is_corrected(each) and not _vectors(each).get(self.using)
        ]
        return found.missing, found.stale, left


def _vectors(point: models.Record) -> Any:
    return point.vector if isinstance(point.vector, dict) else {"": point.vector}


def _is_corrected(point: models.Record) -> bool:
    return bool((point.payload or {}).get("hub_offset")) or any(
        name.startswith("hub_") for name in _vectors(point)
    )


def _of_the_user(point: models.Record) -> str:
    """What a point holds that is the user's own; an id that the client made up counts as any."""
    vectors = _vectors(point)
    key = point.id if isinstance(point.id, int) or point.id in KNOWN else "made up"
    payload = sorted(
        (name, value)
        for name, value in (point.payload or {}).items()
        if name != "hub_offset"
    )
    return repr(
        (
            key,
            payload,
            {
                name: vectors[name]
                for name in sorted(vectors)
                if not name.startswith("hub_")
            },
        )
    )


@dataclass
class In:
    """`items` in a container of some kind, which each call gets anew."""

    kind: Callable[[Any], Any]
    items: Any

    def made(self) -> Any:
        return self.kind(copy.deepcopy(self.items))


class Write:
    """A call of a client's method, with arguments of which each call gets a copy."""

    def __init__(self, method: str, *arguments: Any, **options: Any):
        self._method, self._arguments, self._options = method, arguments, options

    def __call__(self, client: Any) -> type[Exception] | None:
        """What it raises."""
        given = [
            each.made() if isinstance(each, In) else copy.deepcopy(each)
            for each in self._arguments
        ]
        options = {
            name: each.made() if isinstance(each, In) else each
            for name, each in self._options.items()
        }
        try:
            getattr(client, self._method)("photos", *given, **options)
        except Exception as error:
            return type(error)
        return None

    def __repr__(self) -> str:
        return f"{self._method}(*{self._arguments}, **{self._options})"


def check_alike(pair: Pair, write: Write) -> type[Exception] | None:
    plain, wrapped = map(write, pair.clients())
    assert wrapped is plain
    if not pair.is_readable():
        return plain
    before, after = pair.contents()
    assert after == before
    assert pair.wrong() == (0, 0, [])
    return plain


KNOWN = [str(uuid.UUID(int=n)) for n in range(3)]
IDS = st.sampled_from([0, 1, 2, 3, 500, 501, 502, 503, *KNOWN, uuid.UUID(int=1)])
BAD_IDS = st.sampled_from(["no id", -1, None, 1.5, [1]])
PAYLOADS = st.sampled_from(
    [None, {}, {"n": 1}, {"n": 3, "colour": "red"}, {"deep": {"n": [1]}}]
)
BAD_PAYLOADS = st.sampled_from(["x", 7, [1], {1: 2}])


def mostly(
    good: st.SearchStrategy[Any], bad: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    return st.integers(0, 5).flatmap(lambda number: bad if number == 5 else good)


ROW = NEW[0].tolist()
VECTORS = st.sampled_from(
    [ROW, NEW[1], tuple(ROW), [0.0] * DIM, [True] * DIM, list(range(1, DIM + 1))]
)
BAD_VECTORS = st.sampled_from(
    [
        *(None, [], [1.0], [1.0] * (DIM + 1), ["a"] * DIM, [[1.0] * DIM], [1.0, [2.0]]),
        *("text", 7, np.array(1.0), {"other": ROW}, {}, [None] * DIM),
    ]
)


@st.composite
def vectors(draw: st.DrawFn, using: str) -> Any:
    """A vector as users give it, or one of the mistakes that they make."""
    is_good = draw(mostly(st.just(True), st.just(False)))
    values = draw(VECTORS if is_good else BAD_VECTORS)
    is_named = using and (is_good or draw(st.booleans()))
    return {using: values} if is_named else values


@st.composite
def points(draw: st.DrawFn, using: str) -> Any:
    """A point in one of the forms that there are; most often a good one."""
    fields = {
        "id": draw(mostly(IDS, BAD_IDS)),
        "vector": draw(vectors(using)),
        "payload": draw(mostly(PAYLOADS, BAD_PAYLOADS)),
    }
    try:
        struct = models.PointStruct(**fields)
    except ValueError:
        return fields
    others = [models.Record(**fields), fields, SimpleNamespace(**fields), None]
    return draw(mostly(st.just(struct), st.sampled_from(others)))


CONTAINERS = mostly(st.just(list), st.sampled_from([tuple, iter, deque]))
NUMBER_3 = {
    "update_filter": models.Filter(
        must=[models.FieldCondition(key="n", match=models.MatchValue(value=3))]
    )
}
ONLY = [
    {"update_mode": models.UpdateMode.INSERT_ONLY},
    {"update_mode": models.UpdateMode.UPDATE_ONLY},
]
OPTIONS = st.sampled_from([{}, {}, *ONLY, NUMBER_3, NUMBER_3 | ONLY[1]])


@st.composite
def upserts(draw: st.DrawFn, using: str) -> Write:
    return Write(
        "upsert",
        In(draw(CONTAINERS), draw(st.lists(points(using), max_size=4))),
        **draw(OPTIONS),
    )


@st.composite
def batches(draw: st.DrawFn, using: str) -> models.Batch:
    """Columns of lengths of their own, often the same."""
    count = draw(st.integers(0, 4))
    lengths = [draw(st.sampled_from([count, count, count, 0, 1, 3])) for _ in range(3)]
    rows = NEW[: lengths[1]].tolist()
    return models.Batch.model_construct(
        ids=[500 + row for row in range(lengths[0])],
        vectors={using: rows} if using else rows,
        payloads=draw(
            st.sampled_from([None, [{"n": row} for row in range(lengths[2])]])
        ),
    )


@st.composite
def upserts_of_batches(draw: st.DrawFn, using: str) -> Write:
    return Write("upsert", draw(batches(using)), **draw(OPTIONS))


@st.composite
def uploads_of_points(draw: st.DrawFn, using: str) -> Write:
    return Write(
        "upload_points", In(draw(CONTAINERS), draw(st.lists(points(using), max_size=4)))
    )


@st.composite
def uploads_of_collections(draw: st.DrawFn, using: str) -> Write:
    count = draw(st.integers(0, 4))
    rows, keys, beside = (
        draw(st.sampled_from([count, count, count, 1, 3, 6])) for _ in range(3)
    )
    listed = draw(st.lists(vectors(using), min_size=rows, max_size=rows))
    forms: list[Any] = [
        NEW[:rows],
        {using: NEW[:rows]},
        {using: NEW[:rows].tolist()},
        {using: NEW[:rows], "other": NEW[:1]},
        {using: NEW[:rows], "other": NEW[:rows]},
        None,
        In(list, listed),
        In(iter, listed),
    ]
    payloads = draw(
        st.lists(mostly(PAYLOADS, BAD_PAYLOADS), min_size=beside, max_size=beside)
    )
    kinds = st.sampled_from([None, list, iter, tuple])
    ids, payload = (
        kind and In(kind, items)
        for kind, items in (
            (draw(kinds), [500 + row for row in range(keys)]),
            (draw(kinds), payloads),
        )
    )
    return Write(
        "upload_collection", draw(st.sampled_from(forms)), payload=payload, ids=ids
    )


@st.composite
def updates(draw: st.DrawFn, using: str) -> list[Any]:
    """Vectors of points, also of such as are not there."""
    listed: list[Any] = []
    for _ in range(draw(st.integers(0, 3))):
        key = draw(mostly(st.integers(0, 9), st.one_of(IDS, BAD_IDS)))
        fields = {"id": key, "vector": draw(vectors(using))}
        try:
            update: Any = models.PointVectors(**fields)
        except ValueError:
            update = fields
        listed.append(draw(mostly(st.just(update), st.sampled_from([fields, None]))))
    return listed


@st.composite
def updates_of_vectors(draw: st.DrawFn, using: str) -> Write:
    return Write("update_vectors", In(draw(CONTAINERS), draw(updates(using))))


SELECTORS = [
    [1],
    [1, 2],
    [1, 77],
    [],
    ["no id"],
    models.Filter(
        must=[models.FieldCondition(key="colour", match=models.MatchValue(value="red"))]
    ),
    models.PointIdsList(points=[2, 77]),
    models.FilterSelector(
        filter=models.Filter(must=[models.HasIdCondition(has_id=[3])])
    ),
    None,
    "1",
    7,
]


@st.composite
def changes(draw: st.DrawFn, using: str) -> Write:
    """What takes offsets with it: vectors are deleted, payloads written over or cleared."""
    selected = draw(st.sampled_from(SELECTORS))
    names = draw(st.sampled_from([[using], [using, "other"], ["other"], [], None]))
    payload = draw(PAYLOADS)
    return draw(
        st.sampled_from(
            [
                Write("delete_vectors", names, selected),
                Write("overwrite_payload", payload, selected),
                Write("clear_payload", selected),
            ]
        )
    )


@st.composite
def operations(draw: st.DrawFn, using: str) -> Write:
    """Several operations in one request."""
    structs = st.lists(points(using).filter(is_a(models.PointStruct)), max_size=3)
    moved = updates(using).map(lambda each: [*filter(is_a(models.PointVectors), each)])
    ids = st.sampled_from([[1], [2, 3], [2, 77]])
    kinds = [
        structs.map(lambda each: upsert(models.PointsList, points=each)),
        batches(using).map(lambda each: upsert(models.PointsBatch, batch=each)),
        moved.map(
            lambda each: models.UpdateVectorsOperation.model_construct(
                update_vectors=models.UpdateVectors.model_construct(points=each)
            )
        ),
        ids.map(
            lambda each: models.OverwritePayloadOperation(
                overwrite_payload=models.SetPayload(payload={"k": 1}, points=each)
            )
        ),
        ids.map(
            lambda each: models.ClearPayloadOperation(
                clear_payload=models.PointIdsList(points=each)
            )
        ),
    ]
    bad = st.sampled_from([{"upsert": {"points": []}}, None])
    listed = draw(st.lists(mostly(st.one_of(kinds), bad), max_size=3))
    return Write("batch_update_points", In(draw(CONTAINERS), listed))


def is_a(kind: type[Any]) -> Callable[[Any], bool]:
    return lambda each: isinstance(each, kind)


def upsert(kind: Any, **fields: Any) -> models.UpsertOperation:
    return models.UpsertOperation(upsert=kind.model_construct(**fields))


WRITES = [
    upserts,
    upserts_of_batches,
    uploads_of_points,
    uploads_of_collections,
    updates_of_vectors,
    changes,
    operations,
]


@pytest.mark.parametrize("examples", [15, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("writes", WRITES, ids=lambda writes: writes.__name__)
@pytest.mark.parametrize(("using", "distance", "storage", "is_async"), SETTINGS)
def test_a_write_ends_as_it_does_by_the_plain_client(
    writes, examples, using, distance, storage, is_async
):
    pair, ends = Pair(using, distance, storage, is_async), set()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    @given(writes(using))
    def alike(write: Write) -> None:
        ends.add(check_alike(pair, write))

    alike()
    assert None in ends
    assert len(ends) > 1
