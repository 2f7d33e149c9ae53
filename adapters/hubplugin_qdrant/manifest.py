"""The `QdrantManifest`: what is known of a corrected collection.

`hubplugin.corrections` says which versions there are. Of the previous one the model is
left, and the numbers in payloads, as they were when it was replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, InstanceOf

from hubplugin import corrections
from hubplugin.model import OffsetModel, QueryMap

KEY = "hub_offset"
"""The payload key that holds offsets."""

AGREEMENT = 0.99
"""The share of the raw index's recall that a corrected search must reach. The last
hundredth costs as much as the rest, and a tenth of a result in ten is not noticed."""

MANY_CANDIDATES = 40
"""Candidates a result that make searches twice as slow: a second vector is better."""

DEFAULT_OVERSAMPLING = 10.0
"""Candidates for each result, if nothing has been calibrated."""

SMALLEST_PAGE = 10
"""Candidates are fetched for at least this many results: a hub displaces the best of 1
as it does those of 10."""

MOST_PARTS = 2**16
"""Points of a model, which are a few MB each."""

LARGEST = 2**31 - 1
"""More candidates, or a wider search, than any server takes."""

Oversampling: TypeAlias = Annotated[float, Field(gt=0, le=1e6)]

Payload: TypeAlias = dict[str, Any]
"""The payload of a point, as JSON."""


class QdrantVersion(corrections.Version):
    """One fit for one vector of the collection. `vector` is "" for the unnamed one.

    storage: "payload", a key that the search adds to the score, or "vector", an
        augmented vector.
    parts: How many points of the metadata collection hold the model.
    ceiling: The upper bound of the offsets. Under Euclidean distance the augmented
        vector stores sqrt(2 (ceiling - offset)), and larger offsets are clipped.
    oversampling: Candidates for each result.
    exact_oversampling: Candidates for each result of an exact search. None if strict
        mode allows none.
    hnsw_ef: How widely the graph of the augmented vector is searched. None for the
        server's default.
    agreement: The share of the raw index's recall that oversampling or hnsw_ef reaches.
    recall, raw_recall: The recall of the corrected top 10, and of the raw index, on
        calibration queries. None if exact searches are not allowed.
    max_candidates: The limit of a query in strict mode, if there is one.

    A reader finds out the others for itself; they are not written.

    everywhere: True if every point was seen to have its augmented vector.
    codes: True if the store can search codes instead of vectors. Local mode cannot.
    query_map: The map of the model.
    """

    storage: Literal["payload", "vector"] = "payload"
    parts: int = Field(ge=1, le=MOST_PARTS)
    ceiling: float = 0.0
    oversampling: Oversampling = DEFAULT_OVERSAMPLING
    exact_oversampling: Oversampling | None = None
    hnsw_ef: int | None = Field(default=None, ge=1, le=LARGEST)
    agreement: float = Field(default=AGREEMENT, gt=0, le=1)
    recall: float | None = Field(default=None, ge=0, le=1)
    raw_recall: float | None = Field(default=None, ge=0, le=1)
    max_candidates: int | None = Field(default=None, ge=1, le=LARGEST)
    everywhere: bool = Field(default=False, exclude=True)
    codes: bool = Field(default=True, exclude=True)
    query_map: InstanceOf[QueryMap] | None = Field(default=None, exclude=True)

    def with_map(self, model: OffsetModel) -> QdrantVersion:
        """Return this version with the map of its model."""
        return self.replace(query_map=model.query_map)

    @property
    def map(self) -> QueryMap:
        """The map of a `mapped` version whose model was read."""
        assert self.query_map is not None
        return self.query_map

    @property
    def key(self) -> str:
        """The path to a point's offset in its payload."""
        return f"{KEY}.v{self.number}"

    @property
    def field(self) -> str:
        return f"v{self.number}"

    @property
    def augmented_vector(self) -> str:
        """The name of the augmented vector."""
        return f"hub_v{self.number}"

    def where(self) -> str:
        """Say where the offsets lie, and how they are searched."""
        if self.storage == "vector":
            text = f"offsets in the vector {self.augmented_vector!r}"
            if self.hnsw_ef:
                text += f", searched with hnsw_ef {self.hnsw_ef}"
        else:
            text = (
                f"offsets in the payload key {self.key!r}; the server adds them to "
                f"{self.oversampling:.3g} candidates a result"
            )
            if self.oversampling > MANY_CANDIDATES:
                text += ", which is slow; storage='vector' needs none"
        if self.recall is not None:
            text += f"; recall {self.recall:.3f} of the exact corrected top 10"
        return text

    def candidates(self, results: int, exact: bool = False) -> int:
        """Return how many candidates to fetch for `results` corrected results.

        These are as right as the index gives the raw ones, or `exact`.
        """
        oversampling = self.oversampling
        if exact and self.exact_oversampling:
            oversampling = max(oversampling, self.exact_oversampling)
        wanted = int(max(results, SMALLEST_PAGE) * oversampling + 0.5)
        return min(max(wanted, results), self.max_candidates or LARGEST)


class QdrantManifest(corrections.Manifest[QdrantVersion]):
    """All that is known about a collection."""

    @property
    def everything(self) -> tuple[QdrantVersion, ...]:
        """Every version of which something may lie in the points.

        Numbers of the version before stay: `rollback` needs them, and another deletion
        would take every point out of the graph. The next version is written over them.
        """
        left = [v for v in self.previous.values() if v.storage == "payload"]
        return (*super().everything, *left)

    @property
    def offset_key(self) -> str | None:
        """The payload key that holds offsets; None where none lie in payloads."""
        in_payload = any(version.storage == "payload" for version in self.everything)
        return KEY if in_payload else None

    def is_foreign(self, payload: Payload | None) -> bool:
        """Return True if a point holds something under our key that is not ours."""
        payload = payload or {}
        if payload.get(KEY) is None:
            return False
        is_theirs = self.offset_key is not None and not holds_offsets(payload)
        return is_theirs or bool(self.unknown_keys(payload))

    def unknown_keys(self, payload: Payload | None) -> tuple[str, ...]:
        """Return the payload keys of a point that hold offsets of unknown versions.

        These versions are gone, or a client brought offsets along that took the
        collection for another. It is the whole key, unless something else lies there.
        """
        payload = payload or {}
        known = {
            version.field for version in self.everything if version.storage == "payload"
        }
        unknown = our_offsets(payload).keys() - known
        is_all = holds_offsets(payload) and len(unknown) == len(payload[KEY])
        if is_all and (unknown or self.last_number):
            return (KEY,)
        return tuple(f"{KEY}.{field}" for field in sorted(unknown))


def payload_keys(versions: Iterable[QdrantVersion]) -> set[str]:
    """Return the paths to the offsets of `versions` in the payload of a point."""
    return {version.key for version in versions if version.storage == "payload"}


def vectors_of(versions: Iterable[QdrantVersion]) -> set[str]:
    """Return the names of the augmented vectors of `versions`."""
    return {
        version.augmented_vector for version in versions if version.storage == "vector"
    }


def our_offsets(payload: Payload | None) -> dict[str, float]:
    """Return all offsets in the `payload` of a point, {"v3": 0.0123}."""
    under = (payload or {}).get(KEY)
    if not isinstance(under, dict):
        return {}
    return {
        name: value
        for name, value in under.items()
        if re.fullmatch(r"v[1-9]\d*", name) and type(value) in (int, float)
    }


def holds_offsets(payload: Payload) -> bool:
    """Return True if nothing but offsets lies under our key in `payload`."""
    under = payload.get(KEY)
    return isinstance(under, dict) and len(our_offsets(payload)) == len(under)


def metadata_collection(collection: str) -> str:
    """Return the name of the collection with manifest and models of `collection`."""
    return f"{collection}--hub"
