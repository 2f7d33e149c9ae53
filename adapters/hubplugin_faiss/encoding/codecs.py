"""What an upgrade asks for, how extra dimensions carry an offset, and how the codes of a quantiser carry these.

A code is a row of fields of equal size, lowest bit first. Extra dimensions are a few more fields at its end, written
by a quantiser of the same kind: scalar, product, or none.
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
"""How many of the last bits of the query's last extra component name the model, and how many its quantiser's state."""

PADDING = 1e-20
"""A component that holds no more than these bits: its square is nothing beside any similarity."""


@dataclass(frozen=True)
class ExtraDimensions:
    """The constant extra components of every query. They define how a target's extra components encode its offset.

    With q the extra components [w] of a query and t those of a target, they add to the similarity, up to a constant,

        inner product    offset(t) = q.t - q.q
        Euclidean        offset(t) = (q.q - |q - t|^2) / 2

    A vector that is added through plain Faiss gets q as well. Under inner product that is the neutral
    offset 0, whatever q is. Under Euclidean nothing can lie nearer to a query, so it is the largest offset.
    """

    query: np.ndarray
    euclidean: bool

    @property
    def width(self) -> int:
        return len(self.query)

    def with_fingerprint(self, fingerprint: str, state: bytes) -> ExtraDimensions:
        """The same with fingerprint bits in the query's last component: `fingerprint` names a model, `state` a
        quantiser.

        So an index and the model beside it are known to belong together, and Faiss itself, which compares the
        transforms, refuses to merge indexes whose codes do not mean the same.

        Where the last component is padding it is next to nothing; else it becomes a little longer. Some kernels of
        Faiss round a query to bf16 (on CPUs with AVX512_SPR), so that the components that carry offsets may need all
        their bits.
        """
        query = self.query.astype(np.float32)
        query[-1] = query[-1] or PADDING
        bits, size = query[-1:].view(np.uint32), MODEL_BITS + STATE_BITS
        fingerprint_bits = (
            _model_bits(fingerprint)
            | (zlib.crc32(state) % (1 << STATE_BITS)) << MODEL_BITS
        )
        bits[:] = (bits >> size << size) + np.uint32((1 << size) + fingerprint_bits)
        return replace(self, query=query)

    def has_fingerprint(self, fingerprint: str) -> bool:
        """Whether the fingerprint bits are those of `fingerprint`."""
        bits = int(self.query[-1:].astype(np.float32).view(np.uint32)[0])
        return bits & ((1 << MODEL_BITS) - 1) == _model_bits(fingerprint)

    def offsets(self, components: np.ndarray) -> np.ndarray:
        """The offsets that the extra `components` [n, w] of targets stand for: float32 [n]."""
        q, t = self.query.astype(np.float64), components.astype(np.float64)
        values = (
            (q @ q - ((q - t) ** 2).sum(axis=1)) / 2
            if self.euclidean
            else t @ q - q @ q
        )
        return values.astype(np.float32)

    def components_for(
        self,
        offsets: np.ndarray,
        dimensions: Sequence[int] = (0,),
        quantise: Callable[[int, np.ndarray], np.ndarray] | None = None,
    ) -> np.ndarray:
        """The extra components of targets.

        Each dimension takes what is left of the offset, less the q_i^2 that the later ones hold in reserve, as far as
        its quantiser can express it, and leaves the rest to the next one. The neutral offset fills every dimension with
        its reserve.

        Args:
            offsets: [n].
            dimensions: the dimensions to write to, ascending.
            quantise: makes of a dimension's number and values [n] what codes hold of them; by default they hold all.

        Returns:
            float32 [n, w].
        """
        q = self.query.astype(np.float64)
        components = np.zeros((len(offsets), self.width), np.float32)
        rest = (
            q @ q - 2 * offsets.astype(np.float64)
            if self.euclidean
            else offsets.astype(np.float64) + q @ q
        )
        for i in dimensions:
            share = rest - q[i + 1 :] @ q[i + 1 :]
            exact = (
                q[i] + np.sqrt(np.maximum(share, 0)) if self.euclidean else share / q[i]
            )
            components[:, i] = exact if quantise is None else quantise(i, exact)
            rest -= (
                (components[:, i] - q[i]) ** 2
                if self.euclidean
                else components[:, i] * q[i]
            )
        return components


def _model_bits(fingerprint: str) -> int:
    """What names a model: 0 for none, and for no model 0."""
    return max(
        zlib.crc32(fingerprint.encode()) % (1 << MODEL_BITS), int(fingerprint != "")
    )


@dataclass(frozen=True)
class UpgradeSpec:
    """What the handlers of one index share when it is upgraded.

    low, high: the range of offsets that must find room; the neutral offset 0 lies in it.
    fingerprint: that of the model, "" where offsets come from no model.
    queries: of the bank [m, d], behind a query map, by which lists are ranked; None where offsets come from no model.
    """

    low: float
    high: float
    fingerprint: str
    queries: np.ndarray | None = None

    @property
    def size(self) -> float:
        return max(-self.low, self.high)

    def cover(self, offsets: np.ndarray) -> UpgradeSpec:
        """The same with room for `offsets` [n], too, and for half their range more on either side."""
        low, high = float(offsets.min()), float(offsets.max())
        room = (high - low) / 2
        return replace(
            self, low=min(self.low, low - room), high=max(self.high, high + room)
        )

    @property
    def longest(self) -> float:
        """The largest sqrt(2 (high - offset)), which is what Euclidean extra dimensions hold."""
        return float(np.sqrt(2 * (self.high - self.low)))


def upgrade_spec(offsets: np.ndarray, model: OffsetModel | None) -> UpgradeSpec:
    """A spec with room for `offsets` [n], for those of the gallery of `model`, and for half their range more on either
    side, since targets that are added later may lie beyond."""
    low, high = float(offsets.min()), float(offsets.max())
    if model is not None and model.gallery is not None:
        low, high = min(low, model.gallery.smallest), max(high, model.gallery.largest)
    queries = None if model is None else bank_queries(model, QUERIES)
    if model is not None and queries is not None:
        queries = model.queries(queries)
    return UpgradeSpec(
        0.0, 0.0, "" if model is None else model.fingerprint, queries
    ).cover(np.array([low, high]))


QUERIES, FEWEST = 200, 20
"""How many queries of the bank say what is near to what, and how few are too few. On six settings lists that are ranked
by 100 find as much as by 400, to 0.002, and by 40, to 0.005."""


def bank_queries(model: OffsetModel, count: int) -> np.ndarray | None:
    """At most `count` queries of the bank of `model`, evenly drawn, of unit length for cosine, before its query map;
    None if they are too few."""
    bank = model.terms[0].bank
    if len(bank) < FEWEST:
        return None
    queries = evenly(bank, count)
    return (
        normalise(queries, "query bank") if model.metric is Metric.COSINE else queries
    )


def evenly(rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of `rows` [n, ...], evenly drawn."""
    return np.asarray(
        rows[np.linspace(0, len(rows) - 1, min(len(rows), count)).astype(np.int64)]
    )


E = 1e-3
"""The query's extra component under inner product, wherever the offsets allow it. Scores are shifted by E^2, which is
below rounding, and a stored offset / E keeps every digit in a float of any size."""


HALF = faiss.ScalarQuantizer.QT_fp16


LARGEST = 65504.0
"""The largest number in the 16 bits of an fp16; what is larger becomes infinite there, and scores become NaN."""


@dataclass(frozen=True)
class Coder:
    """Appends extra dimensions to codes of `head_bits` bits, as `extra_bits` more, and removes them again.

    quantiser: encodes extra components [n, w]; None for floats, which stay as they are.
    offset_components: which of them carry the offset; the others are padding.
    limits: the smallest and the largest value that a component may have.
    step: the extra components of centroids are multiples of it, 0 for no such restriction.
    """

    extra: ExtraDimensions
    quantiser: Any
    offset_components: Sequence[int]
    head_bits: int
    extra_bits: int
    limits: tuple[float, float] = (-np.inf, np.inf)
    step: float = 0.0

    @property
    def code_size(self) -> int:
        return -(-(self.head_bits + self.extra_bits) // 8)

    def components_for(
        self, offsets: np.ndarray, bases: np.ndarray | None = None
    ) -> np.ndarray:
        """The extra components [n, w] that come closest to `offsets` [n] after coding, where codes hold differences
        from `bases`: the extra components [n, w] of centroids, or None."""
        about = (
            np.zeros((len(offsets), self.extra.width), np.float32)
            if bases is None
            else bases
        )

        def quantise(i: int, values: np.ndarray) -> np.ndarray:
            components = np.zeros((len(values), self.extra.width), np.float32)
            components[:, i] = np.clip(values - about[:, i], *self.limits)
            if self.quantiser is not None:
                components = self.quantiser.decode(
                    self.quantiser.compute_codes(components)
                )
            return np.asarray(components[:, i] + about[:, i])

        return self.extra.components_for(offsets, self.offset_components, quantise)

    def centres(self, offsets: np.ndarray) -> np.ndarray:
        """Extra components [n, w] of centroids whose lists shall rank as if every entry had that of `offsets` [n].

        Where levels are close they lie a whole number of steps from the query's, so that neutral is a level in every
        list.
        """
        components = self.extra.components_for(offsets)
        if self.step:
            components[:, 0] = (
                self.extra.query[0]
                + np.round((components[:, 0] - self.extra.query[0]) / self.step)
                * self.step
            )
        components[:, 1:] = self.extra.query[1:]
        return components

    def require_holds(
        self, offsets: np.ndarray, bases: np.ndarray | None, name: str
    ) -> None:
        """Raises StoreError unless codes hold offsets to within a tenth of their range. Faiss encodes very large
        components wrongly.

        Args:
            offsets: [n].
            bases: as in `components_for`.
            name: the type of the index, for the error.
        """
        wrong = np.abs(
            self.extra.offsets(self.components_for(offsets, bases)) - offsets
        ).max(initial=0)
        if wrong > max(np.ptp(offsets) / 10, np.abs(offsets).max() / 1000, 1e-6):
            raise StoreError(
                f"offsets from {offsets.min():.4g} to {offsets.max():.4g} do not fit the codes of this {name}; fit the "
                "model on vectors as long as those in the index, or scale these down before they are indexed"
            )

    def join(self, heads: np.ndarray, components: np.ndarray) -> np.ndarray:
        """Codes `heads` [n, bytes] with the codes of extra `components` [n, w] appended: uint8 [n, code_size]."""
        if (
            isinstance(self.quantiser, faiss.ScalarQuantizer)
            and self.quantiser.qtype == HALF
        ):
            require_finite(heads.view(np.uint16))
        if self.quantiser is None:
            return np.concatenate(
                [heads, np.ascontiguousarray(components, np.float32).view(np.uint8)],
                axis=1,
            )
        extra_codes = self.quantiser.compute_codes(components)
        if self.head_bits % 8 == 0:
            return np.concatenate([heads, extra_codes], axis=1)
        return np.packbits(
            np.concatenate(
                [
                    _bits(heads)[:, : self.head_bits],
                    _bits(extra_codes)[:, : self.extra_bits],
                ],
                axis=1,
            ),
            axis=1,
            bitorder="little",
        )

    def head(self, codes: np.ndarray) -> np.ndarray:
        """Codes [n, code_size] without their extra dimensions."""
        if self.head_bits % 8 == 0:
            return np.ascontiguousarray(codes[:, : self.head_bits // 8])
        return np.packbits(_bits(codes)[:, : self.head_bits], axis=1, bitorder="little")


class Codec(ABC):
    """One kind of codes: designs extra dimensions for them, and widens the quantiser that writes them.

    What the quantiser was trained to are its `tables`, one for each `part` of so many components.
    """

    lossy = False
    """Whether codes may change the length of a vector by more than a hundredth."""

    part = 1

    def __init__(self, index: faiss.Index):
        self.index, self.euclidean = index, index.metric_type == faiss.METRIC_L2

    @abstractmethod
    def design(
        self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None
    ) -> Coder:
        """Extra dimensions with room for the offsets of a spec, and their coder.

        Args:
            spec: says which offsets must find room.
            sample: some of the offsets [k].
            bases: the offset [k] that the centroid of each of these stands for, where codes hold differences from
                centroids.
        """

    @abstractmethod
    def coder(
        self, d: int, extra: ExtraDimensions, tables: np.ndarray | None = None
    ) -> Coder:
        """The coder of extra dimensions.

        Args:
            d: how many components stand before them.
            extra: the extra dimensions.
            tables: of the quantiser; by default of the one that wrote them into this index.
        """

    def tables(self, quantiser: Any = None) -> np.ndarray:
        """Those of `quantiser`, by default the one of this index: float32 [parts, numbers]."""
        return np.empty((0, 0), np.float32)

    def train(self, index: faiss.Index, tables: np.ndarray) -> None:  # noqa: B027
        """Gives the quantiser of `index` these `tables`."""

    def widen(self, new: faiss.Index, coder: Coder) -> None:
        """Gives the widened index `new` the quantiser of this one, extended by that of `coder`."""
        self.train(new, np.concatenate([self.tables(), self.tables(coder.quantiser)]))

    def narrow(self, new: faiss.Index, d: int) -> None:
        """Gives the index `new` the first `d` components of the quantiser of this one."""
        self.train(new, self.tables()[: d // self.part])

    def require_fits(self, vectors: np.ndarray) -> None:  # noqa: B027
        """Raises StoreError if codes cannot hold components as large as those of `vectors` [n, d]."""

    def _extra(
        self, spec: UpgradeSpec, query: list[float], width: int, state: bytes
    ) -> ExtraDimensions:
        padded = np.zeros(width, np.float32)
        padded[: len(query)] = query
        return ExtraDimensions(padded, self.euclidean).with_fingerprint(
            spec.fingerprint, state
        )


def require_finite(halves: np.ndarray) -> None:
    """Raises StoreError if one of the fp16 numbers whose bits are `halves` is infinite."""
    if ((halves & 0x7FFF) == 0x7C00).any():
        raise StoreError(
            f"components beyond {LARGEST:,.0f} are infinite in codes of 16 bits; scale the vectors down before they "
            "are indexed, or give them a type with room for them, such as Flat"
        )


def _bits(codes: np.ndarray) -> np.ndarray:
    return np.unpackbits(codes, axis=1, bitorder="little")


class ScalarCodec(Codec):
    """One number a component, by a scalar quantiser.

    Faiss is many times slower where d is no multiple of 16, so the extra dimensions are padded up to the next one. The
    offset goes into several of them: the first holds it as far as it can, the next ones what that one loses.
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
        self.kind, self.lossy = index.sq.qtype, index.sq.qtype not in self.FLOATS
        if self.kind not in {**self.FLOATS, **self.LEVELS}:
            names = [
                name
                for name in dir(faiss.ScalarQuantizer)
                if name.startswith("QT_") and name != "QT_count"
            ]
            name = next(
                (
                    name
                    for name in names
                    if getattr(faiss.ScalarQuantizer, name) == self.kind
                ),
                str(self.kind),
            )
            raise StoreError(
                f"codes of type {name} in this {type(index).__name__} cannot carry offsets; build it with SQ8, or "
                "leave it as it is and search with hubplugin_faiss.CorrectedSearch(index, offsets)"
            )

    def design(
        self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None
    ) -> Coder:
        state = np.array([spec.low, spec.high]).tobytes() + (
            b"" if bases is None else bases.tobytes()
        )
        if self.kind in self.LEVELS:
            return self._levels(spec, state, bases)
        if (
            self.kind == HALF
            and (spec.longest if self.euclidean else spec.size / 30_000) > LARGEST / 2.1
        ):
            raise StoreError(
                f"offsets from {spec.low:.4g} to {spec.high:.4g} do not fit codes of 16 bits; scale the vectors down "
                "before they are indexed, and fit the model on those"
            )
        if self.euclidean:
            query = [
                -np.sqrt(2 * spec.high),
                -spec.longest * np.sqrt(2 * self.FLOATS[self.kind]),
            ]
        else:
            query = [max(E, spec.size / 30_000)] * 2
        extra = self._extra(spec, [_short(q) for q in query], self._width(2), state)
        return self.coder(self.index.d, extra)

    def require_fits(self, vectors: np.ndarray) -> None:
        if self.kind == HALF:
            with np.errstate(over="ignore"):
                require_finite(
                    np.ascontiguousarray(vectors, np.float16).view(np.uint16)
                )

    def tables(self, quantiser: faiss.ScalarQuantizer | None = None) -> np.ndarray:
        """The smallest value and the range of each component; nothing for floats."""
        return np.asarray(
            faiss.vector_to_array((quantiser or self.index.sq).trained).reshape(2, -1).T
        )

    def train(self, index: faiss.Index, tables: np.ndarray) -> None:
        faiss.copy_array_to_vector(
            np.ascontiguousarray(tables.T).ravel(), index.sq.trained
        )

    def coder(
        self, d: int, extra: ExtraDimensions, tables: np.ndarray | None = None
    ) -> Coder:
        tables = self.tables()[d:] if tables is None else tables
        quantiser = faiss.ScalarQuantizer(extra.width, self.kind)
        faiss.copy_array_to_vector(
            np.ascontiguousarray(tables.T, np.float32).ravel(), quantiser.trained
        )
        limits = (-LARGEST, LARGEST) if self.kind == HALF else (-np.inf, np.inf)
        # Ranks of lists cannot be rounded to a fifteenth: at equal nprobe that cost 0.006 of recall, and 0.06 by L2.
        fine = self.kind in self.LEVELS and self.kind != faiss.ScalarQuantizer.QT_4bit
        step = float(tables[0, 1]) / self.LEVELS[self.kind] if fine else 0.0
        return Coder(
            extra,
            quantiser,
            range(self._used),
            quantiser.bits * d,
            quantiser.bits * extra.width,
            limits,
            step,
        )

    @property
    def _used(self) -> int:
        """How many dimensions hold the offset: two hold it with 12 bits or more, and of 4 bits each it takes three."""
        return 3 if self.kind == faiss.ScalarQuantizer.QT_4bit else 2

    def _width(self, used: int) -> int:
        """The number of extra dimensions, with at least one of padding, which has the fingerprint bits."""
        return used + 1 + -(int(self.index.d) + used + 1) % 16

    def _levels(
        self, spec: UpgradeSpec, state: bytes, bases: np.ndarray | None
    ) -> Coder:
        """A coder whose components have ranges of their own: each spans what the one before may lose.

        A level is the middle of its interval. Neutral under inner product, and the largest offset under Euclidean,
        are levels, so that what is added through plain Faiss is coded without loss.
        """
        used, count = self._used, self.LEVELS[self.kind]
        spread = np.zeros(1) if bases is None else bases
        first = -np.sqrt(2 * spec.high) if self.euclidean else max(E, spec.size * 1e-30)
        extra = self._extra(spec, [first], self._width(used), state)
        q = extra.query.astype(np.float64)
        if (
            self.euclidean
        ):  # component i holds q_i + x_i, less the x of the centroid in the first
            about = (
                np.zeros(1)
                if bases is None
                else np.sqrt(np.maximum(q[0] ** 2 - 2 * spread, 0))
            )
            low, high = -about.max(), np.sqrt(q[0] ** 2 - 2 * spec.low) - about.min()
        else:
            low, high = (
                (spec.low - spread.max()) / q[0],
                (spec.high - spread.min()) / q[0],
            )
        ranges = np.zeros((extra.width, 2))
        for i in range(used):
            step = max((high - low) / (count - 2), 1e-12)
            below = np.ceil(-low / step - 1e-6)
            ranges[i] = (
                (q[i] if bases is None else 0.0) - (below + 0.5) * step,
                count * step,
            )
            if i + 1 == used:
                break
            if self.euclidean:
                lost = np.sqrt((high - low) * step + step**2)
                q[i + 1], low, high = -lost, 0.0, np.sqrt(2) * lost
            else:
                q[i + 1] = first
                low, high = np.array([-0.5, 0.5]) * step * q[i] / q[i + 1]
        return self.coder(
            self.index.d, replace(extra, query=q.astype(np.float32)), ranges
        )


def _short(value: float) -> float:
    """The number next to `value`, not nearer to 0, that 7 bits hold, so that bf16 and fp16 have it exactly."""
    mantissa, exponent = np.frexp(value)
    return float(
        np.ldexp(np.copysign(np.ceil(abs(mantissa) * 128) / 128, mantissa), exponent)
    )


class ProductCodec(Codec):
    """One more sub-quantiser, whose codebook is trained on the offsets. With less than 256 levels there are two: the
    second holds what the first loses."""

    lossy = True

    def __init__(self, index: faiss.Index):
        super().__init__(index)
        self.part = int(index.pq.dsub)

    def design(
        self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None
    ) -> Coder:
        pq = self.index.pq
        used = 1 if pq.nbits >= 8 else 2
        state = sample.tobytes() + (b"" if bases is None else bases.tobytes())
        first = -np.sqrt(2 * spec.high) if self.euclidean else max(E, spec.size * 1e-30)
        extra = self._extra(spec, [first], used * pq.dsub, state)
        alone = ExtraDimensions(extra.query[:1], self.euclidean)
        about = np.zeros(1) if bases is None else alone.components_for(bases)[:, 0]
        values = alone.components_for(sample)[:, 0] - about
        low, high = np.sort(alone.components_for(np.array([spec.low, spec.high]))[:, 0])
        codebooks = np.zeros((used, pq.ksub, pq.dsub), np.float32)
        codebooks[0, :, 0] = levels(
            values,
            pq.ksub,
            extra.query[0] - about,
            (low - about.max(), high - about.min()),
        )
        if used == 2:
            coded = codebooks[0, _nearest(codebooks[0, :, 0], values), 0] + about
            lost = sample - alone.offsets(coded[:, None])
            if (
                len(np.unique(values)) < pq.ksub
            ):  # what comes later lies between the levels
                apart = np.diff(
                    np.sort(alone.offsets(codebooks[0, :, :1] + about.mean()))
                )
                lost = np.concatenate(
                    [lost, np.linspace(-0.5, 0.5, pq.ksub) * apart.max()]
                )
            second = -np.sqrt(2 * np.abs(lost).max()) if self.euclidean else first
            query = np.zeros(extra.width)
            query[0], query[pq.dsub] = extra.query[0], second
            extra = self._extra(spec, query.tolist(), extra.width, state)
            second = extra.query[pq.dsub]
            values = ExtraDimensions(np.array([second]), self.euclidean).components_for(
                lost
            )[:, 0]
            base = 0.0 if bases is None else second
            codebooks[1, :, 0] = levels(
                values - base, pq.ksub, np.array([second - base]), (0.0, 0.0)
            )
        return self.coder(self.index.d, extra, codebooks)

    def tables(self, quantiser: faiss.ProductQuantizer | None = None) -> np.ndarray:
        pq = quantiser or self.index.pq
        return np.asarray(faiss.vector_to_array(pq.centroids).reshape(pq.M, -1))

    def train(self, index: faiss.Index, tables: np.ndarray) -> None:
        faiss.copy_array_to_vector(
            np.ascontiguousarray(tables).ravel(), index.pq.centroids
        )
        if self.index.pq.sdc_table.size():
            index.pq.compute_sdc_table()

    def coder(
        self, d: int, extra: ExtraDimensions, tables: np.ndarray | None = None
    ) -> Coder:
        tables, pq = (
            self.tables()[d // self.part :] if tables is None else tables,
            self.index.pq,
        )
        quantiser = faiss.ProductQuantizer(extra.width, len(tables), pq.nbits)
        faiss.copy_array_to_vector(
            np.ascontiguousarray(tables).ravel(), quantiser.centroids
        )
        return Coder(
            extra,
            quantiser,
            range(0, extra.width, self.part),
            d // self.part * pq.nbits,
            len(tables) * pq.nbits,
        )


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
    distinct, fixed = np.unique(values), np.unique(plain.astype(np.float32))
    both = np.unique(np.concatenate([distinct, fixed]))
    if len(both) <= count:
        return np.sort(
            np.concatenate([both, np.linspace(*room, count - len(both))])
        ).astype(np.float32)
    if len(fixed) > count // 8:
        values, fixed = np.concatenate([values, fixed]), fixed[:0]
    # Starting evenly over the range, not over the mass, keeps the rare extremes, which are the hubs.
    (first, last), spare = distinct[[0, -1]], count // 32
    below, above = (
        np.linspace(room[0], first, spare, endpoint=False),
        np.linspace(room[1], last, spare, endpoint=False),
    )
    centres = np.concatenate(
        [fixed, below, np.linspace(first, last, count - len(fixed) - 2 * spare), above]
    )
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
        query = -np.sqrt(2 * spec.high) if self.euclidean else max(E, spec.size * 1e-30)
        return self.coder(self.index.d, self._extra(spec, [query], 1, b""))

    def coder(
        self, d: int, extra: ExtraDimensions, tables: np.ndarray | None = None
    ) -> Coder:
        return Coder(extra, None, range(extra.width), 32 * d, 32 * extra.width)


def codec_of(index: faiss.Index) -> Codec:
    """The codec for the codes of the base index `index`; raises StoreError for a scalar quantiser without room."""
    if hasattr(index, "sq"):
        return ScalarCodec(index)
    return ProductCodec(index) if hasattr(index, "pq") else FloatCodec(index)
