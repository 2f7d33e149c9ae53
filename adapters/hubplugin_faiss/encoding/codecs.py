"""What an upgrade asks for, how extra dimensions carry an offset, and how the codes of a
quantiser carry these.

A code is a row of fields of equal size, lowest bit first. Extra dimensions are a few
more fields at its end, written by a quantiser of the same kind: scalar, product, or
none.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.metric import Metric, normalise
from hubplugin.model import OffsetModel

MODEL_BITS, STATE_BITS = 12, 8
"""How many of the last bits of the query's last extra component name the model, and how
many its quantiser's state."""

PADDING = 1e-20
"""A component that holds no more than these bits: its square is nothing beside any
similarity."""


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
        bits = int(self.query[-1:].astype(np.float32).view(np.uint32)[0])
        return bits & ((1 << MODEL_BITS) - 1) == model_bits(fingerprint)

    def offsets(self, components: np.ndarray) -> np.ndarray:
        """Return the offsets that the extra `components` [n, w] of targets stand for:
        float32 [n]."""
        q = self.query.astype(np.float64)
        t = components.astype(np.float64)
        if self.euclidean:
            return np.asarray((q @ q - ((q - t) ** 2).sum(axis=1)) / 2, np.float32)
        return np.asarray(t @ q - q @ q, np.float32)

    def components_for(
        self,
        offsets: np.ndarray,
        dimensions: Sequence[int] = (0,),
        quantise: Callable[[int, np.ndarray], np.ndarray] | None = None,
    ) -> np.ndarray:
        """Return the extra components of targets with `offsets` [n]: float32 [n, w].

        Each dimension takes what is left of the offset, less the q_i^2 that the later
        ones hold in reserve, as far as its quantiser can express it, and leaves the rest
        to the next one. The neutral offset fills every dimension with its reserve.

        Args:
            offsets: [n].
            dimensions: The dimensions to write to, ascending.
            quantise: Makes of a dimension's number and values [n] what codes hold of
                them; by default they hold all.
        """
        q = self.query.astype(np.float64)
        components = np.zeros((len(offsets), len(q)), np.float32)
        rest = q @ q + (-2 if self.euclidean else 1) * offsets.astype(np.float64)
        for i in dimensions:
            value = rest - q[i + 1 :] @ q[i + 1 :]
            value = (
                q[i] + np.sqrt(np.maximum(value, 0)) if self.euclidean else value / q[i]
            )
            held = value if quantise is None else quantise(i, value)
            components[:, i] = held
            rest -= (held - q[i]) ** 2 if self.euclidean else held * q[i]
        return components


def model_bits(fingerprint: str) -> int:
    """Return what names a model: 0 for none, and for no model 0."""
    bits = zlib.crc32(fingerprint.encode()) % (1 << MODEL_BITS)
    return max(bits, int(fingerprint != ""))


@dataclass(frozen=True)
class UpgradeSpec:
    """What the handlers of one index share when it is upgraded.

    low, high: The range of offsets that must find room; the neutral offset 0 lies in it.
    fingerprint: That of the model, "" where offsets come from no model.
    queries: Queries of the bank [m, d], behind a query map, by which lists are ranked;
        None where offsets come from no model.
    """

    low: float
    high: float
    fingerprint: str
    queries: np.ndarray | None = None

    def first_component(self, euclidean: bool, room: float = 1e30) -> float:
        """Return the query's first extra component, so that no component has to be more
        than `room` times as large as it is."""
        if euclidean:
            return -float(np.sqrt(2 * self.high))
        return max(E, max(-self.low, self.high) / room)

    def cover(self, offsets: np.ndarray) -> UpgradeSpec:
        """Return the same with room for `offsets` [n], too, and for half their range
        more on either side, since targets that are added later may lie beyond."""
        room = float(np.ptp(offsets)) / 2
        return replace(
            self,
            low=min(self.low, float(offsets.min()) - room),
            high=max(self.high, float(offsets.max()) + room),
        )

    def extra_dimensions(
        self,
        query: Sequence[float] | np.ndarray,
        width: int,
        euclidean: bool,
        state: bytes = b"",
    ) -> ExtraDimensions:
        """Return `width` extra dimensions that begin with `query`. The last bits of the
        last one name the model and the `state` of a quantiser.

        So an index and the model beside it are known to belong together, and Faiss
        itself, which compares the transforms, refuses to merge indexes whose codes do
        not mean the same. Where the last component is padding they are next to nothing;
        else it becomes a little longer. Some kernels of Faiss round a query to bf16 (on
        CPUs with AVX512_SPR), so that the components that carry offsets may need all
        their bits.
        """
        padded = np.zeros(width, np.float32)
        padded[: len(query)] = query
        padded[-1] = padded[-1] or PADDING
        size = MODEL_BITS + STATE_BITS
        marks = zlib.crc32(state) % (1 << STATE_BITS) << MODEL_BITS
        marks |= model_bits(self.fingerprint)
        bits = padded[-1:].view(np.uint32)
        bits[:] = (bits >> size << size) + np.uint32((1 << size) + marks)
        return ExtraDimensions(padded, euclidean)


def upgrade_spec(offsets: np.ndarray, model: OffsetModel | None) -> UpgradeSpec:
    """Return a spec with room for `offsets` [n], and for those of the gallery of
    `model`."""
    if model is None:
        return UpgradeSpec(0.0, 0.0, "").cover(offsets)
    queries = bank_queries(model, QUERIES)
    if queries is not None:
        queries = model.queries(queries)
    ends = [offsets.min(), offsets.max()]
    if model.gallery is not None:
        ends += [model.gallery.smallest, model.gallery.largest]
    return UpgradeSpec(0.0, 0.0, model.fingerprint, queries).cover(np.array(ends))


QUERIES, FEWEST = 200, 20
"""How many queries of the bank say what is near to what, and how few are too few. On six
settings lists that are ranked by 100 find as much as by 400, to 0.002, and by 40, to
0.005."""


def bank_queries(model: OffsetModel, count: int) -> np.ndarray | None:
    """Return at most `count` queries of the bank of `model`, evenly drawn, of unit
    length for cosine, before its query map; None if they are too few."""
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
    return np.asarray(rows[places.astype(np.int64)])


E = 1e-3
"""The query's extra component under inner product, wherever the offsets allow it. Scores
are shifted by E^2, which is below rounding, and a stored offset / E keeps every digit in
a float of any size."""


LARGEST = 65504.0
"""The largest number in the 16 bits of an fp16; what is larger becomes infinite there,
and scores become NaN."""


@dataclass(frozen=True)
class Coder:
    """Appends extra dimensions to codes of `head_bits` bits, as `extra_bits` more, and
    removes them again.

    quantiser: Encodes extra components [n, w]; None for floats, which stay as they are.
    offset_components: Which of them carry the offset; the others are padding.
    limits: The smallest and the largest value that a component may have.
    step: The extra components of centroids are multiples of it, 0 for no restriction.
    """

    extra: ExtraDimensions
    quantiser: Any
    offset_components: Sequence[int]
    head_bits: int
    extra_bits: int
    limits: tuple[float, float] = (-np.inf, np.inf)
    step: float = 0.0

    def components_for(
        self, offsets: np.ndarray, bases: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the extra components [n, w] that come closest to `offsets` [n] after
        coding, where codes hold differences from `bases`: the extra components [n, w]
        of centroids, or None."""

        def quantise(i: int, values: np.ndarray) -> np.ndarray:
            about = 0.0 if bases is None else bases[:, i]
            components = np.zeros((len(values), len(self.extra.query)), np.float32)
            components[:, i] = np.clip(values - about, *self.limits)
            if self.quantiser is not None:
                codes = self.quantiser.compute_codes(components)
                components = self.quantiser.decode(codes)
            return np.asarray(components[:, i] + about)

        return self.extra.components_for(offsets, self.offset_components, quantise)

    def centres(self, offsets: np.ndarray) -> np.ndarray:
        """Return extra components [n, w] of centroids whose lists shall rank as if every
        entry had that of `offsets` [n].

        Where levels are close they lie a whole number of steps from the query's, so that
        neutral is a level in every list.
        """
        components = self.extra.components_for(offsets)
        if self.step:
            first = self.extra.query[0]
            steps = np.round((components[:, 0] - first) / self.step)
            components[:, 0] = first + steps * self.step
        components[:, 1:] = self.extra.query[1:]
        return components

    def require_holds(
        self, offsets: np.ndarray, bases: np.ndarray | None, name: str
    ) -> None:
        """Raises StoreError unless codes of the index `name` hold `offsets` [n] to within
        a tenth of their range. Faiss encodes very large components wrongly.

        bases: As in `components_for`.
        """
        held = self.extra.offsets(self.components_for(offsets, bases))
        wrong = np.abs(held - offsets).max(initial=0)
        most = max(np.ptp(offsets) / 10, np.abs(offsets).max() / 1000, 1e-6)
        if wrong > most:
            raise StoreError(
                f"offsets from {offsets.min():.4g} to {offsets.max():.4g} do not fit the "
                f"codes of this {name}; fit the model on vectors as long as those in the "
                "index, or scale these down before they are indexed"
            )

    def join(self, heads: np.ndarray, components: np.ndarray) -> np.ndarray:
        """Return codes `heads` [n, bytes] with the codes of extra `components` [n, w]
        appended: uint8 [n, bytes]."""
        if self.quantiser is None:
            extra = np.ascontiguousarray(components, np.float32).view(np.uint8)
        else:
            extra = self.quantiser.compute_codes(components)
        if self.head_bits % 8 == 0:
            return np.concatenate([heads, extra], axis=1)
        head, tail = _bits(heads, self.head_bits), _bits(extra, self.extra_bits)
        both = np.concatenate([head, tail], axis=1)
        return np.packbits(both, axis=1, bitorder="little")

    def head(self, codes: np.ndarray) -> np.ndarray:
        """Return codes [n, bytes] without their extra dimensions."""
        if self.head_bits % 8 == 0:
            return np.ascontiguousarray(codes[:, : self.head_bits // 8])
        return np.packbits(_bits(codes, self.head_bits), axis=1, bitorder="little")


def _bits(codes: np.ndarray, count: int) -> np.ndarray:
    return np.unpackbits(codes, axis=1, bitorder="little")[:, :count]


class Codec(ABC):
    """One kind of codes: designs extra dimensions for them, and widens the quantiser that
    writes them.

    What the quantiser was trained to are its `tables`, one for each `part` of so many
    components.
    """

    lossy = False
    """Whether codes may change the length of a vector by more than a hundredth."""

    def __init__(self, index: faiss.Index):
        self.index = index
        self.part = int(index.pq.dsub) if hasattr(index, "pq") else 1
        self.euclidean = index.metric_type == faiss.METRIC_L2

    @abstractmethod
    def design(
        self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None
    ) -> Coder:
        """Return the coder of extra dimensions with room for the offsets of a spec.

        Args:
            spec: Says which offsets must find room.
            sample: Some of the offsets [k].
            bases: The offset [k] that the centroid of each of these stands for, where
                codes hold differences from centroids.
        """

    @abstractmethod
    def coder(
        self, d: int, extra: ExtraDimensions, tables: np.ndarray | None = None
    ) -> Coder:
        """Return the coder of extra dimensions.

        Args:
            d: How many components stand before them.
            extra: The extra dimensions.
            tables: Of the quantiser; by default of the one that wrote them into this
                index.
        """

    def tables(self, quantiser: Any = None) -> np.ndarray:
        """Return those of `quantiser`, by default the one of this index: float32
        [parts, numbers]."""
        return np.empty((0, 0), np.float32)

    def train(self, index: faiss.Index, tables: np.ndarray) -> None:  # noqa: B027
        """Give the quantiser of `index` these `tables`."""

    def widen(self, new: faiss.Index, coder: Coder) -> None:
        """Give the widened index `new` the quantiser of this one, extended by that of
        `coder`."""
        self.train(new, np.concatenate([self.tables(), self.tables(coder.quantiser)]))

    def narrow(self, new: faiss.Index, d: int) -> None:
        """Give the index `new` the first `d` components of the quantiser of this one."""
        self.train(new, self.tables()[: d // self.part])


class ScalarCodec(Codec):
    """One number a component, by a scalar quantiser.

    Faiss is many times slower where d is no multiple of 16, so the extra dimensions are
    padded up to the next one. The offset goes into several of them: the first holds it
    as far as it can, the next ones what that one loses.
    """

    FLOATS: ClassVar = {
        faiss.ScalarQuantizer.QT_fp16: 2.0**-10,
        faiss.ScalarQuantizer.QT_bf16: 2.0**-7,
    }
    LEVELS: ClassVar = {
        faiss.ScalarQuantizer.QT_8bit: 255,
        faiss.ScalarQuantizer.QT_6bit: 63,
        faiss.ScalarQuantizer.QT_4bit: 15,
    }

    def __init__(self, index: faiss.Index):
        super().__init__(index)
        self.kind = index.sq.qtype
        self.lossy = self.kind not in self.FLOATS
        if self.lossy and self.kind not in self.LEVELS:
            raise StoreError(
                f"codes of type {self.kind} of faiss.ScalarQuantizer in this "
                f"{type(index).__name__} cannot carry offsets; build it with SQ8, or "
                "leave it as it is and search with "
                "hubplugin_faiss.CorrectedSearch(index, offsets)"
            )
        # Two hold an offset with 12 bits or more, and of 4 bits each it takes three.
        self.used = 3 if self.kind == faiss.ScalarQuantizer.QT_4bit else 2

    def design(
        self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None
    ) -> Coder:
        d = int(self.index.d)
        state = np.array([spec.low, spec.high]).tobytes()
        if bases is not None:
            state += bases.tobytes()
        # At least one of padding, which has the fingerprint bits.
        width = self.used + 1 + -(d + self.used + 1) % 16
        first = spec.first_component(self.euclidean)
        if self.lossy:
            extra = spec.extra_dimensions([first], width, self.euclidean, state)
            return self._levels(extra, spec, bases)
        if self.euclidean:
            longest = np.sqrt(2 * (spec.high - spec.low))
            lost = longest * np.sqrt(2 * self.FLOATS[self.kind])
            query = [first, -lost]
        else:
            query = [spec.first_component(False, room=30_000)] * 2
        query = [_short(q) for q in query]
        return self.coder(d, spec.extra_dimensions(query, width, self.euclidean, state))

    def tables(self, quantiser: faiss.ScalarQuantizer | None = None) -> np.ndarray:
        """Return the smallest value and the range of each component; nothing for
        floats."""
        trained = faiss.vector_to_array((quantiser or self.index.sq).trained)
        return np.asarray(trained.reshape(2, -1).T)

    def train(self, index: faiss.Index, tables: np.ndarray) -> None:
        into(tables.T, index.sq.trained)

    def coder(
        self, d: int, extra: ExtraDimensions, tables: np.ndarray | None = None
    ) -> Coder:
        tables = self.tables()[d:] if tables is None else tables
        width = len(extra.query)
        quantiser = faiss.ScalarQuantizer(width, self.kind)
        into(tables.T, quantiser.trained)
        limits = (-np.inf, np.inf)
        if self.kind == faiss.ScalarQuantizer.QT_fp16:
            limits = (-LARGEST, LARGEST)
        # Ranks of lists cannot be rounded to a fifteenth: at equal nprobe that cost
        # 0.006 of recall, and 0.06 by L2.
        step = 0.0
        if self.lossy and self.used == 2:
            step = float(tables[0, 1]) / self.LEVELS[self.kind]
        bits = quantiser.bits
        return Coder(
            extra, quantiser, range(self.used), bits * d, bits * width, limits, step
        )

    def _levels(
        self, extra: ExtraDimensions, spec: UpgradeSpec, bases: np.ndarray | None
    ) -> Coder:
        """Return a coder whose components have ranges of their own: each spans what the
        one before may lose.

        A level is the middle of its interval. Neutral under inner product, and the
        largest offset under Euclidean, are levels, so that what is added through plain
        Faiss is coded without loss.
        """
        count = self.LEVELS[self.kind]
        spread = np.zeros(1) if bases is None else bases
        q = extra.query.astype(np.float64)
        first = q[0]
        if self.euclidean:
            # Component i holds q_i + x_i, less the x of the centroid in the first.
            about = np.zeros(1)
            if bases is not None:
                about = np.sqrt(np.maximum(first**2 - 2 * spread, 0))
            low = -about.max()
            high = np.sqrt(first**2 - 2 * spec.low) - about.min()
        else:
            low = (spec.low - spread.max()) / first
            high = (spec.high - spread.min()) / first
        ranges = np.zeros((len(q), 2))
        for i in range(self.used):
            step = max((high - low) / (count - 2), 1e-12)
            below = np.ceil(-low / step - 1e-6)
            middle = q[i] if bases is None else 0.0
            ranges[i] = middle - (below + 0.5) * step, count * step
            if i + 1 == self.used:
                break
            if self.euclidean:
                lost = np.sqrt((high - low) * step + step**2)
                q[i + 1] = -lost
                low, high = 0.0, np.sqrt(2) * lost
            else:
                q[i + 1] = first
                low, high = np.array([-0.5, 0.5]) * step * q[i] / first
        extra = replace(extra, query=q.astype(np.float32))
        return self.coder(self.index.d, extra, ranges)


def into(array: np.ndarray, vector: Any) -> None:
    """Copy `array` row by row into a `vector` of floats of Faiss."""
    faiss.copy_array_to_vector(np.ascontiguousarray(array, np.float32).ravel(), vector)


def _short(value: float) -> float:
    """Return the number next to `value`, not nearer to 0, that 7 bits hold, so that bf16
    and fp16 have it exactly."""
    mantissa, exponent = np.frexp(abs(value))
    held = np.ceil(mantissa * 128) / 128
    return float(np.copysign(np.ldexp(held, exponent), value))


class ProductCodec(Codec):
    """One more sub-quantiser, whose codebook is trained on the offsets. With less than
    256 levels there are two: the second holds what the first loses."""

    lossy = True

    def design(
        self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None
    ) -> Coder:
        pq = self.index.pq
        width = pq.dsub if pq.nbits >= 8 else 2 * pq.dsub
        state = sample.tobytes()
        if bases is not None:
            state += bases.tobytes()
        query = np.zeros(width)
        query[0] = spec.first_component(self.euclidean)
        extra = spec.extra_dimensions(query, width, self.euclidean, state)
        alone = ExtraDimensions(extra.query[:1], self.euclidean)
        about = np.zeros(1) if bases is None else alone.components_for(bases)[:, 0]
        values = alone.components_for(sample)[:, 0] - about
        ends = alone.components_for(np.array([spec.low, spec.high]))[:, 0]
        room = ends.min() - about.max(), ends.max() - about.min()
        codebooks = np.zeros((width // pq.dsub, pq.ksub, pq.dsub), np.float32)
        first = levels(values, pq.ksub, extra.query[0] - about, room)
        codebooks[0, :, 0] = first
        if len(codebooks) == 1:
            return self.coder(self.index.d, extra, codebooks)
        lost = sample - alone.offsets((first[_nearest(first, values)] + about)[:, None])
        if len(np.unique(values)) < pq.ksub:
            # What comes later lies between the levels.
            held = np.sort(alone.offsets(first[:, None] + about.mean()))
            apart = np.diff(held).max()
            lost = np.concatenate([lost, np.linspace(-0.5, 0.5, pq.ksub) * apart])
        query[pq.dsub] = query[0]
        if self.euclidean:
            query[pq.dsub] = -np.sqrt(2 * np.abs(lost).max())
        extra = spec.extra_dimensions(query, width, self.euclidean, state)
        second = extra.query[pq.dsub : pq.dsub + 1]
        alone = ExtraDimensions(second, self.euclidean)
        base = 0.0 if bases is None else second
        values = alone.components_for(lost)[:, 0] - base
        codebooks[1, :, 0] = levels(values, pq.ksub, second - base, (0.0, 0.0))
        return self.coder(self.index.d, extra, codebooks)

    def tables(self, quantiser: faiss.ProductQuantizer | None = None) -> np.ndarray:
        pq = quantiser or self.index.pq
        return np.asarray(faiss.vector_to_array(pq.centroids).reshape(pq.M, -1))

    def train(self, index: faiss.Index, tables: np.ndarray) -> None:
        into(tables, index.pq.centroids)
        if self.index.pq.sdc_table.size():
            index.pq.compute_sdc_table()

    def coder(
        self, d: int, extra: ExtraDimensions, tables: np.ndarray | None = None
    ) -> Coder:
        parts = d // self.part
        tables = self.tables()[parts:] if tables is None else tables
        width, nbits = len(extra.query), self.index.pq.nbits
        quantiser = faiss.ProductQuantizer(width, len(tables), nbits)
        into(tables, quantiser.centroids)
        used = range(0, width, self.part)
        return Coder(extra, quantiser, used, parts * nbits, len(tables) * nbits)


def levels(
    values: np.ndarray, count: int, plain: np.ndarray, room: tuple[float, float]
) -> np.ndarray:
    """Sorted numbers that quantise values with a small squared error: Lloyd's iteration on a line.

    Args:
        values: [n].
        count: how many levels.
        plain: the values that plain Faiss adds; coded without loss where they take no more than an eighth of the
            levels, or where there are levels to spare.
        room: the range of values that may come later. Spare levels are spread over it; of 32 levels or more a sixteenth
            is spread over the part of it that lies beyond all values.

    Returns:
        float32 [count].
    """
    distinct = np.unique(values)
    fixed = np.unique(plain.astype(np.float32))
    both = np.unique(np.concatenate([distinct, fixed]))
    if len(both) <= count:
        spread = np.linspace(*room, count - len(both))
        return np.sort(np.concatenate([both, spread])).astype(np.float32)
    if len(fixed) > count // 8:
        values = np.concatenate([values, fixed])
        fixed = fixed[:0]
    # Starting evenly over the range, not over the mass, keeps the rare extremes, which
    # are the hubs.
    first, last = distinct[[0, -1]]
    spare = count // 32
    below = np.linspace(room[0], first, spare, endpoint=False)
    above = np.linspace(room[1], last, spare, endpoint=False)
    within = np.linspace(first, last, count - len(fixed) - 2 * spare)
    centres = np.concatenate([fixed, below, within, above])
    for _ in range(20):
        order = np.argsort(centres, kind="stable")
        nearest = order[_nearest(centres[order], values)]
        members = np.bincount(nearest, minlength=count)
        means = np.bincount(nearest, values, minlength=count) / np.maximum(members, 1)
        members[: len(fixed)] = 0
        centres = np.where(members > 0, means, centres)
    return np.sort(centres).astype(np.float32)


def _nearest(levels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Which of the sorted `levels` [k] is nearest to each of `values` [n]."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values)


class FloatCodec(Codec):
    """float32: one extra dimension, exact."""

    def design(
        self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None
    ) -> Coder:
        query = [spec.first_component(self.euclidean)]
        return self.coder(self.index.d, spec.extra_dimensions(query, 1, self.euclidean))

    def coder(
        self, d: int, extra: ExtraDimensions, tables: np.ndarray | None = None
    ) -> Coder:
        width = len(extra.query)
        return Coder(extra, None, range(width), 32 * d, 32 * width)
