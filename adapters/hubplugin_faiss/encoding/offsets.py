"""Extra dimensions, which encode offsets, and the requirements of an upgrade."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hubplugin.measures.hubness import pick_evenly
from hubplugin.metric import Metric, normalise
from hubplugin.model import OffsetModel

MODEL_BITS = 12
"""The number of last bits in the query's last extra component that mark the model."""

STATE_BITS = 8
"""The number of bits before `MODEL_BITS` that mark the state of the quantiser."""

PADDING = 1e-20
"""The value of a component that only holds marks: it changes no similarity."""

E = 1e-3
"""The query's extra component under inner product, unless offsets are too large.

Scores are shifted by E^2, which is less than their rounding errors. A target stores
offset / E without loss of precision, since floats have the same number of digits at any
size.
"""

QUERIES = 200
"""The number of bank queries used to rank lists.

In six settings, recall with 100 queries was within 0.002 of that with 400, and with 40
queries within 0.005.
"""

FEWEST = 20
"""The smallest bank used to rank lists: fewer queries do not show which targets are
near them."""

NO_COMPONENTS = np.empty((1, 0))

READ = 1 << 13
"""The number of entries compared with the queries at once."""

RANK = 10
"""The rank of the target whose similarity `nearness_of` averages."""


@dataclass(frozen=True)
class ExtraDimensions:
    """The extra components q of queries, which define how targets encode offsets.

    All queries have the same extra components q [w]. A target with the extra components
    t [w] gains the following similarity, up to a constant:

        inner product    offset(t) = q.t - q.q
        Euclidean        offset(t) = (q.q - |q - t|^2) / 2

    Plain Faiss also appends q to vectors that it adds. Under inner product, these
    vectors get the neutral offset 0. Under Euclidean distance they get the largest
    offset, since nothing is nearer to q than q itself.

    query: The extra components q, [w].
    euclidean: True for Euclidean distance, False for inner product.
    """

    query: np.ndarray
    euclidean: bool

    def has_fingerprint(self, fingerprint: str) -> bool:
        """Return True if the last bits of the query mark the model `fingerprint`."""
        bits = self.query[-1:].astype(np.float32).view(np.uint32)
        return int(bits[0]) % (1 << MODEL_BITS) == model_bits(fingerprint)

    def offsets(self, components: np.ndarray) -> np.ndarray:
        """Return the offsets [n] that the `components` [n, w] of targets encode."""
        q = self.query.astype(np.float64)
        t = components.astype(np.float64)
        if self.euclidean:
            offsets = (q @ q - ((q - t) ** 2).sum(axis=1)) / 2
        else:
            offsets = t @ q - q @ q
        return offsets.astype(np.float32)

    def component(
        self, offsets: np.ndarray, earlier: np.ndarray = NO_COMPONENTS
    ) -> np.ndarray:
        """Return the next extra component of targets with `offsets` [n]: float32 [n].

        The component makes up for the errors of the earlier components. Each later
        component j is assumed to add q_j^2 to q.t, or to |q - t|^2.

        earlier: The components before this one, [n, i]. By default, there are none.
        """
        q = self.query.astype(np.float64)
        t = earlier.astype(np.float64)
        i = t.shape[1]
        # The part of q.q that does not belong to later components.
        neutral = (q[: i + 1] ** 2).sum()
        offsets = offsets.astype(np.float64)
        if self.euclidean:
            square = neutral - 2 * offsets - ((q[:i] - t) ** 2).sum(axis=1)
            component = q[i] + np.sqrt(np.maximum(square, 0))
        else:
            component = (neutral + offsets - t @ q[:i]) / q[i]
        return component.astype(np.float32)


def model_bits(fingerprint: str) -> int:
    """Return the bits that mark the model `fingerprint`.

    The bits are 0 for "", and never 0 for a model.
    """
    if not fingerprint:
        return 0
    return max(zlib.crc32(fingerprint.encode()) % (1 << MODEL_BITS), 1)


@dataclass(frozen=True)
class UpgradeSpec:
    """The requirements of an upgrade, which all parts of an index share.

    low, high: The range of offsets that codes must hold, including the neutral offset
        0.
    euclidean: True for an index with L2.
    fingerprint: The fingerprint of the model. "" if offsets do not come from a model.
    queries: Queries from the bank to rank lists with, [m, d], mapped if there is a
        query map. None if offsets do not come from a model or the bank is too small.
    """

    low: float
    high: float
    euclidean: bool
    fingerprint: str = ""
    queries: np.ndarray | None = None

    def cover(self, offsets: np.ndarray) -> UpgradeSpec:
        """Return this spec with a range that also covers `offsets` [n].

        Half of their range is added on either side, for targets that are added later.
        """
        room = float(np.ptp(offsets)) / 2
        return replace(
            self,
            low=min(self.low, float(offsets.min()) - room),
            high=max(self.high, float(offsets.max()) + room),
        )

    def first_component(self, room: float = 1e30) -> float:
        """Return the query's first extra component, q.

        Under Euclidean distance, a target can encode offsets up to q^2 / 2. Since q is
        negative, its component is 0 for the neutral offset. Under inner product, a
        target stores about offset / q. There, q is at least `E`, and so large that no
        target's component exceeds `room`.
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

        The last bits of the last component mark the model and the `state` of a
        quantiser. These bits show which model belongs to an index. They also keep Faiss
        from merging indexes with different quantisers, since it compares transforms.

        The last component should be padding. In any other component, the bits need the
        full precision, which is lost if queries are rounded: on CPUs with AVX512_SPR,
        Faiss rounds them to bf16.
        """
        padded = np.zeros(width, np.float32)
        padded[: len(query)] = query
        padded[-1] = padded[-1] or PADDING
        content = b"".join(array.tobytes() for array in state if array is not None)
        state_bits = zlib.crc32(content) % (1 << STATE_BITS)
        marks = (state_bits << MODEL_BITS) + model_bits(self.fingerprint)
        size = MODEL_BITS + STATE_BITS
        bits = padded[-1:].view(np.uint32)
        bits[:] = (bits >> size << size) + np.uint32((1 << size) + marks)
        return ExtraDimensions(padded, self.euclidean)


def upgrade_spec(
    offsets: np.ndarray, euclidean: bool, model: OffsetModel | None = None
) -> UpgradeSpec:
    """Return a spec whose range covers `offsets` [n].

    With a `model`, it also has the model's fingerprint and bank queries, and covers the
    offsets of the model's gallery.
    """
    fingerprint = ""
    queries = None
    ends = [offsets.min(), offsets.max()]
    if model is not None:
        fingerprint = model.fingerprint
        sample = bank_queries(model, QUERIES)
        if sample is not None:
            queries = model.queries(sample)  # with the query map, if there is one
        if model.gallery is not None:
            ends += [model.gallery.smallest, model.gallery.largest]
    spec = UpgradeSpec(0.0, 0.0, euclidean, fingerprint, queries)
    return spec.cover(np.array(ends))


def bank_queries(model: OffsetModel, count: int) -> np.ndarray | None:
    """Return at most `count` queries from the bank of `model`, picked evenly.

    The queries are not mapped, but normalised for cosine. Return None if the bank has
    fewer than `FEWEST` queries.
    """
    bank = model.terms[0].bank
    if len(bank) < FEWEST:
        return None
    queries = pick_evenly(bank, count)
    if model.metric is Metric.COSINE:
        queries = normalise(queries, "query bank")
    return queries


def nearness_of(queries: np.ndarray, vectors: np.ndarray, count: int) -> float:
    """Return the mean similarity of queries to the direction of their tenth target.

    If two near targets have the same direction, the longer one scores higher by about
    the nearness times the difference of the lengths. The nearness depends on the
    embedding model: it was 0.25 between captions and images, and 0.85 across languages.

    Args:
        queries: The queries, [m, d].
        vectors: A sample of the targets, [n, d].
        count: The number of all targets.
    """
    # The tenth of `count` targets has about this rank in the sample.
    rank = min(max(round(RANK * len(vectors) / count), 1), len(vectors))
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-30)
    cosines = queries @ (vectors / lengths[:, None]).T
    return float(np.partition(cosines, -rank, axis=1)[:, -rank].mean())


def similarities(
    queries: np.ndarray, vectors: np.ndarray, euclidean: bool
) -> np.ndarray:
    """Return the similarities of `queries` [m, d] to `vectors` [b, d]: float32 [m, b].

    Euclidean similarities omit the term -|u|^2 / 2, which is the same for all vectors.
    """
    products = queries @ vectors.T
    if euclidean:
        products -= (vectors**2).sum(axis=1) / 2
    return products
