"""What is known of a corrected collection: `hubplugin.corrections` says which versions there are, and these are they.

By vector name, `active` has the version that searches use, and whose offsets writes keep up to date; `previous` the one
before it: its model, and the numbers in payloads, as they were then. `writing` is half-written. `retired` has those
whose vectors and indexes are to be deleted.
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

AUGMENTED_VECTOR = re.compile(r"hub_v\d+")
"""What the augmented vectors are called. A vector of another name is not ours; one of these may yet be a user's."""

AGREEMENT = 0.99
"""The share of the raw index's recall that a corrected search must reach: the last hundredth costs as much as the
rest, and a tenth of a result in ten is not noticed."""

MANY_CANDIDATES = 40
"""Candidates for each result from which on an augmented vector is named in their place: searches take twice as long."""

DEFAULT_OVERSAMPLING = 10.0
"""Candidates for each result asked for, where nothing has been calibrated."""

SMALLEST_PAGE = 10
"""Candidates are fetched for at least this many results: a hub displaces the best of 1 as it does those of 10."""

MOST_PARTS = 2**16
"""Points of a model, which are a few MB each."""

LARGEST = 2**31 - 1
"""More candidates, or a wider search, than any server takes."""

Oversampling: TypeAlias = Annotated[float, Field(gt=0, le=1e6)]

Payload: TypeAlias = dict[str, Any]
"""The payload of a point, as JSON."""


class QdrantVersion(corrections.Version):
    """One fit for one vector of the collection. `vector` is "" for the unnamed one.

    storage: "payload", a key that the search adds to the score, or "vector", an augmented vector.
    parts: how many points of the metadata collection hold the model.
    oversampling: candidates for each result; hnsw_ef: how widely the graph of the augmented vector is searched, None
    for the server's default; as little as gives `agreement` times the recall of the raw index. exact_oversampling:
    candidates for each result of an exact search, None where none may be made. recall, raw_recall:
    that of the corrected top 10, and of the raw index of its own, on calibration queries; None where exact search is
    not allowed. max_candidates: what the collection's strict mode allows, if it limits them.
    ceiling: upper bound of the offsets; under Euclidean distance the augmented vector stores
    sqrt(2 (ceiling - offset)), and larger offsets are clipped.
    everywhere: whether every point was seen to have its augmented vector. codes: whether the store can search codes
    instead of vectors, which local mode cannot. query_map: that of the model. A reader finds out these three for
    itself; they are not written.
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

    def with_map(self, model: OffsetModel | QdrantVersion) -> QdrantVersion:
        """This version with the map of its model, or of a version that has it from there."""
        return self.replace(query_map=model.query_map)

    @property
    def map(self) -> QueryMap:
        """The map of a version that is `mapped`, and whose model was read."""
        assert self.query_map is not None
        return self.query_map

    @property
    def key(self) -> str:
        """Where a point's payload holds its offset."""
        return f"{KEY}.v{self.number}"

    @property
    def field(self) -> str:
        return f"v{self.number}"

    @property
    def augmented_vector(self) -> str:
        """The name of the augmented vector, where the offset is stored in one."""
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
        """How many candidates are fetched so that the first `results`, and never fewer, are the corrected ones: as
        nearly as the index gives the raw ones, or `exact`."""
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
        """Tell whether a point holds something under our key that is not ours."""
        under = (payload or {}).get(KEY)
        is_theirs = not holds_offsets(under) and self.offset_key is not None
        return under is not None and (is_theirs or bool(self.unknown_keys(payload)))

    def unknown_keys(self, payload: Payload | None) -> tuple[str, ...]:
        """Return the payload keys of a point that hold offsets of unknown versions.

        These versions are gone, or a client brought offsets along that took the
        collection for another. It is the whole key, unless something else lies there.
        """
        under: Any = (payload or {}).get(KEY)
        known = {
            version.field for version in self.everything if version.storage == "payload"
        }
        unknown = our_fields(under) - known
        is_all = holds_offsets(under) and unknown == under.keys()
        if is_all and (unknown or self.last_number):
            return (KEY,)
        return tuple(f"{KEY}.{field}" for field in sorted(unknown))


def payload_keys(versions: Iterable[QdrantVersion]) -> tuple[str, ...]:
    """Where a point's payload holds offsets of `versions`."""
    return tuple(version.key for version in versions if version.storage == "payload")


def vectors_of(versions: Iterable[QdrantVersion]) -> tuple[str, ...]:
    """The names of the augmented vectors that hold offsets of `versions`."""
    return tuple(
        version.augmented_vector for version in versions if version.storage == "vector"
    )


def our_fields(under: object) -> set[str]:
    """The fields, "v3", of what lies `under` our key in a point that are as any correction writes them."""
    if not isinstance(under, dict):
        return set()
    return {
        name
        for name, value in under.items()
        if re.fullmatch(r"v[1-9]\d*", name) and type(value) in (int, float)
    }


def holds_offsets(under: Any) -> bool:
    """Whether nothing but offsets lies `under` our key in a point."""
    return isinstance(under, dict) and our_fields(under) == under.keys()


def metadata_collection(collection: str) -> str:
    """The name of the collection that holds the manifest and the models of `collection`."""
    return f"{collection}--hub"
