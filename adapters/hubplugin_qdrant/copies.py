"""storage="vector" where no second vector can be added in place: a corrected copy, and one switch of the alias.

Servers before 1.18 add no named vector to a collection that there is, and none adds one beside an unnamed one for good.
So the collection behind an alias is copied to `<collection>--v3`, which has the second vector as well, and the alias
then stands for the copy. The copy's manifest names its `origin`, which stays as it was: `restored` goes back to it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from qdrant_client import QdrantClient, models

from hubplugin.correction import CLOSING_PASSES
from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.model import OffsetModel
from hubplugin.store import Batch, Correction, Id
from hubplugin_qdrant import companion
from hubplugin_qdrant import manifest as m
from hubplugin_qdrant.client import HubQdrantClient
from hubplugin_qdrant.manifest import Manifest, Version
from hubplugin_qdrant.store import Page, QdrantStore, order
from hubplugin_qdrant.writes import chunks, named, second_vectors


class CopiedStore(QdrantStore):
    """The collection behind an alias, corrected in a copy that takes its place. Until `begin` it is the collection.

    Every alias of the collection will then stand for the copy, and `alias`, too, if it is given.
    Raises StoreError where there is no alias, and for what a copy would not hold.
    """

    def __init__(self, client: QdrantClient, collection: str, using: str, alias: str | None, *, url: str = ""):
        super().__init__(client, collection, using, "vector", url=url)
        self._scans, self._trail = 0, Trail(final=False)
        self._before = self._manifest()
        origin = self._before.origin or self.collection
        self._copy = f"{origin}--v{self._before.last_number + 1}"
        with self._one_line("opening"):
            _require_free(self, self._copy, origin)
            self._aliases = _aliases(self.client, self.collection)
            if alias is not None and alias not in self._aliases:
                if self.client.collection_exists(alias):
                    raise InputError(Parameter("alias", alias), " is taken by something else; choose another name")
                self._aliases.append(alias)
        if not self._aliases:
            raise StoreError(
                f"{self.url}: ",
                Parameter("storage", "vector"),
                f" needs a copy here, {self._why_no_second()}; no alias can take the place of {self.collection!r} "
                "itself: give it one with ",
                Parameter("alias"),
                " and use that in your application, or use ",
                Parameter("storage", "payload"),
            )
        _require_no_others(self, self._before)
        if self._info.config.params.sharding_method == models.ShardingMethod.CUSTOM:
            raise StoreError(
                f"{self.url}: a collection sharded by key is not copied; use ", Parameter("storage", "payload")
            )

    def correction(self) -> Correction | None:
        found = super().correction()
        if found is not None or self.collection == self._copy:
            return found
        with self._one_line("reading the model"):
            half = self._retry(companion.read_manifest, self.client, self._copy)
            version = _filled(half, self.using) if half is not None else None
            if version is None:
                return None
            return Correction(self._retry(companion.read_model, self.client, self._copy, version), False)

    def begin(self, model: OffsetModel) -> Id | None:
        active = self._before.active.get(self.using)
        if active is not None and (active.model, active.storage) == (model.fingerprint, "vector"):
            return super().begin(model)
        self._require_writable()
        self._require_formulas()
        with self._one_line("preparing"):
            self.collection = self._copy
            companion.create(self.client, self.collection, self._info.config.params.replication_factor)
            manifest = self._leased(self._manifest())
            version = _filled(manifest, self.using)
            if version is None or version.model != model.fingerprint:
                self._retry(self.client.delete_collection, self.collection)  # what another fit has begun
                if version is not None:
                    companion.delete_model(self.client, self.collection, version)
                number = self._before.last_number + 1
                version = self._new_version(model, number, companion.write_model(self.client, self.collection, model))
                origin = self._before.origin or self._source
                self._write_manifest(manifest.changed(active={}, writing=version, last_number=number, origin=origin))
            self._target = version
            first = _named_vectors(self._info, self._before.seconds())
            vectors = first | {version.second: self._second(first[self.using])}
            _create(self, self.collection, vectors)
        return None

    def _second(self, first: models.VectorParams) -> models.VectorParams:
        euclidean = first.distance == models.Distance.EUCLID
        return models.VectorParams(
            size=self.dim + 1,
            distance=models.Distance.EUCLID if euclidean else models.Distance.DOT,
            datatype=models.Datatype.FLOAT16 if first.datatype == models.Datatype.FLOAT16 else None,
            hnsw_config=first.hnsw_config,
            on_disk=first.on_disk,
        )

    def plan(self) -> Sequence[str]:
        aliases = ", ".join(map(repr, self._aliases))
        second = f"with a vector 'hub_v{self._before.last_number + 1}' of {self.dim + 1} dimensions"
        return (
            f"{self.collection!r} would be copied to {self._copy!r}, {second} beside {self.using!r}",
            f"{aliases} would then stand for the copy; {self.collection!r} stays as it is",
            f"manifest and model would lie in {m.companion(self._copy)!r}",
        )

    @property
    def _filling(self) -> bool:
        return self._target is not None and self.collection == self._copy

    def scan(self, after: Id | None = None) -> Iterator[Batch]:
        """As ever; once begun, a point that the copy lacks, or has otherwise, has no offset."""
        if not self._filling:
            yield from super().scan(after)
            return
        self._writers.settle()
        manifest = self._manifest()
        # No scan but the last leaves the writing to what it has found.
        self._scans, self._trail = self._scans + 1, Trail(final=self._scans + 1 >= CLOSING_PASSES)
        for batches, seen in self._pages(lambda records: self._compared(records, manifest), True, True):
            self._renew()
            self._trail.saw(seen)
            yield from batches

    def _sides(self) -> tuple[Side, Side]:
        """The collection, and the copy."""
        ours = (self._begun().second,)
        return Side(self, self._source, self._before.seconds()), Side(self, self.collection, ours)

    def _compared(self, records: list[models.Record], manifest: Manifest) -> tuple[list[Batch], Seen]:
        """The batches of `records`, and how the points were when they were seen."""
        here, there = self._sides()
        target, others = self._begun(), there.contents(map(_id, records))
        joined, plain, seen = [], [], []
        for record in records:
            content = here.content(record)
            other = others.get(content.id)
            seen.append((content.id, content.digest))
            vectors = dict(content.vectors)
            if other is not None and content.like(other):
                vectors |= other.ours
            elif not self._correctable(vectors.get(self.using)):
                plain.append(content)
            joined.append(record.model_copy(update={"vector": vectors}))
        there.write(plain)
        return self._batches(joined, target, manifest, target.group_by), seen

    def write(self, batch: Batch, offsets: np.ndarray) -> None:
        if not self._filling:
            super().write(batch, offsets)
            return
        self._renew()
        seconds = second_vectors(batch.vectors, offsets, self._begun()).tolist()
        items = list(zip(batch.ids, seconds, strict=True))
        self._writers.submit(partial(self._send, items, partial(self._fill, self._begun(), self._trail)))

    def _fill(self, target: Version, trail: Trail, items: list[tuple[Id, Any]]) -> None:
        """Copies points as they are now, each with its second vector; those that are gone are left out."""
        seconds, (here, there) = dict(items), self._sides()
        contents = list(here.contents(seconds).values())
        there.put(self.client, [content.point({target.second: seconds[content.id]}) for content in contents])
        trail.wrote(contents)

    def activate(self) -> None:
        if not self._filling:
            super().activate()
            delete_abandoned(self, self._manifest())
            return
        target = self._begun()
        self._writers.settle()
        with self._one_line("activating"):
            sweep(*self._sides())
            manifest = self._leased(self._manifest())
            self._write_manifest(manifest.changed(active={self.using: target}, writing=None))
            _switch(self.client, self._aliases, self.collection)
            follow(self._trail, *self._sides(), HubQdrantClient.wrap(self.client))
            delete_abandoned(self, manifest)  # the copy before this one
        self._source = self.collection


def restored(store: QdrantStore, manifest: Manifest) -> None:
    """Goes back from a copy, `store.collection`, to its origin, with all that was written to the copy meanwhile."""
    origin = manifest.origin
    assert origin is not None
    _require_no_others(store, manifest)
    client, copy = store.client, store.collection
    vectors: Any = _named_vectors(store._info, manifest.seconds())
    _create(store, origin, vectors[""] if set(vectors) == {""} else vectors)
    here, there = Side(store, copy, manifest.seconds()), Side(store, origin, ())
    for number in range(1, CLOSING_PASSES + 1):
        trail = Trail(final=number == CLOSING_PASSES)
        if not mirror(here, there, trail):
            break
    # From here on the copy is one that a run has left behind, whatever becomes of this one.
    store._write_manifest(manifest.changed(active={}, writing=_filled(manifest, store.using)))
    _switch(client, _aliases(client, copy), origin)
    follow(trail, here, there, client)
    client.delete_collection(copy)
    client.delete_collection(m.companion(copy))
    QdrantStore(client, origin, store.using).remove()


def delete_abandoned(store: QdrantStore, manifest: Manifest) -> None:
    """Deletes the copies that no alias stands for and that a run has begun, or left behind, when it was cut off."""
    base = manifest.origin or store.collection
    for found in store.client.get_collections().collections:
        copy = found.name.removesuffix(m.companion(""))
        number = copy.removeprefix(f"{base}--v")
        if copy == found.name or not number.isdecimal() or _aliases(store.client, copy):
            continue
        left = companion.read_manifest(store.client, copy)
        if left is not None and store.is_taken(left):
            continue
        replaced = manifest.origin is not None and int(number) < manifest.last_number
        if left is not None and left.origin == base and (replaced or not left.active):
            store.client.delete_collection(copy)
            store.client.delete_collection(found.name)


def mirror(here: Side, there: Side, trail: Trail) -> int:
    """Makes `there` hold what `here` does; returns how many points differed. `trail` learns what was seen."""
    store = here.store
    differing = 0

    def compared(records: list[models.Record]) -> tuple[Seen, list[Id]]:
        contents = [here.content(record) for record in records]
        others = there.contents(content.id for content in contents)
        wrong = [one.id for one in contents if one.id not in others or not one.like(others[one.id])]
        return [(content.id, content.digest) for content in contents], wrong

    def send(ids: list[Id]) -> None:
        contents = list(here.contents(ids).values())
        there.write(contents)
        trail.wrote(contents)

    done, total = 0, store.count()
    for seen, ids in here.pages(compared):
        store._renew()
        trail.saw(seen)
        differing += len(ids)
        store._writers.submit(partial(send, ids))
        done += len(seen)
        if store.progress is not None:
            store.progress(f"bringing back to {there.name!r}", min(done, total), total)
    store._writers.settle()
    return differing + sweep(here, there)


def sweep(here: Side, there: Side) -> int:
    """Deletes from `there` what `here` does not have; returns how many points."""
    swept, store = 0, here.store
    for ids in store._pages(lambda records: [_id(record) for record in records], False, False, there.name):
        store._renew()
        found = store._retry(store.client.retrieve, here.name, ids=ids, with_payload=False)
        gone = set(ids) - {_id(record) for record in found}
        there.delete(gone)
        swept += len(gone)
    return swept


def follow(trail: Trail, here: Side, there: Side, client: QdrantClient) -> None:
    """Does to `there`, through `client`, what was done to `here` since `trail` saw it, unless the point that is there
    has been changed since: nobody writes `here` any more."""
    store = here.store
    pages = here.pages(lambda records: [(content.id, content.digest) for content in map(here.content, records)])
    for late in chunks(trail.late(pages, store._renew), store._largest):
        others = there.contents(key for key, _ in late)
        followed = [key for key, before in late if (others[key].digest if key in others else None) == before]
        contents = here.contents(followed)
        # Searches see `there`: what can be written in one step is.
        anew = {key for key, one in contents.items() if key in others and one.leaves_of(others[key])}
        there.write(contents.values(), client, anew)
        there.delete(set(followed) - set(contents))


def _filled(manifest: Manifest, using: str) -> Version | None:
    """The version that a copy is being, or has been, filled with."""
    return manifest.writing or manifest.active.get(using)


def _require_free(store: QdrantStore, copy: str, origin: str) -> None:
    """Raises StoreError if `copy` is there and is anything but what a run on `origin` has left behind."""
    if not store.client.collection_exists(copy):
        return
    aliases, left = _aliases(store.client, copy), companion.read_manifest(store.client, copy)
    if left is None or left.origin != origin:
        raise StoreError(
            f"{store.url}: {copy!r}, as the copy would be called, is not ours; delete it or use ",
            Parameter("storage", "payload"),
        )
    if aliases:
        raise StoreError(f"{store.url}: its copy {copy!r} is in use as {aliases[0]!r}: apply to that")


def _require_no_others(store: QdrantStore, manifest: Manifest) -> None:
    others = [version.vector for version in manifest.kept_up() if version.vector != store.using]
    if others:
        raise StoreError(f"{store.url}: vector {others[0]!r} of it is corrected, too; remove that correction first")


@dataclass(frozen=True)
class Content:
    """What a user has written of a point, its vectors by name, and beside it the vectors that are `ours`."""

    id: Id
    vectors: dict[str, Any]
    payload: dict[str, Any]
    ours: dict[str, Any]

    @property
    def digest(self) -> str:
        """Names the content: the same for the same."""
        written = json.dumps([_rounded(self.payload), self.vectors], sort_keys=True, default=repr)
        return hashlib.blake2b(written.encode(), digest_size=16).hexdigest()

    def point(self, ours: Mapping[str, list[float]]) -> models.PointStruct:
        """As it is written, with `ours` beside its own vectors."""
        vector: Any = self.vectors | dict(ours)
        return models.PointStruct(
            id=self.id, vector=vector[""] if set(vector) == {""} else vector, payload=self.payload
        )

    def leaves_of(self, other: Content) -> bool:
        """Whether an upsert may leave something of `other`, which is there."""
        return not self.payload or not set(other.vectors) <= set(self.vectors)

    def like(self, other: Content) -> bool:
        if not _same(self.payload, other.payload) or set(self.vectors) != set(other.vectors):
            return False
        return all(_alike(vector, other.vectors[name]) for name, vector in self.vectors.items())


Seen: TypeAlias = "list[tuple[Id, str]]"
"""Points by id, in the order of ids, each with the digest of its content."""


@dataclass(frozen=True)
class Side:
    """One of the two collections between which points are copied: as a user sees it, without the vectors `ours`."""

    store: QdrantStore
    name: str
    ours: Sequence[str]

    def content(self, record: models.Record) -> Content:
        vectors, payload = named(record.vector), dict(record.payload or {})
        payload.pop(m.KEY, None)
        ours = {name: vectors.pop(name) for name in self.ours if name in vectors}
        return Content(_id(record), vectors, payload, ours)

    def contents(self, ids: Iterable[Id]) -> dict[Id, Content]:
        """What is there of the points `ids`."""
        wanted, store = list(ids), self.store
        if not wanted:
            return {}
        found = store._retry(store.client.retrieve, self.name, ids=wanted, with_payload=True, with_vectors=True)
        return {content.id: content for content in map(self.content, found)}

    def pages(self, turned: Callable[[list[models.Record]], Page]) -> Iterator[Page]:
        """All points with all that they hold, in the order of ids."""
        return self.store._pages(turned, True, True, self.name)

    def write(
        self, contents: Iterable[Content], client: QdrantClient | None = None, anew: Collection[Id] | None = None
    ) -> None:
        """Puts `contents` in the place of what is there, through `client`, by default the plain one; see `put`."""

        def send(items: list[tuple[Id, Any]]) -> None:
            self.put(client or self.store.client, [content.point({}) for _, content in items], anew)

        self.store._send([(content.id, content) for content in contents], send)

    def put(self, client: QdrantClient, points: list[models.PointStruct], anew: Collection[Id] | None = None) -> None:
        """Writes `points` in one request, those in `anew`, by default all, after the ones before are deleted: an upsert
        alone may leave of a point what it does not name, a vector up to 1.18, a payload up to 1.14."""
        operations: list[Any] = []
        before: list[Any] = [point.id for point in points if anew is None or point.id in anew]
        if before:
            operations.append(models.DeleteOperation(delete=models.PointIdsList(points=before)))
        if points:
            operations.append(models.UpsertOperation(upsert=models.PointsList(points=points)))
            client.batch_update_points(self.name, operations, wait=True)

    def delete(self, ids: Iterable[Id]) -> None:
        def send(items: list[tuple[Id, Any]]) -> None:
            selector = models.PointIdsList(points=[key for key, _ in items])
            self.store.client.delete(self.name, points_selector=selector, wait=True)

        self.store._send([(key, None) for key in ids], send)


@dataclass
class Trail:
    """How the points of a collection were when a scan saw them, in a temporary file, and when they were then copied:
    what was done to them later can be told. final: no scan after this one looks whether what was copied is right."""

    final: bool
    copied: dict[Id, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lines = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it goes with this object

    def saw(self, points: Seen) -> None:
        self._lines.write("".join(json.dumps(point) + "\n" for point in points))

    def wrote(self, contents: Iterable[Content]) -> None:
        if self.final:
            self.copied |= {content.id: content.digest for content in contents}

    def late(self, pages: Iterable[Seen], renew: Callable[[], None]) -> Iterator[tuple[Id, str | None]]:
        """The points that came, changed or went since, as `pages` has them now, each with its digest before."""
        self._lines.seek(0)
        lines = map(json.loads, self._lines)
        expected = next(lines, None)
        and_end: Iterable[Sequence[tuple[Id, str] | None]] = itertools.chain(pages, [[None]])
        for page in and_end:
            renew()
            for now in page:
                while expected is not None and (now is None or order(expected[0]) < order(now[0])):
                    yield expected[0], self.copied.get(*expected)
                    expected = next(lines, None)
                before = None
                if now is not None and expected is not None and expected[0] == now[0]:
                    before, expected = self.copied.get(*expected), next(lines, None)
                if now is not None and before != now[1]:
                    yield now[0], before


def _id(record: models.Record) -> Id:
    return record.id if isinstance(record.id, int) else str(record.id)


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, list):
        return bool(one == other)
    return np.shape(one) == np.shape(other) and bool(np.allclose(one, other, rtol=1e-6, atol=1e-7))


def _same(one: Any, other: Any) -> bool:
    """Whether two values of a payload are the same. A server may read a number one step off what it was sent."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return type(one) is type(other) and bool(one == other)


def _rounded(value: Any) -> Any:
    """A value of a payload to as many digits as make two that are the same equal, but for a few on the boundary."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def _named_vectors(info: models.CollectionInfo, ours: Sequence[str]) -> dict[str, models.VectorParams]:
    found = info.config.params.vectors or {}
    by_name: Mapping[str, models.VectorParams] = {"": found} if isinstance(found, models.VectorParams) else found
    return {name: parameters for name, parameters in by_name.items() if name not in ours}


def _create(store: QdrantStore, name: str, vectors: Any) -> None:
    """A collection with the settings of that of `store` and with `vectors`, if it is not there, and its payload
    indexes, if they are not."""
    client, like = store.client, store._info
    config, params = like.config, like.config.params
    settings = {
        "sparse_vectors_config": params.sparse_vectors,
        "shard_number": params.shard_number,
        "sharding_method": params.sharding_method,
        "replication_factor": params.replication_factor,
        "write_consistency_factor": params.write_consistency_factor,
        "on_disk_payload": params.on_disk_payload,
        "hnsw_config": _as(models.HnswConfigDiff, config.hnsw_config),
        "optimizers_config": _as(models.OptimizersConfigDiff, config.optimizer_config),
        "wal_config": _as(models.WalConfigDiff, config.wal_config),
        "quantization_config": config.quantization_config,
        "strict_mode_config": _as(models.StrictModeConfig, config.strict_mode_config),
        "metadata": getattr(config, "metadata", None),
    }
    if not client.collection_exists(name):
        given = {key: value for key, value in settings.items() if value is not None}
        client.create_collection(name, vectors_config=vectors, **given)
    if params.read_fan_out_factor is not None:
        fan_out = models.CollectionParamsDiff(read_fan_out_factor=params.read_fan_out_factor)
        client.update_collection(name, collection_params=fan_out)
    there = client.get_collection(name).payload_schema
    for key, index in ({} if store._local else like.payload_schema).items():
        if key.partition(".")[0] != m.KEY and key not in there:
            client.create_payload_index(name, key, index.params or index.data_type, wait=True)


def _as(kind: Any, given: Any) -> Any:
    """`given`, which a server has told, as what it takes, by the fields that both have."""
    if given is None:
        return None
    fields = {key: value for key, value in given.model_dump(exclude_none=True).items() if key in kind.model_fields}
    return kind.model_validate(fields)


def _aliases(client: QdrantClient, collection: str) -> list[str]:
    return [found.alias_name for found in client.get_aliases().aliases if found.collection_name == collection]


def _switch(client: QdrantClient, aliases: Sequence[str], collection: str) -> None:
    """Makes `aliases` stand for `collection`, all in one step, whatever they stood for."""
    create = [models.CreateAlias(collection_name=collection, alias_name=alias) for alias in aliases]
    client.update_collection_aliases([models.CreateAliasOperation(create_alias=each) for each in create])
