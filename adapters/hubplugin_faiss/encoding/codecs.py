"""Codecs for vectors, and coders that append offsets to their codes.

A code is a sequence of fields of equal size, lowest bit first. Extra dimensions are
additional fields at its end, written by a quantiser of the same kind: scalar, product,
or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.offsets import ExtraDimensions, UpgradeSpec

SQ = faiss.ScalarQuantizer

LARGEST = 65504.0
"""The largest number in fp16. Larger ones become infinite, and their scores NaN."""


@dataclass(frozen=True)
class OffsetCoder:
    """Appends extra dimensions to codes, and removes them again.

    extra: The extra dimensions.
    codec: The codec of the extra dimensions alone.
    head_bits: The number of bits in a code without extra dimensions.
    """

    extra: ExtraDimensions
    codec: Codec
    head_bits: int

    def components_for(self, offsets: np.ndarray, bases: np.ndarray) -> np.ndarray:
        """Return the extra components [n, w] that come closest to `offsets` [n] after
        coding.

        Each dimension in turn takes what remains of the offset (see
        `ExtraDimensions.component`), and leaves the rounding error of its code to the
        next dimension.

        Args:
            offsets: The offsets, [n].
            bases: The extra components of the centroids from which codes store
                differences, [n, w], or [1, w] for all.
        """
        components = np.zeros((len(offsets), len(self.extra.query)), np.float32)
        for i in self.codec.offset_dimensions:
            component = self.extra.component(offsets, components[:, :i])
            # The codec encodes all extra dimensions at once: set the others to zero.
            padded = np.zeros_like(components)
            padded[:, i] = np.clip(component - bases[:, i], *self.codec.limits)
            decoded = self.codec.decode(self.codec.encode(padded))[:, i]
            components[:, i] = decoded + bases[:, i]
        return components

    def centres(self, offsets: np.ndarray) -> np.ndarray:
        """Return the extra components [n, w] that rank centroids by `offsets` [n].

        If the codec has a `step`, the components differ from the query's by a multiple
        of the step. So codes in every list hold the neutral offset without loss.
        """
        components = np.tile(self.extra.query, (len(offsets), 1))
        components[:, 0] = self.extra.component(offsets)
        step = self.codec.step
        if step:
            first = self.extra.query[0]
            steps = np.round((components[:, 0] - first) / step)
            components[:, 0] = first + steps * step
        return components

    def require_holds(
        self, offsets: np.ndarray, bases: np.ndarray, index: faiss.Index
    ) -> None:
        """Raise StoreError unless codes for `index` can hold `offsets` [n].

        The tolerated error is the largest of a tenth of the offsets' range, a
        thousandth of the largest offset (for nearly equal offsets), and 1e-6. Errors
        are larger if Faiss encodes a component wrongly because it is too large.

        bases: As in `components_for`.
        """
        decoded = self.extra.offsets(self.components_for(offsets, bases))
        error = np.abs(decoded - offsets).max(initial=0)
        tolerance = max(np.ptp(offsets) / 10, np.abs(offsets).max() / 1000, 1e-6)
        if error > tolerance:
            raise StoreError(
                f"offsets from {offsets.min():.4g} to {offsets.max():.4g} do not fit "
                f"the codes of this {type(index).__name__}; fit the model on vectors of "
                "the same norm as those in the index, or scale the vectors down before "
                "you index them"
            )

    def join(self, heads: np.ndarray, components: np.ndarray) -> np.ndarray:
        """Append the codes of extra `components` [n, w] to `heads` [n, bytes].

        The result is uint8 [n, bytes].
        """
        tails = self.codec.encode(components)
        if self.head_bits % 8 == 0:
            return np.concatenate([heads, tails], axis=1)
        bits = [first_bits(heads, self.head_bits), first_bits(tails, self.codec.bits)]
        return np.packbits(np.concatenate(bits, axis=1), axis=1, bitorder="little")

    def head(self, codes: np.ndarray) -> np.ndarray:
        """Return codes [n, bytes] without their extra dimensions."""
        if self.head_bits % 8 == 0:
            return codes[:, : self.head_bits // 8]
        bits = first_bits(codes, self.head_bits)
        return np.packbits(bits, axis=1, bitorder="little")


def first_bits(codes: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` bits of each of `codes` [n, bytes]: uint8 [n, count]."""
    return np.unpackbits(codes, axis=1, count=count, bitorder="little")


class Codec:
    """Encodes vectors [n, d] as codes of `bits` bits, and decodes them.

    Components are float32, unless a subclass quantises them. The `tables`
    [d / part, numbers] come from training: one table for each `part` components.
    """

    encode: Callable[[np.ndarray], np.ndarray]
    """Returns the codes of vectors [n, d]: uint8 [n, bytes]."""

    decode: Callable[[np.ndarray], np.ndarray]
    """Returns the vectors that codes [n, bytes] encode: float32 [n, d]."""

    part = 1

    arguments: Sequence[int] = ()
    """The arguments for the class of an index with this codec, after `d`."""

    lossy = False
    """True if codes may change the length of a vector by more than a hundredth."""

    offset_dimensions: Sequence[int] = (0,)
    """The numbers of the extra dimensions that hold the offset. The rest is padding."""

    limits = (-np.inf, np.inf)
    """The smallest and the largest extra component in a code."""

    step = 0.0
    """The step by which extra components of centroids vary; 0 if they may be any."""

    def __init__(self, d: int):
        self.d = d
        self.bits = 32 * d
        self.tables = np.empty((d, 0))
        self.encode = lambda vectors: np.asarray(vectors, np.float32, "C").view(
            np.uint8
        )
        self.decode = lambda codes: np.asarray(codes, order="C").view(np.float32)

    def with_tables(self, tables: np.ndarray) -> Codec:
        """Return a codec of this kind for `tables`, with `part` components for each."""
        return Codec(len(tables))

    def install(self, index: faiss.Index) -> None:
        """Make this the codec of `index`. Do nothing for an index of floats."""

    def design(
        self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None
    ) -> OffsetCoder:
        """Return the coder for the offsets of a spec.

        In this class, one extra dimension of float32 holds an offset without loss,
        whatever the sample.

        Args:
            spec: The requirements of the upgrade, with the range of offsets.
            sample: A sample of the offsets, [k].
            bases: The offsets of the centroids of the sampled entries, [k]. None if
                codes do not store differences from centroids.
        """
        extra = spec.extra_dimensions([spec.first_component()], 1)
        return OffsetCoder(extra, Codec(1), self.bits)


class ScalarCodec(Codec):
    """A scalar quantiser: one number per component.

    Faiss is many times slower if d is not a multiple of 16, so extra dimensions pad d
    to the next multiple. Several of them carry the offset: each encodes the rounding
    error of the dimension before it.
    """

    # The types of 16-bit floats, with the distance from 1 to the next number.
    FLOATS: ClassVar = {
        SQ.QT_fp16: 2.0**-10,
        SQ.QT_bf16: 2.0**-7,
    }
    # The types of integers, with the largest integer.
    LEVELS: ClassVar = {
        SQ.QT_8bit: 255,
        SQ.QT_6bit: 63,
        SQ.QT_4bit: 15,
    }

    def __init__(self, quantizer: faiss.ScalarQuantizer):
        kind = quantizer.qtype
        if kind not in self.FLOATS | self.LEVELS:
            raise StoreError(
                f"codes of type {kind} of faiss.ScalarQuantizer cannot carry offsets; "
                "build the index with SQ8, or leave it as it is and search with "
                "hubplugin_faiss.CorrectedSearch(index, offsets)"
            )
        self.quantizer = quantizer
        self.encode = quantizer.compute_codes
        self.decode = quantizer.decode
        self.arguments = [kind]
        self.d = quantizer.d
        self.bits = quantizer.bits * quantizer.d
        # The minimum and the range of each component. Empty for floats.
        trained = faiss.vector_to_array(quantizer.trained)
        self.tables = trained.reshape(-1, quantizer.d).T
        self.lossy = kind in self.LEVELS
        if kind == SQ.QT_4bit:
            # Three dimensions give an offset 12 bits. There is no step: rounding list
            # ranks to a fifteenth of their range cost 0.006 of recall at equal nprobe,
            # and 0.06 with L2.
            self.offset_dimensions = range(3)
            return
        # Two dimensions of at least 6 bits give an offset at least 12 bits.
        self.offset_dimensions = range(2)
        if self.lossy:
            self.step = float(self.tables[0, 1]) / self.LEVELS[kind]
        elif kind == SQ.QT_fp16:
            self.limits = (-LARGEST, LARGEST)

    def with_tables(self, tables: np.ndarray) -> ScalarCodec:
        quantizer = faiss.ScalarQuantizer(len(tables), self.quantizer.qtype)
        quantizer.rangestat = self.quantizer.rangestat
        quantizer.rangestat_arg = self.quantizer.rangestat_arg
        set_floats(quantizer.trained, tables.T)
        return ScalarCodec(quantizer)

    def install(self, index: faiss.Index) -> None:
        index.sq = self.quantizer

    def design(
        self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None
    ) -> OffsetCoder:
        # Pad d to a multiple of 16. At least one dimension is padding, and the last one
        # marks the model.
        used = len(self.offset_dimensions)
        width = used + 1 + -(self.quantizer.d + used + 1) % 16
        ends = np.array([spec.low, spec.high])
        query = [spec.first_component()]
        if self.lossy:
            extra = spec.extra_dimensions(query, width, ends, bases)
            return self._design_levels(extra, spec, bases)
        if spec.euclidean:
            # Rounding the first component changes its square by less than loss^2.
            longest = np.sqrt(2 * (spec.high - spec.low))
            loss = longest * np.sqrt(2 * self.FLOATS[self.quantizer.qtype])
            query.append(-loss)
        else:
            # Keep components below half of the largest fp16 number.
            query = [spec.first_component(room=30_000)] * 2
        query = [shorten(q) for q in query]
        extra = spec.extra_dimensions(query, width, ends, bases)
        return OffsetCoder(extra, self.with_tables(np.empty((width, 0))), self.bits)

    def _design_levels(
        self, extra: ExtraDimensions, spec: UpgradeSpec, bases: np.ndarray | None
    ) -> OffsetCoder:
        """Return a coder for types of integers.

        The range of each component covers the rounding errors of the component before
        it. Levels are the middles of their intervals. The offset of vectors that plain
        Faiss adds is a level, so codes hold it without loss: the neutral offset under
        inner product, or the largest offset under Euclidean distance.
        """
        q = extra.query.astype(np.float64)
        first = q[0]
        centroid_offsets = np.zeros(1)
        base_components = np.zeros(1)
        if bases is not None:
            centroid_offsets = bases
            base_components = np.sqrt(np.maximum(first**2 - 2 * bases, 0))
        if spec.euclidean:
            # Component i encodes q_i + x_i, but the first one only the difference from
            # the centroid's x_0.
            low = -base_components.max()
            high = np.sqrt(first**2 - 2 * spec.low) - base_components.min()
        else:
            low = (spec.low - centroid_offsets.max()) / first
            high = (spec.high - centroid_offsets.min()) / first
        count = self.LEVELS[self.quantizer.qtype]
        ranges = np.zeros((len(q), 2))
        for i in self.offset_dimensions:
            # The component ranges from `middle` + `low` to `middle` + `high`. Leave two
            # steps spare: `below` rounds up to place a level on `middle`.
            step = max((high - low) / (count - 2), 1e-12)
            below = np.ceil(-low / step - 1e-6)
            # Codes store the difference from the centroid's component, which is near 0,
            # or without centroids the component itself, which is near q_i.
            middle = q[i] if bases is None else 0.0
            ranges[i] = middle - (below + 0.5) * step, count * step
            if i == self.offset_dimensions[-1]:
                break
            if spec.euclidean:
                # Rounding this component changes its square by at most loss^2.
                loss = np.sqrt((high - low) * step + step**2)
                q[i + 1] = -loss
                low = 0.0
                high = np.sqrt(2) * loss
            else:
                # Rounding this component changes the offset by at most 0.5 step q_i.
                q[i + 1] = first
                low = -0.5 * step * q[i] / first
                high = -low
        extra = replace(extra, query=q.astype(np.float32))
        return OffsetCoder(extra, self.with_tables(ranges), self.bits)


def set_floats(vector: Any, array: np.ndarray) -> None:
    """Copy `array` row by row into a Faiss `vector` of floats."""
    faiss.copy_array_to_vector(np.ascontiguousarray(array, np.float32).ravel(), vector)


def shorten(value: float) -> float:
    """Round `value` away from 0 to a 7-bit mantissa, exact in bf16 and fp16."""
    mantissa, exponent = np.frexp(abs(value))
    held = np.ceil(mantissa * 128) / 128
    return float(np.copysign(np.ldexp(held, exponent), value))


class ProductCodec(Codec):
    """A product quantiser: one number for each part of the components.

    The offset gets one more part, whose codebook is trained on the offsets. With fewer
    than 256 levels it gets two parts: the second encodes the error of the first.
    """

    lossy = True

    def __init__(self, quantizer: faiss.ProductQuantizer):
        self.quantizer = quantizer
        self.encode = quantizer.compute_codes
        self.decode = quantizer.decode
        self.arguments = [quantizer.M, quantizer.nbits]
        self.d = quantizer.d
        self.bits = quantizer.M * quantizer.nbits
        codebooks = faiss.vector_to_array(quantizer.centroids)
        self.tables = codebooks.reshape(quantizer.M, -1)
        self.part = quantizer.dsub
        self.offset_dimensions = range(0, quantizer.d, self.part)

    def with_tables(self, tables: np.ndarray) -> ProductCodec:
        d = len(tables) * self.part
        quantizer = faiss.ProductQuantizer(d, len(tables), self.quantizer.nbits)
        set_floats(quantizer.centroids, tables)
        if self.quantizer.sdc_table.size():
            quantizer.compute_sdc_table()
        return ProductCodec(quantizer)

    def install(self, index: faiss.Index) -> None:
        index.pq = self.quantizer
        if isinstance(index, faiss.IndexIVF):
            index.precompute_table()

    def design(
        self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None
    ) -> OffsetCoder:
        levels = self.quantizer.ksub
        parts = 1
        if levels < 256:
            parts = 2
        # The first part encodes the offset, or its difference from the centroid's.
        query = np.zeros(parts * self.part)
        query[0] = spec.first_component()
        extra = spec.extra_dimensions(query, len(query), sample, bases)
        first = ExtraDimensions(extra.query[:1], spec.euclidean)
        base_components = np.zeros(1)
        if bases is not None:
            base_components = first.component(bases)
        values = first.component(sample) - base_components
        ends = first.component(np.array([spec.low, spec.high]))
        room = ends.min() - base_components.max(), ends.max() - base_components.min()
        codebooks = [place_levels(values, levels, first.query - base_components, room)]
        if parts == 2:
            # The second part encodes what the first one loses of the sampled offsets.
            first_levels = codebooks[0]
            middles = (first_levels[1:] + first_levels[:-1]) / 2
            nearest = np.searchsorted(middles, values)
            decoded = first_levels[nearest] + base_components
            losses = sample - first.offsets(decoded[:, None])
            if len(np.unique(values)) < levels:
                # The levels fit the sample exactly, but later offsets may lie between
                # two levels.
                offsets = first.offsets(first_levels[:, None] + base_components.mean())
                gap = np.diff(np.sort(offsets)).max()
                losses = np.concatenate([losses, gap * np.linspace(-0.5, 0.5, levels)])
            query[self.part] = query[0]
            if spec.euclidean:
                query[self.part] = -np.sqrt(2 * np.abs(losses).max())
            extra = spec.extra_dimensions(query, len(query), sample, bases)
            second = ExtraDimensions(extra.query[self.part :][:1], spec.euclidean)
            # In this part, centroids have the same component as the query. Without
            # centroids, codes store the component itself.
            base_components = second.query * (bases is not None)
            values = second.component(losses) - base_components
            plain = second.query - base_components
            codebooks.append(place_levels(values, levels, plain, (0.0, 0.0)))
        tables = np.zeros((parts, levels, self.part), np.float32)
        tables[:, :, 0] = codebooks
        codec = self.with_tables(tables.reshape(parts, -1))
        return OffsetCoder(extra, codec, self.bits)


def place_levels(
    values: np.ndarray, count: int, plain: np.ndarray, room: tuple[float, float]
) -> np.ndarray:
    """Return sorted levels that quantise `values` with a small squared error.

    The levels are float32 [count], from Lloyd's algorithm in one dimension.

    Args:
        values: The values to quantise, [n].
        count: The number of levels.
        plain: The values for vectors that plain Faiss adds. These values become levels
            if they take at most an eighth of `count`, or if there are spare levels.
        room: The range of values that may come later. Spare levels are spread over it.
            Without spare levels, and with a `count` of at least 32, there are margins:
            a 32nd of the levels lies below all values, and another 32nd above.
    """
    distinct = np.unique(values)
    fixed = np.unique(plain.astype(np.float32))
    distinct_and_fixed = np.unique(np.concatenate([distinct, fixed]))
    if len(distinct_and_fixed) <= count:
        spread = np.linspace(*room, count - len(distinct_and_fixed))
        return np.sort(np.concatenate([distinct_and_fixed, spread])).astype(np.float32)
    if len(fixed) > count // 8:
        # These are too many to be fixed levels: treat them like the other values.
        values = np.concatenate([values, fixed])
        fixed = fixed[:0]
    # Start with levels spread evenly over the range, not by quantiles: this keeps the
    # rare extremes, which are the hubs.
    first, last = distinct[[0, -1]]
    margin = count // 32
    below = np.linspace(room[0], first, margin, endpoint=False)
    above = np.linspace(room[1], last, margin, endpoint=False)
    within = np.linspace(first, last, count - len(fixed) - 2 * margin)
    levels = np.concatenate([fixed, below, within, above])
    for _ in range(20):
        order = np.argsort(levels, kind="stable")
        middles = (levels[order][1:] + levels[order][:-1]) / 2
        nearest = order[np.searchsorted(middles, values)]
        members = np.bincount(nearest, minlength=count)
        means = np.bincount(nearest, values, minlength=count) / np.maximum(members, 1)
        members[: len(fixed)] = 0  # fixed levels, the first ones, are not moved
        levels = np.where(members > 0, means, levels)
    return np.sort(levels).astype(np.float32)
