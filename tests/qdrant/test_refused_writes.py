"""Whatever the plain client refuses, the wrapped one refuses with the same error and
leaves the same content; whatever it takes, the wrapped one takes, and gives it its
offset."""

from __future__ import annotations

import copy
import uuid
from collections import deque
from dataclasses import dataclass, field
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
from tests.qdrant.conftest import (
    COSINE,
    DIM,
    EUCLID,
    RED,
    Awaited,
    Photos,
    clustered,
    where,
)

NEW = clustered(9, 6)
KINDS = [
    pytest.param(None, COSINE, "payload", False, id="unnamed-payload"),
    pytest.param("image", EUCLID, "vector", True, id="named-vector-async"),
]


@lru_cache
def corrected(*of):
    photos = Photos(*of)
    photos.apply()
    return photos


class Pair:
    """Two copies of a corrected collection: one that the plain client writes to, one
    that the wrapped client does."""

    def __init__(self, using, distance, storage, awaited):
        self._photos = corrected(using, distance, storage)
        self._awaited = awaited
        self._using = using
        # To make a client takes longer than all that an example does with it.
        self.stores = [QdrantClient(":memory:") for _ in range(2)]
        self._plain: list[Any] = list(self.stores)
        if awaited:
            self._plain = [AsyncQdrantClient(":memory:") for _ in range(2)]

    def clients(self):
        """Return a plain and a wrapped client, each on a new copy."""
        for store, plain in zip(self.stores, self._plain, strict=True):
            collections = copy.deepcopy(self._photos.plain._client.collections)
            store._client.collections = plain._client.collections = collections
        plain, other = self._plain
        if self._awaited:
            return [Awaited(plain), Awaited(AsyncHubQdrantClient.wrap(other))]
        return [plain, HubQdrantClient.wrap(other)]

    def check(self, write):
        """Write with both clients, and return what both raise."""
        plain, wrapped = map(write, self.clients())
        # What catches the plain client's error catches ours.
        assert wrapped is plain or issubclass(wrapped, plain)
        try:
            before, after = (
                store.scroll("photos", limit=1_000, with_vectors=True)[0]
                for store in self.stores
            )
        except IndexError:  # local mode kept half of a point that it refused
            return plain
        assert sorted(map(of_the_user, after)) == sorted(map(of_the_user, before))
        store = hubplugin_qdrant.open_store(self.stores[1], "photos", self._using)
        found = hubplugin.inspect(store, queries=0)
        assert (found.missing, found.stale) == (0, 0)
        for point in filter(is_corrected, after):
            assert vectors_of(point).get(self._using or "")
        return plain


def vectors_of(point):
    return point.vector if isinstance(point.vector, dict) else {"": point.vector}


def is_corrected(point):
    ours = [name for name in vectors_of(point) if name.startswith("hub_")]
    return bool((point.payload or {}).get("hub_offset") or ours)


def of_the_user(point):
    """Return what a point holds that is the user's own; an id that the client made up
    counts as any."""
    key = point.id if isinstance(point.id, int) or point.id in KNOWN else "made up"
    held = [
        sorted((name, value) for name, value in each.items() if name[:4] != "hub_")
        for each in (point.payload or {}, vectors_of(point))
    ]
    return repr((key, held))


@dataclass
class Write:
    """A call of a client's method, with arguments of which each call gets a copy."""

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, client):
        """Return what it raises."""
        arguments, options = copy.deepcopy((self.arguments, self.options))
        try:
            getattr(client, self.method)("photos", *arguments, **options)
        except Exception as error:
            return type(error)
        return None


def calls(method, *arguments, options=None):
    options = st.just({}) if options is None else options
    return st.builds(Write, st.just(method), st.tuples(*arguments), options)


def mostly(good, bad):
    return st.integers(0, 7).flatmap(lambda number: bad if number == 7 else good)


def listed(items, max_size=4):
    """Return containers of `items` of each kind that there is, most often a list."""
    kinds = mostly(st.just(list), st.sampled_from([tuple, iter, deque]))
    lists = st.lists(items, max_size=max_size)
    return st.builds(lambda kind, items: kind(items), kinds, lists)


def built(kind, fields):
    """Return `fields` as a `kind`, or as they are where it takes no such fields."""
    try:
        return kind(**fields)
    except ValueError:
        return fields


KNOWN = [str(uuid.UUID(int=n)) for n in range(3)]
IDS = mostly(
    st.sampled_from([0, 1, 2, 3, 500, 501, 502, 503, *KNOWN, uuid.UUID(int=1)]),
    st.sampled_from(["no id", -1, None, 1.5, [1]]),
)
GOOD_PAYLOADS = st.sampled_from(
    [None, {}, {"n": 1}, {"n": 3, "colour": "red"}, {"deep": {"n": [1]}}]
)
PAYLOADS = mostly(GOOD_PAYLOADS, st.sampled_from(["x", 7, [1], {1: 2}]))

ROW = NEW[0].tolist()
VECTORS = [ROW, NEW[1], tuple(ROW), [0.0] * DIM, [True] * DIM, list(range(1, DIM + 1))]
BAD_VECTORS = [
    *(None, [], [1.0], [1.0] * (DIM + 1), ["a"] * DIM, [[1.0] * DIM], [1.0, [2.0]]),
    *("text", 7, np.array(1.0), {"other": ROW}, {}, [None] * DIM),
]


def vectors(using):
    """Return vectors as users give them, and the mistakes that they make."""
    good, bad = st.sampled_from(VECTORS), st.sampled_from(BAD_VECTORS)
    if using is None:
        return mostly(good, bad)
    named = st.builds(lambda values: {using: values}, st.one_of(good, bad))
    return mostly(
        st.builds(lambda values: {using: values}, good), st.one_of(bad, named)
    )


@st.composite
def points(draw, using):
    """Return a point in one of the forms that there are; most often a good one."""
    fields = {
        "id": draw(IDS),
        "vector": draw(vectors(using)),
        "payload": draw(PAYLOADS),
    }
    struct = built(models.PointStruct, fields)
    others = [built(models.Record, fields), fields, SimpleNamespace(**fields), None]
    return draw(mostly(st.just(struct), st.sampled_from(others)))


@st.composite
def moves(draw, using):
    """Return another vector of a point, also of such as are not there."""
    fields = {
        "id": draw(mostly(st.integers(0, 9), IDS)),
        "vector": draw(vectors(using)),
    }
    update = built(models.PointVectors, fields)
    return draw(mostly(st.just(update), st.sampled_from([fields, None])))


@st.composite
def batches(draw, using):
    """Return columns of lengths of their own, often the same."""
    count = draw(st.integers(0, 4))
    lengths = [draw(st.sampled_from([count, count, count, 0, 1, 3])) for _ in range(3)]
    rows = NEW[: lengths[1]].tolist()
    payloads = [None, [{"n": row} for row in range(lengths[2])]]
    return models.Batch.model_construct(
        ids=[500 + row for row in range(lengths[0])],
        vectors={using: rows} if using else rows,
        payloads=draw(st.sampled_from(payloads)),
    )


@st.composite
def uploads_of_collections(draw, using):
    count = draw(st.integers(0, 4))
    lengths = st.sampled_from([count, count, count, 1, 3, 6])
    rows, keys, beside = (draw(lengths) for _ in range(3))
    one_by_one = draw(st.lists(vectors(using), min_size=rows, max_size=rows))
    forms: list[Any] = [
        NEW[:rows],
        {using: NEW[:rows]},
        {using: NEW[:rows].tolist()},
        {using: NEW[:rows], "other": NEW[:1]},
        {using: NEW[:rows], "other": NEW[:rows]},
        None,
        one_by_one,
        iter(one_by_one),
    ]
    kinds = st.sampled_from([lambda items: None, list, iter, tuple])
    payloads = draw(st.lists(PAYLOADS, min_size=beside, max_size=beside))
    options = {
        "ids": draw(kinds)([500 + row for row in range(keys)]),
        "payload": draw(kinds)(payloads),
    }
    return Write("upload_collection", (draw(st.sampled_from(forms)),), options)


NUMBER_3 = {"update_filter": where("n", 3)}
INSERT = {"update_mode": models.UpdateMode.INSERT_ONLY}
UPDATE = {"update_mode": models.UpdateMode.UPDATE_ONLY}
ONLY_SOME = st.sampled_from([{}, {}, NUMBER_3])
OPTIONS = st.sampled_from([{}, {}, INSERT, UPDATE, NUMBER_3, NUMBER_3 | UPDATE])
SELECTORS = st.sampled_from(
    [
        *([1], [1, 2], [1, 77], [], ["no id"], None, "1", 7),
        RED,
        models.PointIdsList(points=[2, 77]),
        models.FilterSelector(filter=where("n", 3)),
    ]
)


def changes(using):
    """Return what takes offsets with it: vectors are deleted, payloads written over or
    cleared."""
    names = [[using], [using, "other"], ["other"], ["hub_v1"], [], None]
    return st.one_of(
        calls("delete_vectors", st.sampled_from(names), SELECTORS),
        calls("overwrite_payload", GOOD_PAYLOADS, SELECTORS),
        calls("clear_payload", SELECTORS),
    )


def operations(using):
    """Return several operations in one request."""

    def only(kind, items):
        return st.lists(items.filter(lambda each: isinstance(each, kind)), max_size=3)

    def upsert(fields, kind):
        return models.UpsertOperation(upsert=kind.model_construct(**fields))

    def update(moved):
        vectors = models.UpdateVectors.model_construct(points=moved)
        return models.UpdateVectorsOperation.model_construct(update_vectors=vectors)

    def overwrite(ids):
        payload = models.SetPayload(payload={"k": 1}, points=ids)
        return models.OverwritePayloadOperation(overwrite_payload=payload)

    def clear(ids):
        return models.ClearPayloadOperation(
            clear_payload=models.PointIdsList(points=ids)
        )

    structs = only(models.PointStruct, points(using))
    ids = st.sampled_from([[1], [2, 3], [2, 77]])
    good = st.one_of(
        structs.map(lambda each: upsert({"points": each}, models.PointsList)),
        batches(using).map(lambda each: upsert({"batch": each}, models.PointsBatch)),
        only(models.PointVectors, moves(using)).map(update),
        ids.map(overwrite),
        ids.map(clear),
    )
    bad = st.sampled_from([{"upsert": {"points": []}}, None])
    return calls("batch_update_points", listed(mostly(good, bad), 3))


WRITES = {
    "upserts": lambda using: calls("upsert", listed(points(using)), options=OPTIONS),
    "batches": lambda using: calls("upsert", batches(using), options=OPTIONS),
    "uploads of points": lambda using: calls("upload_points", listed(points(using))),
    "uploads of collections": uploads_of_collections,
    "updates": lambda using: calls(
        "update_vectors", listed(moves(using), 3), options=ONLY_SOME
    ),
    "changes": changes,
    "operations": operations,
}


@pytest.mark.parametrize("examples", [15, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("writes", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(("using", "distance", "storage", "awaited"), KINDS)
def test_a_write_ends_as_it_does_by_the_plain_client(
    writes, examples, using, distance, storage, awaited
):
    pair, ends = Pair(using, distance, storage, awaited), set()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    @given(writes(using))
    def alike(write):
        ends.add(pair.check(write))

    alike()
    assert None in ends
    assert len(ends) > 1
