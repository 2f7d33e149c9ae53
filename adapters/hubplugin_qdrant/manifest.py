"""The `QdrantManifest`, which describes the correction of a collection.

`hubplugin.corrections` says which versions there are. For the previous version, the
model and any offsets in payloads are kept as they were when it was replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, InstanceOf

from hubplugin import corrections
from hubplugin.model import QueryMap

KEY = "hub_offset"
"""The payload key that holds offsets."""

MANY_CANDIDATES = 40
"""The number of candidates per result that doubles the time of a search. Beyond this
number, an augmented vector is better."""

DEFAULT_OVERSAMPLING = 10.0
"""The number of candidates per result before calibration."""

SMALLEST_PAGE = 10
"""The smallest number of results for which candidates are fetched. A hub displaces the
best result of a page of 1 just as it does on a page of 10."""

MOST_PARTS = 2**16
"""The largest number of points that hold one model; each holds a few MB."""

LARGEST = 2**31 - 1
"""An upper bound of candidates and hnsw_ef, larger than any server accepts."""

LARGEST_OFFSET = 3e38
"""An upper bound of offsets, which are float32."""

Oversampling: TypeAlias = Annotated[float, Field(gt=0, le=1e6)]

Payload: TypeAlias = dict[str, Any]
"""The payload of a point, as JSON."""


class QdrantVersion(corrections.Version):
    """One fit for one vector of the collection; `vector` is "" for the unnamed vector.

    storage: "payload" for a payload key that the search adds to the score, or "vector"
        for an augmented vector.
    parts: The number of points in the metadata collection that hold the model.
    ceiling: The upper bound of the offsets. Under Euclidean distance the augmented
        vector stores sqrt(2 (ceiling - offset)), and larger offsets are clipped.
    oversampling: The number of candidates per result.
    exact_oversampling: The number of candidates per result in an exact search. None if
        strict mode forbids exact searches.
    hnsw_ef: The hnsw_ef of searches by the augmented vector. None for the server's
        default.
    recall, raw_recall: The recall of the corrected top 10, and of the raw index, on
        calibration queries. None if exact searches are not allowed.
    max_candidates: The limit of a query in strict mode; None without a limit.

    The remaining fields are not stored. Each reader sets them.

    everywhere: True if every point is known to have an augmented vector.
    searches_codes: True if the store can search quantised codes. Local mode cannot.
    query_map: The query map of the model.
    """

    storage: Literal["payload", "vector"] = "payload"
    parts: int = Field(ge=1, le=MOST_PARTS)
    ceiling: float = Field(default=0.0, ge=0, le=LARGEST_OFFSET)
    oversampling: Oversampling = DEFAULT_OVERSAMPLING
    exact_oversampling: Oversampling | None = None
    hnsw_ef: int | None = Field(default=None, ge=1, le=LARGEST)
    recall: float | None = Field(default=None, ge=0, le=1)
    raw_recall: float | None = Field(default=None, ge=0, le=1)
    max_candidates: int | None = Field(default=None, ge=1, le=LARGEST)
    everywhere: bool = Field(default=False, exclude=True)
    searches_codes: bool = Field(default=True, exclude=True)
    query_map: InstanceOf[QueryMap] | None = Field(default=None, exclude=True)

    @property
    def map(self) -> QueryMap:
        """The query map; the version must be `mapped` and its model read."""
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
        """Describe where the offsets are stored, and how they are searched."""
        if self.storage == "vector":
            text = f"offsets in the vector {self.augmented_vector!r}"
            if self.hnsw_ef:
                text += f", searched with hnsw_ef {self.hnsw_ef}"
        else:
            text = (
                f"offsets in the payload key {self.key!r}; the server adds them to "
                f"{self.oversampling:.3g} candidates per result"
            )
            if self.oversampling > MANY_CANDIDATES:
                text += ", which is slow; storage='vector' needs none"
        if self.recall is not None:
            text += f"; recall {self.recall:.3f} of the exact corrected top 10"
        return text

    def candidates(self, results: int, exact: bool = False) -> int:
        """Return how many candidates to fetch for `results` corrected results.

        The results are as accurate as raw results of the index. With `exact`, they are
        exact.
        """
        oversampling = self.oversampling
        if exact and self.exact_oversampling:
            oversampling = max(oversampling, self.exact_oversampling)
        count = int(max(results, SMALLEST_PAGE) * oversampling + 0.5)
        return min(max(count, results), self.max_candidates or LARGEST)


class QdrantManifest(corrections.Manifest[QdrantVersion]):
    """All correction versions of one collection."""

    @property
    def stored_versions(self) -> tuple[QdrantVersion, ...]:
        """Every version whose offsets may still be stored in points.

        The payload offsets of the previous version are kept: `rollback` needs them, and
        deleting them would take every point out of the graph once more. The next
        version overwrites them.
        """
        in_payload = [v for v in self.previous.values() if v.storage == "payload"]
        return (*super().stored_versions, *in_payload)

    @property
    def offset_key(self) -> str | None:
        """The payload key that holds offsets; None if no payload holds any."""
        in_payload = any(
            version.storage == "payload" for version in self.stored_versions
        )
        return KEY if in_payload else None

    def is_foreign(self, payload: Payload | None) -> bool:
        """Return True if a point holds foreign data under our payload key."""
        payload = payload or {}
        if payload.get(KEY) is None:
            return False
        # If no version uses the key, the user may have other data there.
        is_theirs = self.offset_key is not None and not holds_offsets(payload)
        return is_theirs or bool(self.unknown_keys(payload))

    def unknown_keys(self, payload: Payload | None) -> tuple[str, ...]:
        """Return the payload keys of a point that hold offsets of unknown versions.

        Such a version was removed, or a client wrote the point with the offsets of
        another collection. If all offsets are unknown, the result is our whole key.
        """
        payload = payload or {}
        known = {
            version.field
            for version in self.stored_versions
            if version.storage == "payload"
        }
        unknown = our_offsets(payload).keys() - known
        all_unknown = holds_offsets(payload) and len(unknown) == len(payload[KEY])
        # An empty dict is only ours if there was ever a version.
        if all_unknown and (unknown or self.last_number):
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
    held = (payload or {}).get(KEY)
    if not isinstance(held, dict):
        return {}
    return {
        name: value
        for name, value in held.items()
        if re.fullmatch(r"v[1-9]\d*", name) and type(value) in (int, float)
    }


def holds_offsets(payload: Payload) -> bool:
    """Return True if `payload` has only offsets under our key."""
    held = payload.get(KEY)
    return isinstance(held, dict) and len(our_offsets(payload)) == len(held)


def metadata_collection(collection: str) -> str:
    """Return the name of the metadata collection of `collection`."""
    return f"{collection}--hub"
