"""How a point holds the offset of a version: as a number in its payload, or in an augmented vector.

Pure: the two storages, and what a point holds for each version that is kept up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from qdrant_client import models

from hubplugin.methods.robust import floor_of
from hubplugin.metric import Metric, augment_targets, normalise
from hubplugin.model import OffsetModel, Value
from hubplugin_qdrant.manifest import Manifest, Payload, Version
from hubplugin_qdrant.operations import GivenVector

Stored = TypeVar("Stored", float, list[float])
"""What is written to one point: the offset, or the augmented vector."""


FLOAT16 = 2.0**-10
"""Twice the share of a number that its rounding to float16 moves it by."""


@dataclass(frozen=True)
class StoredOffsets:
    """What one point holds for all versions: numbers under our payload `key`, {"v3": 0.0123}, and augmented vectors,
    {"hub_v3": [..., 0.0123]}. key: None where no version has its offsets in payloads."""

    key: str | None = None
    offsets: dict[str, float] = field(default_factory=dict)
    vectors: dict[str, list[float]] = field(default_factory=dict)


class Storage(ABC, Generic[Stored]):
    """How a point holds the offset of `version`. A *value* is what is written to one point."""

    def __init__(self, version: Version):
        self.version = version

    @abstractmethod
    def values(self, vectors: np.ndarray, offsets: np.ndarray) -> list[Stored]:
        """The value of each of `vectors` [b, d], as they lie in the collection, with its offset: `offsets` [b]."""

    @abstractmethod
    def neutral(self) -> Stored:
        """The value of a vector of length 0 under cosine: with the offset 0 it scores 0, as it does raw."""

    @abstractmethod
    def is_neutral(self, payload: Payload | None, augmented: Sequence[float] | None) -> bool:
        """Whether a point whose vector has length 0 holds nothing that moves it."""

    @abstractmethod
    def offsets(
        self, payloads: Sequence[Payload | None], vectors: np.ndarray, augmented: Sequence[Sequence[float] | None]
    ) -> np.ndarray:
        """The offsets that the points of `vectors` [b, d] hold, float32 [b]: NaN where there is none, infinity where it
        was made for another vector."""

    def rounding(self, augmented: Sequence[Sequence[float] | None]) -> np.ndarray | None:
        """By how much the offsets of these points may differ from what was written [b], None where float32 keeps
        them."""
        return None

    @abstractmethod
    def put(self, value: Stored, into: StoredOffsets) -> None:
        """Adds `value` to what a point holds."""


class PayloadStorage(Storage[float]):
    """{"hub_offset": {"v3": 0.0123}} in the payload."""

    def values(self, vectors: np.ndarray, offsets: np.ndarray) -> list[float]:
        numbers: list[float] = offsets.tolist()
        return numbers

    def neutral(self) -> float:
        return 0.0

    def is_neutral(self, payload: Payload | None, augmented: Sequence[float] | None) -> bool:
        return not self.version.held(payload)

    def offsets(
        self, payloads: Sequence[Payload | None], vectors: np.ndarray, augmented: Sequence[Sequence[float] | None]
    ) -> np.ndarray:
        held = [self.version.held(payload) for payload in payloads]
        return np.array([np.nan if each is None else each for each in held], np.float32)

    def put(self, value: float, into: StoredOffsets) -> None:
        into.offsets[self.version.field] = value


class VectorStorage(Storage[list[float]]):
    """The augmented vector "hub_v3": [t, offset] or, under Euclidean distance, [t, sqrt(2 (ceiling - offset))]."""

    def values(self, vectors: np.ndarray, offsets: np.ndarray) -> list[list[float]]:
        if self.version.metric is Metric.COSINE:
            vectors = normalise(vectors, "vectors")
        augmented = augment_targets(vectors, offsets, self.version.metric, max_offset=self.version.ceiling)
        listed: list[list[float]] = augmented.tolist()
        return listed

    def neutral(self) -> list[float]:
        return [0.0] * (self.version.dim + 1)

    def is_neutral(self, payload: Payload | None, augmented: Sequence[float] | None) -> bool:
        return augmented is not None and not any(augmented)

    def offsets(
        self, payloads: Sequence[Payload | None], vectors: np.ndarray, augmented: Sequence[Sequence[float] | None]
    ) -> np.ndarray:
        found = np.full(len(vectors), np.nan, np.float32)
        rows = [row for row, each in enumerate(augmented) if each is not None]
        if not rows:
            return found
        written = np.array([augmented[row] for row in rows], np.float32)
        given = vectors[rows]
        if self.version.metric is Metric.COSINE:
            given = normalise(given, "vectors")
        extra, written = written[:, -1], written[:, :-1]
        room = 1e-2 * (np.abs(given).max(axis=1, keepdims=True) + np.abs(written))  # float16 is exact to 1e-3
        same = (np.abs(given - written) <= room).all(axis=1)
        offsets = self.version.ceiling - extra**2 / 2 if self.version.metric is Metric.EUCLIDEAN else extra
        found[rows] = np.where(same, offsets, np.inf)
        return found

    def rounding(self, augmented: Sequence[Sequence[float] | None]) -> np.ndarray:
        """What float16 loses, where a vector of that type may be what was read: one number in 8,192 of float32 is one
        of float16, too."""
        extra = np.array([0.0 if each is None else each[-1] for each in augmented], np.float32)
        with np.errstate(over="ignore"):
            is_short = extra.astype(np.float16) == extra
        lost = FLOAT16 * (extra**2 if self.version.metric is Metric.EUCLIDEAN else np.abs(extra))
        rounding: np.ndarray = np.where(is_short, lost, 0.0)
        return rounding

    def put(self, value: list[float], into: StoredOffsets) -> None:
        into.vectors[self.version.augmented_vector] = value


def storage_of(version: Version) -> Storage[Any]:
    """The storage that `version` is written in."""
    return VectorStorage(version) if version.storage == "vector" else PayloadStorage(version)


def group_of(payload: Payload | None, key: str) -> Value:
    """The value of `key`, a path such as "shop.tenant", if it is one text, number or truth value."""
    found = value_at(payload, key)
    return found if isinstance(found, (str, int)) else None


def value_at(payload: Payload | None, key: str) -> object:
    """What lies under `key`, a path such as "shop.tenant"; None where there is nothing."""
    found: object = payload
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def stored_offsets(
    vectors: Sequence[GivenVector],
    payloads: Sequence[Payload | None],
    fitted: Sequence[tuple[Version, OffsetModel]],
    held: Collection[int] = (),
) -> list[StoredOffsets]:
    """What the points of `vectors` store. A client gives a vector as a list, an array, or a dict of them by name.

    payloads: of the same points; they say which group a point is in, where a model has groups. held: the rows of those
    that must not be found.

    A vector that is absent, not yet embedded or of another dimension has no offset; whether it may be written is the
    server's to say. One of length 0, which has no cosine, gets the neutral value in the place of the one before.
    """
    kept_up = Manifest(kept=tuple(version for version, _ in fitted))
    found = [StoredOffsets(kept_up.offset_key) for _ in vectors]
    for version, model in fitted:
        storage = storage_of(version)
        rows, matrix, neutral = usable(vectors, version)
        for row in neutral:
            storage.put(storage.neutral(), found[row])
        if rows:
            key = version.group_by
            offsets = model.offsets(matrix, groups=[group_of(payloads[row], key) for row in rows] if key else None)
            if held:
                offsets = np.where([row in held for row in rows], np.float32(floor_of(model)), offsets)
            for row, value in zip(rows, storage.values(matrix, offsets), strict=True):
                storage.put(value, found[row])
    return found


def usable(vectors: Sequence[GivenVector], version: Version) -> tuple[list[int], np.ndarray, list[int]]:
    """The rows of `vectors` that bring one that `version` can judge, these vectors [b, dim], and the rows of those of
    length 0, which have no cosine."""
    rows, dense, neutral = [], [], []
    for row, given in enumerate(vectors):
        vector = given.get(version.vector) if isinstance(given, dict) else None if version.vector else given
        array = _numbers(vector)
        if array is None or array.shape != (version.dim,) or not np.isfinite(array).all():
            continue
        if version.metric is Metric.COSINE and not array.any():
            neutral.append(row)
        else:
            rows.append(row)
            dense.append(array)
    return rows, np.array(dense, np.float32), neutral


def _numbers(vector: GivenVector) -> np.ndarray | None:
    """`vector` as an array, None if it is no dense vector."""
    if not isinstance(vector, (list, tuple, np.ndarray)):
        return None
    try:
        array = np.asarray(vector)
    except ValueError:  # lists of several lengths
        return None
    return array if array.dtype.kind in "fiub" else None


def awaits_embedding(vectors: Sequence[GivenVector], manifest: Manifest) -> bool:
    """Whether a corrected vector among `vectors` is a document that only the server will embed."""
    objects = (models.Document, models.Image, models.InferenceObject)
    return any(
        isinstance(given.get(version.vector) if isinstance(given, dict) else given, objects)
        for given in vectors
        for version in manifest.kept_up()
    )
