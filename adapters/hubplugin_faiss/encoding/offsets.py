"""How extra dimensions carry an offset, and what an upgrade asks of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hubplugin.metric import Metric, normalise
from hubplugin.model import OffsetModel

MODEL_BITS = 12
"""Bits at the end of the query's last extra component that name the model."""

STATE_BITS = 8
"""Bits before these that name the state of the quantiser."""

PADDING = 1e-20
"""A component that holds these bits alone: its square changes no similarity."""

E = 1e-3
"""The query's extra component under inner product, wherever the offsets allow it.

Scores are shifted by E^2, which is below rounding, and a stored offset / E keeps every
digit in a float of any size.
"""

QUERIES = 200
"""Queries of the bank by which lists are ranked. On six settings 100 find as much as
400, to 0.002, and 40 as much to 0.005."""

FEWEST = 20
"""Fewer queries than these say nothing of what is near."""

RANK = 10
"""The rank of the target by whose similarity `nearness_of` goes."""


@dataclass(frozen=True)
class ExtraDimensions:
    """The constant extra components of every query, which define how a target's extra
    components encode its offset.

    With q the extra components [w] of a query and t those of a target, they add to the
    similarity, up to a constant,

        inner product    offset(t) = q.t - q.q
        Euclidean        offset(t) = (q.q - |q - t|^2) / 2

    A vector that is added through plain Faiss gets q as well. Under inner product that
    is the neutral offset 0, whatever q is. Under Euclidean nothing can lie nearer to a
    query, so it is the largest offset.
    """

    query: np.ndarray
    euclidean: bool

    def has_fingerprint(self, fingerprint: str) -> bool:
        """Return True if the last bits of the query name the model `fingerprint`."""
        bits = self.query[-1:].astype(np.float32).view(np.uint32)
        return int(bits[0]) % (1 << MODEL_BITS) == model_bits(fingerprint)

    def offsets(self, components: np.ndarray) -> np.ndarray:
        """Return the offsets [n] that the extra `components` [n, w] of targets
        encode."""
        q = self.query.astype(np.float64)
        t = components.astype(np.float64)
        if self.euclidean:
            offsets = (q @ q - ((q - t) ** 2).sum(axis=1)) / 2
        else:
            offsets = t @ q - q @ q
        return offsets.astype(np.float32)

    def components_for(
        self,
        offsets: np.ndarray,
        dimensions: Sequence[int] = (0,),
        quantise: Callable[[int, np.ndarray], np.ndarray] | None = None,
    ) -> np.ndarray:
        """Return the extra components of targets with `offsets` [n]: float32 [n, w].

        Each dimension takes what is left of the offset, less the q_i^2 that the later
        ones hold in reserve, as far as its quantiser can express it, and leaves the
        rest to the next one. The neutral offset fills every dimension with its reserve.

        Args:
            offsets: [n].
            dimensions: The dimensions to write to, ascending.
            quantise: Returns what codes hold of values [n] in a dimension; by default
                they hold all.
        """
        q = self.query.astype(np.float64)
        components = np.zeros((len(offsets), len(q)), np.float32)
        if self.euclidean:
            rest = q @ q - 2 * offsets.astype(np.float64)
        else:
            rest = q @ q + offsets.astype(np.float64)
        for i in dimensions:
            value = rest - q[i + 1 :] @ q[i + 1 :]
            if self.euclidean:
                value = q[i] + np.sqrt(np.maximum(value, 0))
            else:
                value = value / q[i]
            if quantise is not None:
                value = quantise(i, value)
            components[:, i] = value
            if self.euclidean:
                rest -= (value - q[i]) ** 2
            else:
                rest -= value * q[i]
        return components


def model_bits(fingerprint: str) -> int:
    """Return the bits that name a model: 0 for none, and for no model 0."""
    if not fingerprint:
        return 0
    return max(zlib.crc32(fingerprint.encode()) % (1 << MODEL_BITS), 1)


@dataclass(frozen=True)
class UpgradeSpec:
    """The room that an upgrade needs, which all parts of an index share.

    low, high: The range of offsets to make room for; the neutral offset 0 lies in it.
    euclidean: True for an index by L2.
    fingerprint: That of the model, "" where offsets come from no model.
    queries: Queries of the bank [m, d], behind a query map, by which lists are ranked;
        None where offsets come from no model.
    """

    low: float
    high: float
    euclidean: bool
    fingerprint: str = ""
    queries: np.ndarray | None = None

    def cover(self, offsets: np.ndarray) -> UpgradeSpec:
        """Return the same with room for `offsets` [n], too.

        Half of their range is added on either side, for targets that are added later.
        """
        room = float(np.ptp(offsets)) / 2
        return replace(
            self,
            low=min(self.low, float(offsets.min()) - room),
            high=max(self.high, float(offsets.max()) + room),
        )

    def first_component(self, room: float = 1e30) -> float:
        """Return the query's first extra component.

        Under inner product no component of a target has to be larger than `room`.
        """
        if self.euclidean:
            return -float(np.sqrt(2 * self.high))
        return max(E, max(-self.low, self.high) / room)

    def extra_dimensions(
        self, query: Sequence[float] | np.ndarray, width: int, state: bytes = b""
    ) -> ExtraDimensions:
        """Return `width` extra dimensions that begin with `query`.

        The last bits of the last one name the model and the `state` of a quantiser. By
        them an index and the model beside it are known to belong together, and Faiss,
        which compares the transforms, refuses to merge indexes whose codes do not mean
        the same. The last component is best padding: elsewhere these bits make it a
        little longer, and Faiss rounds queries to bf16 on CPUs with AVX512_SPR, so that
        components that carry offsets may need all their bits.
        """
        padded = np.zeros(width, np.float32)
        padded[: len(query)] = query
        padded[-1] = padded[-1] or PADDING
        state_bits = zlib.crc32(state) % (1 << STATE_BITS)
        marks = (state_bits << MODEL_BITS) + model_bits(self.fingerprint)
        size = MODEL_BITS + STATE_BITS
        bits = padded[-1:].view(np.uint32)
        bits[:] = (bits >> size << size) + np.uint32((1 << size) + marks)
        return ExtraDimensions(padded, self.euclidean)


def upgrade_spec(
    offsets: np.ndarray, euclidean: bool, model: OffsetModel | None = None
) -> UpgradeSpec:
    """Return a spec with room for `offsets` [n], and for those of the gallery of
    `model`."""
    spec = UpgradeSpec(0.0, 0.0, euclidean)
    if model is None:
        return spec.cover(offsets)
    queries = bank_queries(model, QUERIES)
    if queries is not None:
        queries = model.queries(queries)
    spec = replace(spec, fingerprint=model.fingerprint, queries=queries)
    ends = [offsets.min(), offsets.max()]
    if model.gallery is not None:
        ends += [model.gallery.smallest, model.gallery.largest]
    return spec.cover(np.array(ends))


def bank_queries(model: OffsetModel, count: int) -> np.ndarray | None:
    """Return at most `count` queries of the bank of `model`, evenly drawn, before its
    query map.

    They are of unit length for cosine. None if the bank has fewer than `FEWEST`.
    """
    bank = model.terms[0].bank
    if len(bank) < FEWEST:
        return None
    queries = evenly(bank, count)
    if model.metric is Metric.COSINE:
        queries = normalise(queries, "query bank")
    return queries


def evenly(rows: np.ndarray, count: int) -> np.ndarray:
    """Return at most `count` of `rows` [n, ...], evenly drawn."""
    places = np.linspace(0, len(rows) - 1, min(len(rows), count))
    return rows[places.astype(np.int64)]


def nearness_of(queries: np.ndarray, vectors: np.ndarray, count: int) -> float:
    """Return the mean similarity of queries and the direction of their tenth nearest
    target.

    Of two targets in one direction the longer one scores higher by its length times
    that. Embedding models differ in it: it was 0.25 between captions and images, and
    0.85 across languages.

    Args:
        queries: [m, d].
        vectors: A sample of the targets [n, d].
        count: How many targets there are.
    """
    rank = min(max(round(RANK * len(vectors) / count), 1), len(vectors))
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-30)
    cosines = queries @ (vectors / lengths[:, None]).T
    return float(np.partition(cosines, -rank, axis=1)[:, -rank].mean())
