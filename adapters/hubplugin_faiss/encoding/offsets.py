"""How extra dimensions carry an offset, and what an upgrade asks of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hubplugin.measures.hubness import pick_evenly
from hubplugin.metric import Metric, normalise
from hubplugin.model import OffsetModel

MODEL_BITS = 12
"""Bits at the end of the query's last extra component that name the model."""

STATE_BITS = 8
"""Bits before `MODEL_BITS` that name the state of the quantiser."""

PADDING = 1e-20
"""A component that only holds these bits: its square changes no similarity."""

E = 1e-3
"""The query's extra component under inner product, unless offsets are too large.

Scores are shifted by E^2, which is below rounding. A target holds offset / E, and
keeps every digit of it: a float has as many at any size.
"""

QUERIES = 200
"""Queries of the bank by which lists are ranked. On six settings 100 find as much as
400, to 0.002, and 40 as much to 0.005."""

FEWEST = 20
"""The smallest bank by which lists are ranked: fewer queries do not tell which targets
are near."""

RANK = 10
"""The rank of the target whose similarity `nearness_of` takes."""


@dataclass(frozen=True)
class ExtraDimensions:
    """The constant extra components of every query, which define how a target's extra
    components encode its offset.

    With q the extra components [w] of a query and t those of a target, they add to the
    similarity, up to a constant,

        inner product    offset(t) = q.t - q.q
        Euclidean        offset(t) = (q.q - |q - t|^2) / 2

    Plain Faiss gives q to the vectors that it adds, too. Under inner product that is
    the neutral offset 0, whatever q is. Under Euclidean it is the largest offset, since
    nothing lies nearer to q than q itself.
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

    def exact(self, offsets: np.ndarray) -> np.ndarray:
        """Return the first extra components of targets with `offsets` [n]: float32 [n].

        All other components take their reserves.
        """
        return self.component(0, self.needed(offsets)).astype(np.float32)

    def needed(self, offsets: np.ndarray) -> np.ndarray:
        """Return what all components of a target must sum up to: float64 [n].

        A component counts as its product with that of the query or, under Euclidean, as
        the square of their difference.
        """
        q = self.query.astype(np.float64)
        if self.euclidean:
            return q @ q - 2 * offsets.astype(np.float64)
        return q @ q + offsets.astype(np.float64)

    def component(self, i: int, needed: np.ndarray) -> np.ndarray:
        """Return the component `i` of targets: float64 [n].

        With the reserves q_j^2 of all components behind, it sums up to `needed` [n].
        """
        q = self.query.astype(np.float64)
        rest = needed - q[i + 1 :] @ q[i + 1 :]
        if self.euclidean:
            return q[i] + np.sqrt(np.maximum(rest, 0))
        return rest / q[i]


def model_bits(fingerprint: str) -> int:
    """Return the bits that name the model `fingerprint`: 0 for "", and never 0 for a
    model."""
    if not fingerprint:
        return 0
    return max(zlib.crc32(fingerprint.encode()) % (1 << MODEL_BITS), 1)


@dataclass(frozen=True)
class UpgradeSpec:
    """The room that an upgrade needs, which all parts of an index share.

    low, high: The range of offsets to make room for; the neutral offset 0 lies in it.
    euclidean: True for an index by L2.
    fingerprint: The fingerprint of the model; "" if offsets come from no model.
    queries: Queries of the bank [m, d], mapped if there is a query map, by which lists
        are ranked. None if offsets come from no model, or its bank is too small.
    """

    low: float
    high: float
    euclidean: bool
    fingerprint: str = ""
    queries: np.ndarray | None = None

    def cover(self, offsets: np.ndarray) -> UpgradeSpec:
        """Return this spec with room for `offsets` [n], too.

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

        Under inner product it is so large that no component of a target exceeds `room`.
        """
        if self.euclidean:
            return -float(np.sqrt(2 * self.high))
        return max(E, max(-self.low, self.high) / room)

    def extra_dimensions(
        self,
        query: Sequence[float] | np.ndarray,
        width: int,
        *state: np.ndarray | None,
    ) -> ExtraDimensions:
        """Return `width` extra dimensions that begin with `query`.

        The last bits of the last component name the model and the `state` of a
        quantiser. They show which model belongs to an index. They also keep Faiss,
        which compares transforms, from merging indexes whose codes differ in meaning.

        The last component had better be padding. The bits make any other one a little
        longer, which may need all of its bits: on CPUs with AVX512_SPR Faiss rounds
        queries to bf16.
        """
        padded = np.zeros(width, np.float32)
        padded[: len(query)] = query
        padded[-1] = padded[-1] or PADDING
        named = b"".join(array.tobytes() for array in state if array is not None)
        state_bits = zlib.crc32(named) % (1 << STATE_BITS)
        marks = (state_bits << MODEL_BITS) + model_bits(self.fingerprint)
        size = MODEL_BITS + STATE_BITS
        bits = padded[-1:].view(np.uint32)
        bits[:] = (bits >> size << size) + np.uint32((1 << size) + marks)
        return ExtraDimensions(padded, self.euclidean)


def upgrade_spec(
    offsets: np.ndarray, euclidean: bool, model: OffsetModel | None = None
) -> UpgradeSpec:
    """Return a spec with room for `offsets` [n].

    Of a `model` it also has the fingerprint, queries of its bank, and room for the
    offsets of its gallery.
    """
    fingerprint = ""
    queries = None
    ends = [offsets.min(), offsets.max()]
    if model is not None:
        fingerprint = model.fingerprint
        queries = bank_queries(model, QUERIES)
        if queries is not None:
            queries = model.queries(queries)
        if model.gallery is not None:
            ends += [model.gallery.smallest, model.gallery.largest]
    spec = UpgradeSpec(0.0, 0.0, euclidean, fingerprint, queries)
    return spec.cover(np.array(ends))


def bank_queries(model: OffsetModel, count: int) -> np.ndarray | None:
    """Return at most `count` queries of the bank of `model`, evenly drawn.

    They are not mapped yet, and of unit length for cosine. None if the bank has fewer
    than `FEWEST` queries.
    """
    bank = model.terms[0].bank
    if len(bank) < FEWEST:
        return None
    queries = pick_evenly(bank, count)
    if model.metric is Metric.COSINE:
        queries = normalise(queries, "query bank")
    return queries


def nearness_of(queries: np.ndarray, vectors: np.ndarray, count: int) -> float:
    """Return the nearness: the mean similarity of queries and the direction of their
    tenth nearest target.

    Of two targets in one direction the longer one scores higher, by the difference of
    their lengths times the nearness. Embedding models differ: the nearness was 0.25
    between captions and images, and 0.85 across languages.

    Args:
        queries: The queries [m, d].
        vectors: A sample of the targets [n, d].
        count: How many targets there are.
    """
    # The tenth of `count` targets has about this rank in the sample.
    rank = min(max(round(RANK * len(vectors) / count), 1), len(vectors))
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-30)
    cosines = queries @ (vectors / lengths[:, None]).T
    return float(np.partition(cosines, -rank, axis=1)[:, -rank].mean())
