"""How the codes of a quantiser carry a tail. A code is a row of fields of equal size, lowest bit first, so that a
tail is a few more fields behind it, written by a quantiser of the same kind that is only as wide as the tail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.extra_dimensions import Tail
from hubplugin_faiss.encoding.layout import Plan

E = 1e-3
"""The query's tail under inner product, wherever the offsets allow it: scores are shifted by E^2, below rounding, and
a stored offset / E keeps every digit in a float of any size."""


HALF = faiss.ScalarQuantizer.QT_fp16
LARGEST = 65504.0
"""The largest number in the 16 bits of an fp16; what is larger becomes infinite there, and scores become NaN."""


class Quantiser(Protocol):
    """What Faiss's ScalarQuantizer and ProductQuantizer offer."""

    def compute_codes(self, x: np.ndarray) -> np.ndarray: ...

    def decode(self, codes: np.ndarray) -> np.ndarray: ...


class Floats:
    """float32 components as they are."""

    def __init__(self, width: int):
        self._width = width

    def compute_codes(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x, np.float32).view(np.uint8).reshape(len(x), 4 * self._width)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(codes).view(np.float32).reshape(len(codes), self._width)


@dataclass(frozen=True)
class Coder:
    """Writes a tail behind codes of `head_bits` bits as `tail_bits` more, and takes it off again.

    quantiser: codes tails [n, w]. components: those of the tail that carry the offset; the others are padding.
    limits: the smallest and largest value that a component may have. step: what the tails of centroids are multiples
    of, 0 for nothing.
    """

    tail: Tail
    quantiser: Quantiser
    components: Sequence[int]
    head_bits: int
    tail_bits: int
    limits: tuple[float, float] = (-np.inf, np.inf)
    step: float = 0.0

    @property
    def code_size(self) -> int:
        return -(-(self.head_bits + self.tail_bits) // 8)

    def tails(self, offsets: np.ndarray, bases: np.ndarray | None = None) -> np.ndarray:
        """The tails [n, w] that come closest to `offsets` [n], where codes hold how they differ from `bases` [n, w]."""
        about = np.zeros((len(offsets), self.tail.width), np.float32) if bases is None else bases

        def snap(i: int, values: np.ndarray) -> np.ndarray:
            tails = np.zeros((len(values), self.tail.width), np.float32)
            tails[:, i] = np.clip(values - about[:, i], *self.limits)
            return np.asarray(self.quantiser.decode(self.quantiser.compute_codes(tails))[:, i] + about[:, i])

        return self.tail.fill(offsets, snap, self.components)

    def centres(self, offsets: np.ndarray) -> np.ndarray:
        """Tails [n, w] of centroids whose lists are to rank as if every entry had that offset.

        Where levels are close they lie a whole number of steps from the query's, so that neutral is a level in every
        list.
        """
        tails = self.tail.fill(offsets, _exactly, self.components[:1])
        if self.step:
            tails[:, 0] = self.tail.query[0] + np.round((tails[:, 0] - self.tail.query[0]) / self.step) * self.step
        tails[:, 1:] = self.tail.query[1:]
        return tails

    def join(self, heads: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """Codes of vectors [n, bytes] with the codes of `tails` [n, w] behind them: uint8 [n, code_size]."""
        if isinstance(self.quantiser, faiss.ScalarQuantizer) and self.quantiser.qtype == HALF:
            require_finite(heads.view(np.uint16))
        behind = self.quantiser.compute_codes(tails)
        if self.head_bits % 8 == 0:
            return np.concatenate([heads, behind], axis=1)
        return np.packbits(
            np.concatenate([_bits(heads)[:, : self.head_bits], _bits(behind)[:, : self.tail_bits]], axis=1),
            axis=1,
            bitorder="little",
        )

    def head(self, codes: np.ndarray) -> np.ndarray:
        """Codes [n, code_size] as they were without a tail."""
        if self.head_bits % 8 == 0:
            return np.ascontiguousarray(codes[:, : self.head_bits // 8])
        return np.packbits(_bits(codes)[:, : self.head_bits], axis=1, bitorder="little")


class Codec(ABC):
    """The kind of codes that a leaf holds: how a tail is chosen for them, and the leaf's quantiser widened."""

    lossy = False
    """Whether codes keep less of a vector than its length to within a hundredth."""

    def __init__(self, index: Any):
        self.index, self.euclidean = index, index.metric_type == faiss.METRIC_L2

    @abstractmethod
    def plan(self, plan: Plan, sample: np.ndarray, bases: np.ndarray | None) -> Coder:
        """A tail with room for what `plan` says. `sample` [k] are some of the offsets; `bases` [k], where codes hold
        differences from a centroid, the offset that the tail of each one's centroid stands for."""

    @abstractmethod
    def coder(self, d: int, tail: Tail) -> Coder:
        """Of an index that has `tail` behind its d components: what wrote it."""

    def require_fits(self, vectors: np.ndarray) -> None:  # noqa: B027
        """Raises StoreError if codes cannot hold components as large as those of `vectors` [n, d]."""

    @abstractmethod
    def widen(self, new: Any, coder: Coder) -> None:
        """Gives the widened leaf `new` the quantiser of this one with that of the tail behind it."""

    @abstractmethod
    def narrow(self, new: Any, d: int) -> None:
        """Gives the leaf `new` the first d components of the quantiser of this one."""

    def _tail(self, plan: Plan, query: list[float], width: int, state: bytes) -> Tail:
        padded = np.zeros(width, np.float32)
        padded[: len(query)] = query
        return Tail(padded, self.euclidean).marked(plan.fingerprint, state)


class FloatCodec(Codec):
    """float32: one component more, exact."""

    def plan(self, plan: Plan, sample: np.ndarray, bases: np.ndarray | None) -> Coder:
        query = -np.sqrt(2 * plan.high) if self.euclidean else max(E, plan.size * 1e-30)
        return self.coder(self.index.d, self._tail(plan, [query], 1, b""))

    def coder(self, d: int, tail: Tail) -> Coder:
        return Coder(tail, Floats(tail.width), range(tail.width), 32 * d, 32 * tail.width)

    def widen(self, new: Any, coder: Coder) -> None:
        pass

    def narrow(self, new: Any, d: int) -> None:
        pass


class ScalarCodec(Codec):
    """One number a component, by a scalar quantiser.

    Faiss is many times slower where d is no multiple of 16, so the tail is padded up to the next one, and the offset
    goes into several components: the first holds it as far as it can, the next ones what that one loses.
    """

    FLOATS: ClassVar = {faiss.ScalarQuantizer.QT_fp16: 2.0**-10, faiss.ScalarQuantizer.QT_bf16: 2.0**-7}
    LEVELS: ClassVar = {
        faiss.ScalarQuantizer.QT_8bit: 255,
        faiss.ScalarQuantizer.QT_6bit: 63,
        faiss.ScalarQuantizer.QT_4bit: 15,
    }

    def __init__(self, index: Any):
        super().__init__(index)
        self.kind = index.sq.qtype
        if self.kind not in {**self.FLOATS, **self.LEVELS}:
            names = [name for name in dir(faiss.ScalarQuantizer) if name.startswith("QT_") and name != "QT_count"]
            name = next((name for name in names if getattr(faiss.ScalarQuantizer, name) == self.kind), str(self.kind))
            raise StoreError(
                f"codes of type {name} in this {type(index).__name__} cannot carry offsets; build it with SQ8, or "
                "leave it as it is and search with hubplugin_faiss.CorrectedSearch(index, offsets)"
            )
        self.lossy = self.kind not in self.FLOATS

    def plan(self, plan: Plan, sample: np.ndarray, bases: np.ndarray | None) -> Coder:
        state = np.array([plan.low, plan.high]).tobytes() + (b"" if bases is None else bases.tobytes())
        if self.kind in self.LEVELS:
            return self._levels(plan, state, bases)
        if self.kind == HALF and (plan.longest if self.euclidean else plan.size / 30_000) > LARGEST / 2.1:
            raise StoreError(
                f"offsets from {plan.low:.4g} to {plan.high:.4g} do not fit codes of 16 bits; scale the vectors down "
                "before they are indexed, and fit the model on those"
            )
        if self.euclidean:
            query = [-np.sqrt(2 * plan.high), -plan.longest * np.sqrt(2 * self.FLOATS[self.kind])]
        else:
            query = [max(E, plan.size / 30_000)] * 2
        return self.coder(self.index.d, self._tail(plan, [_short(q) for q in query], self._width(2), state))

    def coder(self, d: int, tail: Tail) -> Coder:
        trained = faiss.vector_to_array(self.index.sq.trained)
        return self._coder(d, tail, trained.reshape(2, -1)[:, d:] if self.kind in self.LEVELS else trained)

    def require_fits(self, vectors: np.ndarray) -> None:
        if self.kind == HALF:
            with np.errstate(over="ignore"):
                require_finite(np.ascontiguousarray(vectors, np.float16).view(np.uint16))

    def widen(self, new: Any, coder: Coder) -> None:
        trained = faiss.vector_to_array(self.index.sq.trained)
        if self.kind in self.LEVELS:
            behind = faiss.vector_to_array(coder.quantiser.trained)  # type: ignore[attr-defined]
            trained = np.concatenate([trained.reshape(2, -1), behind.reshape(2, -1)], axis=1).ravel()
        faiss.copy_array_to_vector(trained, new.sq.trained)

    def narrow(self, new: Any, d: int) -> None:
        trained = faiss.vector_to_array(self.index.sq.trained)
        if self.kind in self.LEVELS:
            trained = trained.reshape(2, -1)[:, :d].ravel()
        faiss.copy_array_to_vector(np.ascontiguousarray(trained), new.sq.trained)

    def _coder(self, d: int, tail: Tail, trained: np.ndarray) -> Coder:
        quantiser = faiss.ScalarQuantizer(tail.width, self.kind)
        faiss.copy_array_to_vector(np.ascontiguousarray(trained, np.float32).ravel(), quantiser.trained)
        limits = (-LARGEST, LARGEST) if self.kind == HALF else (-np.inf, np.inf)
        # Ranks of lists cannot be rounded to a fifteenth: at equal nprobe that cost 0.006 of recall, and 0.06 by L2.
        fine = self.kind in self.LEVELS and self.kind != faiss.ScalarQuantizer.QT_4bit
        step = float(trained[1, 0]) / self.LEVELS[self.kind] if fine else 0.0
        return Coder(tail, quantiser, range(self._used), quantiser.bits * d, quantiser.bits * tail.width, limits, step)

    @property
    def _used(self) -> int:
        """Two components hold an offset with 12 bits or more; of 4 bits it takes three."""
        return 3 if self.kind == faiss.ScalarQuantizer.QT_4bit else 2

    def _width(self, used: int) -> int:
        """At least one component of padding, which takes the bits that name the model."""
        return used + 1 + -(int(self.index.d) + used + 1) % 16

    def _levels(self, plan: Plan, state: bytes, bases: np.ndarray | None) -> Coder:
        """A coder whose components have ranges of their own: each spans what the one before may lose.

        A level is the middle of its interval. Neutral under inner product, and the largest offset under Euclidean,
        are levels, so that what is added through plain Faiss is coded without loss.
        """
        used, count = self._used, self.LEVELS[self.kind]
        spread = np.zeros(1) if bases is None else bases
        first = -np.sqrt(2 * plan.high) if self.euclidean else max(E, plan.size * 1e-30)
        tail = self._tail(plan, [first], self._width(used), state)
        q = tail.query.astype(np.float64)
        if self.euclidean:  # component i holds q_i + x_i, less the x of the centroid in the first
            about = np.zeros(1) if bases is None else np.sqrt(np.maximum(q[0] ** 2 - 2 * spread, 0))
            low, high = -about.max(), np.sqrt(q[0] ** 2 - 2 * plan.low) - about.min()
        else:
            low, high = (plan.low - spread.max()) / q[0], (plan.high - spread.min()) / q[0]
        ranges = np.zeros((2, tail.width))
        for i in range(used):
            step = max((high - low) / (count - 2), 1e-12)
            below = np.ceil(-low / step - 1e-6)
            ranges[:, i] = (q[i] if bases is None else 0.0) - (below + 0.5) * step, count * step
            if i + 1 == used:
                break
            if self.euclidean:
                lost = np.sqrt((high - low) * step + step**2)
                q[i + 1], low, high = -lost, 0.0, np.sqrt(2) * lost
            else:
                q[i + 1] = first
                low, high = np.array([-0.5, 0.5]) * step * q[i] / q[i + 1]
        return self._coder(self.index.d, replace(tail, query=q.astype(np.float32)), ranges)


class ProductCodec(Codec):
    """More sub-quantisers, whose codebooks are trained on the offsets: one, or where it has less than 256 levels two,
    the second for what the first loses."""

    lossy = True

    def plan(self, plan: Plan, sample: np.ndarray, bases: np.ndarray | None) -> Coder:
        pq = self.index.pq
        used = 1 if pq.nbits >= 8 else 2
        state = sample.tobytes() + (b"" if bases is None else bases.tobytes())
        first = -np.sqrt(2 * plan.high) if self.euclidean else max(E, plan.size * 1e-30)
        tail = self._tail(plan, [first], used * pq.dsub, state)
        alone = Tail(tail.query[:1], self.euclidean)
        about = np.zeros(1) if bases is None else Coder(alone, Floats(1), (0,), 0, 0).centres(bases)[:, 0]
        values = alone.fill(sample, _exactly, (0,))[:, 0] - about
        low, high = np.sort(alone.fill(np.array([plan.low, plan.high]), _exactly, (0,))[:, 0])
        codebooks = np.zeros((used, pq.ksub, pq.dsub), np.float32)
        codebooks[0, :, 0] = levels(values, pq.ksub, tail.query[0] - about, (low - about.max(), high - about.min()))
        if used == 2:
            kept = codebooks[0, _nearest(codebooks[0, :, 0], values), 0] + about
            lost = sample - alone.offsets(kept[:, None])
            if len(np.unique(values)) < pq.ksub:  # what comes later lies between the levels
                apart = np.diff(np.sort(alone.offsets(codebooks[0, :, :1] + about.mean())))
                lost = np.concatenate([lost, np.linspace(-0.5, 0.5, pq.ksub) * apart.max()])
            second = -np.sqrt(2 * np.abs(lost).max()) if self.euclidean else first
            query = np.zeros(tail.width)
            query[0], query[pq.dsub] = tail.query[0], second
            tail = self._tail(plan, query.tolist(), tail.width, state)
            second = tail.query[pq.dsub]
            values = Tail(np.array([second]), self.euclidean).fill(lost, _exactly, (0,))[:, 0]
            base = 0.0 if bases is None else second
            codebooks[1, :, 0] = levels(values - base, pq.ksub, np.array([second - base]), (0.0, 0.0))
        return self._coder(self.index.d, tail, codebooks)

    def coder(self, d: int, tail: Tail) -> Coder:
        pq = self.index.pq
        codebooks = faiss.vector_to_array(pq.centroids).reshape(pq.M, pq.ksub, pq.dsub)
        return self._coder(d, tail, codebooks[d // pq.dsub :])

    def widen(self, new: Any, coder: Coder) -> None:
        behind = faiss.vector_to_array(coder.quantiser.centroids)  # type: ignore[attr-defined]
        self._set(new, np.concatenate([faiss.vector_to_array(self.index.pq.centroids), behind]))

    def narrow(self, new: Any, d: int) -> None:
        self._set(new, faiss.vector_to_array(self.index.pq.centroids)[: d * self.index.pq.ksub])

    def _set(self, new: Any, centroids: np.ndarray) -> None:
        faiss.copy_array_to_vector(np.ascontiguousarray(centroids), new.pq.centroids)
        if self.index.pq.sdc_table.size():
            new.pq.compute_sdc_table()

    def _coder(self, d: int, tail: Tail, codebooks: np.ndarray) -> Coder:
        pq, used = self.index.pq, len(codebooks)
        quantiser = faiss.ProductQuantizer(tail.width, used, pq.nbits)
        faiss.copy_array_to_vector(np.ascontiguousarray(codebooks).ravel(), quantiser.centroids)
        components = range(0, tail.width, pq.dsub)
        return Coder(tail, quantiser, components, d // pq.dsub * pq.nbits, used * pq.nbits)


def require_finite(halves: np.ndarray) -> None:
    """Raises StoreError if one of the fp16 numbers whose bits are `halves` is infinite."""
    if ((halves & 0x7FFF) == 0x7C00).any():
        raise StoreError(
            f"components beyond {LARGEST:,.0f} are infinite in codes of 16 bits; scale the vectors down before they "
            "are indexed, or give them a type with room for them, such as Flat"
        )


def _short(value: float) -> float:
    """The number next to `value`, not nearer to 0, that 7 bits hold, so that bf16 and fp16 have it exactly."""
    mantissa, exponent = np.frexp(value)
    return float(np.ldexp(np.copysign(np.ceil(abs(mantissa) * 128) / 128, mantissa), exponent))


def _exactly(component: int, values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def levels(
    values: np.ndarray, count: int, plain: np.ndarray, room: tuple[float, float], rounds: int = 20
) -> np.ndarray:
    """`count` sorted numbers that quantise `values` [n] with a small squared error: Lloyd's iteration on a line.

    plain: what plain Faiss adds, so that it is coded without loss where that takes no more than an eighth of the
    levels, or where there are levels to spare. Those are spread over `room`, the range of values that may come later.
    """
    distinct, fixed = np.unique(values), np.unique(plain.astype(np.float32))
    both = np.unique(np.concatenate([distinct, fixed]))
    if len(both) <= count:
        return np.sort(np.concatenate([both, np.linspace(*room, count - len(both))])).astype(np.float32)
    if len(fixed) > count // 8:
        values, fixed = np.concatenate([values, fixed]), fixed[:0]
    # Starting evenly over the range, not over the mass, keeps the rare extremes, which are the hubs.
    found = np.concatenate([fixed, np.linspace(distinct[0], distinct[-1], count - len(fixed))])
    for _ in range(rounds):
        order = np.argsort(found, kind="stable")
        nearest = order[_nearest(found[order], values)]
        members = np.bincount(nearest, minlength=count)
        means = np.bincount(nearest, values, minlength=count) / np.maximum(members, 1)
        members[: len(fixed)] = 0
        found = np.where(members > 0, means, found)
    return np.sort(found).astype(np.float32)


def _nearest(levels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Which of the sorted `levels` [k] is nearest to each of `values` [n]."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values)


def _bits(codes: np.ndarray) -> np.ndarray:
    return np.unpackbits(codes, axis=1, bitorder="little")
