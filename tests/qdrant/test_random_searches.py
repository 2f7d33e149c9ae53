"""Random requests to a corrected collection that others write to, against a search written from the definition."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin import OffsetModel
from hubplugin_qdrant import HubQdrantClient
from tests.qdrant.conftest import DIM, ONLY_NEWER_LOCAL_MODE, apply_to, clustered

ROWS, STEPS = 160, 60
COLOURS = ("red", "green", "blue")
FAR = 10_000
"""A limit beyond every collection here."""


class Disturbed(QdrantClient):
    """A client whose next search or batch comes right after somebody else's write."""

    meanwhile: Any = None

    def _write(self) -> None:
        if self.meanwhile is not None:
            self.meanwhile, write = None, self.meanwhile
            write()

    def query_points(self, *args: Any, **given: Any) -> Any:
        self._write()
        return super().query_points(*args, **given)

    def query_batch_points(self, *args: Any, **given: Any) -> Any:
        self._write()
        return super().query_batch_points(*args, **given)

    def query_points_groups(self, *args: Any, **given: Any) -> Any:
        self._write()
        return super().query_points_groups(*args, **given)


@dataclass
class Point:
    """What lies in the collection under one id. offset: None where nobody has computed one."""

    vectors: dict[str, np.ndarray]
    colour: str
    offset: float | None = None


@dataclass
class World:
    """The collection `name` and what must be in it: points with the corrected vector "image", the vector "text", or
    both. by_server: whether `plain` speaks to a server, which leaves points that are queries out of a whole request."""

    plain: Disturbed
    distance: models.Distance
    storage: str
    settings: dict[str, Any]
    seed: int = 7
    name: str = "photos"
    by_server: bool = False
    points: dict[int, Point] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        parameters = models.VectorParams(size=DIM, distance=self.distance)
        # In one shard: each shard of a cluster keeps to the limit of a prefetch by itself.
        self.plain.create_collection(
            self.name, {"image": parameters, "text": parameters}, shard_number=1
        )
        given = []
        rows = (
            ROWS if "group_by" not in self.settings else 360
        )  # a group needs a hundred
        for key, vector in enumerate(clustered(self.seed, rows)):
            self.points[key] = Point(
                {"image": vector, "text": self.vector()}, self.pick(*COLOURS)
            )
            given.append(self.struct(key))
        self.plain.upsert(self.name, given, wait=True)
        bank, options = (
            clustered(self.seed + 1, 150),
            self.settings | {"storage": self.storage, "force": True},
        )
        apply_to(self.plain, self.name, bank, vector="image", **options)
        found = hubplugin_qdrant.open_store(
            self.plain, self.name, vector="image"
        ).correction()
        assert found is not None
        self.model = found.model
        for key in self.points:
            self.score(key, self.model)

    def vector(self) -> np.ndarray:
        return self.rng.normal(size=DIM).astype(np.float32)

    def pick(self, *items: Any) -> Any:
        return items[self.rng.integers(len(items))]

    def put(
        self, client: QdrantClient, key: int, vectors: dict[str, np.ndarray]
    ) -> None:
        self.points[key] = Point(vectors, self.pick(*COLOURS))
        client.upsert(self.name, [self.struct(key)], wait=True)

    def struct(self, key: int) -> models.PointStruct:
        point = self.points[key]
        vectors = {name: vector.tolist() for name, vector in point.vectors.items()}
        return models.PointStruct(
            id=key, vector=vectors, payload={"colour": point.colour}
        )

    def score(self, key: int, model: OffsetModel) -> None:
        """Gives a point the offset that its vector, as it is stored, must have by `model`, if it has one."""
        point = self.points[key]
        if "image" not in point.vectors:
            return
        (record,) = self.plain.retrieve(self.name, [key], with_vectors=["image"])
        groups = [point.colour] if "group_by" in self.settings else None
        point.offset = float(
            model.offsets(
                np.array([record.vector["image"]], np.float32), groups=groups
            )[0]
        )

    def unit(self, vector: np.ndarray) -> np.ndarray:
        vector = np.asarray(vector, np.float64)
        return (
            vector / np.linalg.norm(vector)
            if self.distance is models.Distance.COSINE
            else vector
        )

    def client(self) -> HubQdrantClient:
        return HubQdrantClient.wrap(self.plain, oversampling=FAR)

    def write(self) -> None:
        """Something that an application, somebody with a plain client or an operator does."""
        key, new = self.pick(*self.points), max(self.points) + 1
        both = {
            "image": clustered(int(self.rng.integers(10**9)), 1)[0],
            "text": self.vector(),
        }
        kinds = [
            "stranger",
            "stranger",
            "stranger",
            "text alone",
            "overwritten",
            "ours",
            "ours",
            "deleted",
            "refresh",
        ]
        what = self.pick(*kinds)
        if what == "stranger":
            self.put(self.plain, new, both)
        elif what == "text alone":
            self.put(self.plain, new, {"text": both["text"]})
        elif what == "overwritten":
            self.put(self.plain, key, both)
        elif what == "ours":
            if self.rng.random() < 0.3:
                middle = clustered(self.seed + 1, 150).mean(
                    axis=0
                )  # which is near every query
                both["image"] = middle + 0.01 * self.vector()
            self.put(self.client(), new, both)
            self.score(new, self.model)
        elif what == "deleted":
            self.plain.delete(self.name, [key], wait=True)
            del self.points[key]
        else:
            hubplugin.refresh(
                hubplugin_qdrant.open_store(self.plain, self.name, vector="image")
            )
            for each, point in self.points.items():
                if point.offset is None:
                    self.score(each, self.model)

    def lacking(self) -> bool:
        """Whether a point has the vector and no offset."""
        return any(
            "image" in point.vectors and point.offset is None
            for point in self.points.values()
        )

    def offset_of(self, key: int, unseen: int | None) -> float | None:
        """What is added to the similarity of a point; None if it is not found by its image."""
        offset = self.points[key].offset
        if offset is not None:
            return offset
        return None if self.storage == "vector" and key == unseen else 0.0

    def raw(self, query: np.ndarray, vector: np.ndarray) -> float:
        query, vector = self.unit(query), self.unit(vector)
        if self.distance is models.Distance.EUCLID:
            return float(-((query - vector) ** 2).sum() / 2)
        return float(query @ vector)

    def ranked(
        self,
        node: Any,
        inherited: tuple[Any, ...] = (),
        unseen: int | None = None,
        limit: int | None = None,
    ) -> list[tuple[int, float]]:
        """What `node`, a request or a prefetch, finds before its limit: ids and scores, best first. Filters, and ids
        that are queries, go down into prefetches. limit: takes the place of that of each prefetch."""
        query = wanted(node)
        left_out = (
            tuple(ids_in(node))
            if self.by_server
            else (query,)
            if isinstance(query, int)
            else ()
        )
        conditions = (*inherited, *((node.filter,) if node.filter else ()), *left_out)
        if isinstance(query, int):
            query = self.points[query].vectors[node.using].tolist()
        children = [
            self.ranked(child, conditions, unseen, limit)[: limit or child.limit]
            for child in node.prefetch or []
        ]
        if isinstance(query, models.FusionQuery):
            shares: dict[int, float] = {}
            for child in children:
                for rank, (key, _) in enumerate(child):
                    shares[key] = shares.get(key, 0.0) + 1 / (2 + rank)
            return sorted(shares.items(), key=lambda each: -each[1])
        if isinstance(query, models.FormulaQuery):
            return sorted(
                ((key, 3 * score + 1) for key, score in children[0]),
                key=lambda each: -each[1],
            )
        pool = (
            {key for child in children for key, _ in child}
            if children
            else set(self.points)
        )
        return self.nearest(query, node, pool, conditions, unseen)

    def nearest(
        self,
        query: Any,
        node: Any,
        pool: set[int],
        conditions: tuple[Any, ...],
        unseen: int | None,
    ) -> list[tuple[int, float]]:
        found = []
        for key in pool:
            point = self.points[key]
            offset = self.offset_of(key, unseen) if node.using == "image" else 0.0
            if node.using not in point.vectors or offset is None:
                continue
            if all(
                key != each if isinstance(each, int) else point.colour == "red"
                for each in conditions
            ):
                found.append((key, self.raw(query, point.vectors[node.using]) + offset))
        found.sort(key=lambda each: -each[1])
        if self.distance is models.Distance.EUCLID:
            found = [
                (key, float(-np.sign(score) * np.sqrt(2 * abs(score))))
                for key, score in found
            ]
        if node.score_threshold is None:
            return found
        if self.distance is models.Distance.EUCLID:
            return [
                (key, score) for key, score in found if score <= node.score_threshold
            ]
        return [(key, score) for key, score in found if score >= node.score_threshold]

    def request(
        self,
        depth: int = 2,
        kind: type[Any] = models.QueryRequest,
        above: str = "rescoring",
    ) -> Any:
        """A request, or a prefetch under a node of the form `above`, of random form. Fusions have ties, which come in
        any order, so that none stands where its order counts."""
        forms = [
            "nearest",
            "nearest",
            "rescoring",
            "rescoring",
            "formula",
            *(["fusion"] * (above == "rescoring")),
        ]
        form = self.pick(*forms) if depth else "nearest"
        given: dict[str, Any] = {"limit": int(self.rng.integers(1, 15))}
        if self.rng.random() < 0.3:
            given["filter"] = models.Filter(
                must=[
                    models.FieldCondition(
                        key="colour", match=models.MatchValue(value="red")
                    )
                ]
            )
        if form in ("nearest", "rescoring"):
            using = self.pick("image", "image", "text")
            wanted: Any = self.vector().tolist()
            if self.rng.random() < 0.3:
                wanted = int(
                    self.pick(
                        *(
                            key
                            for key, point in self.points.items()
                            if using in point.vectors
                        )
                    )
                )
            given |= {
                "query": self.pick(wanted, models.NearestQuery(nearest=wanted)),
                "using": using,
            }
            if self.rng.random() < 0.2:
                given["score_threshold"] = float(self.rng.normal()) + (
                    3.0 if self.distance is models.Distance.EUCLID else 0.0
                )
        elif form == "fusion":
            given |= {
                "query": models.FusionQuery(fusion=models.Fusion.RRF),
                "limit": FAR,
            }
        else:
            formula = models.SumExpression(
                sum=[models.MultExpression(mult=[3.0, "$score"]), 1.0]
            )
            given["query"] = models.FormulaQuery(formula=formula)
        if form != "nearest":
            count = 1 if form == "formula" else int(self.rng.integers(1, 4))
            given["prefetch"] = [
                self.request(depth - 1, models.Prefetch, form) for _ in range(count)
            ]
        return kind(**given)

    def check(
        self,
        found: list[Any],
        expected: list[tuple[int, float]],
        which: slice,
        request: Any,
    ) -> None:
        """Holds the points that were `found` to `which` of those expected; ties may come in either order."""
        scores = dict(expected)
        assert {point.id for point in found} <= set(scores), request
        self.alike(
            [point.score for point in found],
            [score for _, score in expected[which]],
            request,
        )
        self.alike(
            [point.score for point in found],
            [scores[point.id] for point in found],
            request,
        )

    def alike(self, found: list[float], expected: list[float], request: Any) -> None:
        """Compares scores; distances as their squares, in which a rounding stays small."""
        power = 2 if self.distance is models.Distance.EUCLID else 1
        sizes = [np.sign(each) * np.abs(each) ** power for each in (found, expected)]
        np.testing.assert_allclose(*sizes, rtol=1e-4, atol=1e-4, err_msg=str(request))


def wanted(node: Any) -> Any:
    """What `node` asks for the nearest of, or its query of another kind."""
    return (
        node.query.nearest
        if isinstance(node.query, models.NearestQuery)
        else node.query
    )


def ids_in(node: Any) -> Iterator[int]:
    """Every id that is a query in the tree of `node`."""
    if isinstance(wanted(node), int):
        yield wanted(node)
    for child in node.prefetch or []:
        yield from ids_in(child)


def search(world: World, client: HubQdrantClient) -> None:
    """One random request, alone or in groups or in a batch, right after a stranger's write or not."""
    unseen, hides = None, world.storage == "vector" and not world.lacking()
    request = world.request()
    if world.rng.random() < 0.3:
        key, vectors = (
            max(world.points) + 1,
            {"image": clustered(int(world.rng.integers(10**9)), 1)[0]},
        )
        client.scroll(
            world.name, limit=1
        )  # what the client knows is of before the write
        world.plain.meanwhile = lambda: world.put(world.plain, key, vectors)
        unseen = key if hides else None
    given = dict(request)
    given = {
        "query_filter" if name == "filter" else name: value
        for name, value in given.items()
        if value is not None
    }
    # A server looks for missing members of groups with filters of its own, which go into the prefetches, too.
    way = world.pick(
        "alone", "alone", "batch", "alone" if world.by_server else "groups"
    )
    if way == "batch":
        (answer,) = client.query_batch_points(world.name, [request])
        world.check(
            answer.points,
            world.ranked(request, unseen=unseen),
            slice(request.limit),
            request,
        )
    elif way == "alone":
        start = int(world.rng.integers(4))
        answer = client.query_points(world.name, **given, offset=start)
        expected = world.ranked(request, unseen=unseen)
        world.check(
            answer.points, expected, slice(start, start + request.limit), request
        )
    else:
        groups = client.query_points_groups(
            world.name, "colour", group_size=4, **given
        ).groups
        expected = world.ranked(request, unseen=unseen, limit=FAR)
        for group in groups:
            members = [
                each for each in expected if world.points[each[0]].colour == group.id
            ]
            world.check(group.hits, members, slice(4), request)
        assert len(groups) == min(
            request.limit, len({world.points[key].colour for key, _ in expected})
        ), request


MODES = {
    "blend": {"method": "blend"},
    "by groups": {"method": "nnn", "group_by": "colour"},
}
DISTANCES = (models.Distance.EUCLID, models.Distance.DOT, models.Distance.COSINE)
FEW = {
    (models.Distance.EUCLID, "blend"),
    (models.Distance.DOT, "blend"),
    (models.Distance.COSINE, "by groups"),
}
"""Those of `make check`."""

CASES = [
    pytest.param(
        distance,
        storage,
        mode,
        marks=() if (distance, mode) in FEW else pytest.mark.slow,
    )
    for distance in DISTANCES
    for storage in ("payload", "vector")
    for mode in MODES
]


def check_random_searches(world: World) -> None:
    """Searches `world` STEPS times, between writes. With second vectors each search is by a client that has just come:
    one that has known the collection for a while misses the first stranger for 10 seconds."""
    client = world.client()
    for _ in range(STEPS):
        if world.rng.random() < 0.3:
            world.write()
        if world.storage == "vector" or world.rng.random() < 0.5:
            client = world.client()
        search(world, client)


@ONLY_NEWER_LOCAL_MODE
@pytest.mark.filterwarnings("ignore:Payload indexes have no effect")
@pytest.mark.parametrize(("distance", "storage", "mode"), CASES)
def test_random_requests_find_what_the_definition_says_while_others_write(
    distance, storage, mode
):
    check_random_searches(World(Disturbed(":memory:"), distance, storage, MODES[mode]))
