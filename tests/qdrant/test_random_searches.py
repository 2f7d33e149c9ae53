"""Random requests to a corrected collection that others write to, against a search
written from the definition."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant import HubQdrantClient
from tests.qdrant.conftest import (
    COSINE,
    DIM,
    DOT,
    EUCLID,
    ONLY_NEWER_LOCAL_MODE,
    RED,
    RRF,
    apply_to,
    as_scores,
    clustered,
    similarities,
    widen,
)

ROWS, STEPS = 160, 60
COLOURS = ("red", "green", "blue")
DISTANCES = (EUCLID, DOT, COSINE)
FAR = 10_000
"""A limit beyond every collection here."""

TRIPLED = models.FormulaQuery(
    formula=models.SumExpression(sum=[models.MultExpression(mult=[3.0, "$score"]), 1.0])
)

Ranked = list[tuple[int, float]]
"""Ids and scores, best first."""


class Disturbed(QdrantClient):
    """A client whose next search or batch comes right after somebody else's write,
    `meanwhile`."""

    meanwhile: Callable[[], None] | None = None

    def __getattribute__(self, name):
        if name.startswith("query_"):
            write, self.meanwhile = self.meanwhile, None
            if write is not None:
                write()
        return super().__getattribute__(name)


@dataclass
class Point:
    """A point of the collection. offset: None where nobody has computed one."""

    vectors: dict[str, np.ndarray]
    colour: str
    offset: float | None = None


@dataclass
class World:
    """The collection `name` and what must be in it.

    Its points have the corrected vector "image", the vector "text", or both.
    by_server: True if `plain` speaks to a server, which leaves points that are queries
    out of a whole request.
    """

    plain: Disturbed
    distance: models.Distance
    storage: str
    seed: int = 7
    name: str = "photos"
    by_server: bool = False
    points: dict[int, Point] = field(default_factory=dict)

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        parameters = models.VectorParams(size=DIM, distance=self.distance)
        # In one shard: each keeps to the limit of a prefetch by itself.
        self.plain.create_collection(
            self.name, {"image": parameters, "text": parameters}, shard_number=1
        )
        for key, vector in enumerate(clustered(self.seed, ROWS)):
            self.put(self.plain, key, {"image": vector, "text": self.vector()})
        apply_to(
            self.plain,
            self.name,
            clustered(self.seed + 1, 150),
            vector="image",
            storage=self.storage,
            force=True,
        )
        widen(self.store(), FAR)
        found = self.store().correction()
        assert found is not None
        self.model = found.model
        for key in self.points:
            self.score(key)

    def store(self):
        return hubplugin_qdrant.open_store(self.plain, self.name, vector="image")

    def client(self):
        return HubQdrantClient.wrap(self.plain)

    def vector(self):
        return self.rng.normal(size=DIM).astype(np.float32)

    def image(self):
        return clustered(int(self.rng.integers(10**9)), 1)[0]

    def pick(self, *items):
        return items[self.rng.integers(len(items))]

    def put(self, client, key, vectors):
        point = self.points[key] = Point(vectors, self.pick(*COLOURS))
        struct = models.PointStruct(
            id=key,
            vector={name: vector.tolist() for name, vector in vectors.items()},
            payload={"colour": point.colour},
        )
        client.upsert(self.name, [struct], wait=True)

    def score(self, key):
        """Note the offset that the stored vector of a point must have, if any."""
        if "image" in self.points[key].vectors:
            (record,) = self.plain.retrieve(self.name, [key], with_vectors=["image"])
            vector = np.array([record.vector["image"]], np.float32)
            self.points[key].offset = float(self.model.offsets(vector)[0])

    def write(self):
        """Do what an application, somebody with a plain client or an operator does."""
        key, new = self.pick(*self.points), max(self.points) + 1
        both = {"image": self.image(), "text": self.vector()}
        what = self.pick(
            *["stranger"] * 3, "text alone", "over", "ours", "hub", "deleted", "refresh"
        )
        if what == "stranger":
            self.put(self.plain, new, both)
        elif what == "text alone":
            self.put(self.plain, new, {"text": both["text"]})
        elif what == "over":
            self.put(self.plain, key, both)
        elif what in ("ours", "hub"):
            if what == "hub":  # near every query
                middle = clustered(self.seed + 1, 150).mean(axis=0)
                both["image"] = middle + 0.01 * self.vector()
            self.put(self.client(), new, both)
            self.score(new)
        elif what == "deleted":
            self.plain.delete(self.name, [key], wait=True)
            del self.points[key]
        else:
            hubplugin.refresh(self.store())
            widen(self.store(), FAR)
            for each, point in self.points.items():
                if point.offset is None:
                    self.score(each)

    def lacking(self):
        """Return True if a point has the vector and no offset."""
        return any(
            "image" in point.vectors and point.offset is None
            for point in self.points.values()
        )

    def ranked(self, node, inherited=(), unseen=None, limit=None):
        """Return what `node`, a request or a prefetch, finds before its limit.

        Filters, and ids that are queries, go down into prefetches.

        Args:
            node: The request or prefetch.
            inherited: Conditions from above.
            unseen: A point that a second vector does not find yet.
            limit: Takes the place of that of each prefetch.
        """
        query = wanted(node)
        left_out = [query] if isinstance(query, int) else []
        if self.by_server:
            left_out = list(ids_in(node))
        conditions = (*inherited, *((node.filter,) if node.filter else ()), *left_out)
        if isinstance(query, int):
            query = self.points[query].vectors[node.using]
        children = []
        for child in node.prefetch or []:
            found = self.ranked(child, conditions, unseen, limit)
            children.append(found[: limit or child.limit])
        if isinstance(query, models.FusionQuery):
            shares: dict[int, float] = {}
            for child in children:
                for rank, (key, _) in enumerate(child):
                    shares[key] = shares.get(key, 0.0) + 1 / (2 + rank)
            return best_first(shares.items())
        if isinstance(query, models.FormulaQuery):
            scores = children[0]
            if self.distance is EUCLID and node.prefetch[0].using == "image":
                scores = [(key, -score * abs(score) / 2) for key, score in scores]
            return best_first((key, 3 * score + 1) for key, score in scores)
        pool = set(self.points)
        if children:
            pool = {key for child in children for key, _ in child}
        return self.nearest(query, node, pool, conditions, unseen)

    def nearest(self, query, node, pool, conditions, unseen):
        found = {}
        is_image = node.using == "image"
        for key in pool:
            point = self.points[key]
            is_allowed = all(
                key != each if isinstance(each, int) else point.colour == "red"
                for each in conditions
            )
            is_hidden = is_image and key == unseen and point.offset is None
            if node.using in point.vectors and is_allowed and not is_hidden:
                vector = point.vectors[node.using]
                found[key] = similarities(self.distance, [query], [vector])[0, 0]
                if is_image:
                    found[key] += point.offset or 0.0
        ranked = [
            (key, as_scores(self.distance, score))
            for key, score in best_first(found.items())
        ]
        sign = -1 if self.distance is EUCLID else 1
        least = node.score_threshold
        return [
            (key, score)
            for key, score in ranked
            if least is None or sign * score >= sign * least
        ]

    def request(self, depth=2, kind=models.QueryRequest, above="rescoring"):
        """Return a random request, or a prefetch under a node of the form `above`.

        Fusions have ties, which come in any order, so that none stands where its order
        counts. A second vector takes no id in a prefetch.
        """
        forms = [*["nearest", "rescoring"] * 2, "formula"]
        if above == "rescoring":
            forms.append("fusion")
        form = self.pick(*forms) if depth else "nearest"
        given: dict[str, Any] = {"limit": int(self.rng.integers(1, 15))}
        if self.rng.random() < 0.3:
            given["filter"] = RED
        if form == "fusion":
            given |= {"query": RRF, "limit": FAR}
        elif form == "formula":
            given["query"] = TRIPLED
        else:
            given["using"] = using = self.pick("image", "image", "text")
            query: Any = self.vector().tolist()
            takes_ids = self.storage == "payload" or kind is models.QueryRequest
            if takes_ids and self.rng.random() < 0.3:
                having = [
                    k for k, point in self.points.items() if using in point.vectors
                ]
                query = int(self.pick(*having))
            given["query"] = self.pick(query, models.NearestQuery(nearest=query))
            if self.rng.random() < 0.2:
                usual = 3.0 if self.distance is EUCLID else 0.0
                given["score_threshold"] = float(self.rng.normal()) + usual
        if form != "nearest":
            count = 1 if form == "formula" else int(self.rng.integers(1, 4))
            given["prefetch"] = [
                self.request(depth - 1, models.Prefetch, form) for _ in range(count)
            ]
        return kind(**given)

    def check(self, found, expected, which):
        """Compare the points that were `found` with `which` of those expected; ties may
        come in either order."""
        scores = dict(expected)
        assert {point.id for point in found} <= set(scores)
        given = [point.score for point in found]
        own = [scores[point.id] for point in found]
        # Of distances the squares, in which a rounding stays small.
        power = 2 if self.distance is EUCLID else 1
        for right in ([score for _, score in expected[which]], own):
            sizes = [np.sign(each) * np.abs(each) ** power for each in (given, right)]
            np.testing.assert_allclose(*sizes, rtol=1e-4, atol=1e-4)


def best_first(found):
    return sorted(found, key=lambda each: -each[1])


def wanted(node):
    """Return the vector or id that `node` asks for the nearest of, or its query of
    another kind."""
    is_nearest = isinstance(node.query, models.NearestQuery)
    return node.query.nearest if is_nearest else node.query


def ids_in(node):
    """Yield every id that is a query in the tree of `node`."""
    if isinstance(wanted(node), int):
        yield wanted(node)
    for child in node.prefetch or []:
        yield from ids_in(child)


def search(world, client):
    """Make one random request, alone or in groups or in a batch, right after a
    stranger's write or not."""
    unseen = None
    hides = world.storage == "vector" and not world.lacking()
    request = world.request()
    if world.rng.random() < 0.3:
        key, vectors = max(world.points) + 1, {"image": world.image()}
        client.scroll(world.name, limit=1)  # what it knows is of before the write
        world.plain.meanwhile = lambda: world.put(world.plain, key, vectors)
        unseen = key if hides else None
    given = {name: value for name, value in request if value is not None}
    if "filter" in given:
        given["query_filter"] = given.pop("filter")
    # A server looks for missing members of groups with filters of its own, which go
    # into the prefetches, too.
    grouped = "alone" if world.by_server else "groups"
    way = world.pick("alone", "alone", "batch", grouped)
    if way == "batch":
        (answer,) = client.query_batch_points(world.name, [request])
        expected = world.ranked(request, unseen=unseen)
        world.check(answer.points, expected, slice(request.limit))
    elif way == "alone":
        start = int(world.rng.integers(4))
        answer = client.query_points(world.name, **given, offset=start)
        expected = world.ranked(request, unseen=unseen)
        world.check(answer.points, expected, slice(start, start + request.limit))
    else:
        groups = client.query_points_groups(
            world.name, "colour", group_size=4, **given
        ).groups
        expected = world.ranked(request, unseen=unseen, limit=FAR)
        colours = [world.points[key].colour for key, _ in expected]
        for group in groups:
            pairs = zip(expected, colours, strict=True)
            members = [each for each, colour in pairs if colour == group.id]
            world.check(group.hits, members, slice(4))
        assert len(groups) == min(request.limit, len(set(colours)))


def check_random_searches(world):
    """Search `world` STEPS times, between writes.

    With second vectors each search is by a client that has just come: one that has
    known the collection for a while misses the first stranger for 10 seconds.
    """
    client = world.client()
    for _ in range(STEPS):
        if world.rng.random() < 0.3:
            world.write()
        if world.storage == "vector" or world.rng.random() < 0.5:
            client = world.client()
        search(world, client)


@ONLY_NEWER_LOCAL_MODE
@pytest.mark.parametrize("storage", ["payload", "vector"])
@pytest.mark.parametrize("distance", DISTANCES, ids=lambda distance: distance.value)
def test_random_requests_find_what_the_definition_says_while_others_write(
    distance, storage
):
    check_random_searches(World(Disturbed(":memory:"), distance, storage))
