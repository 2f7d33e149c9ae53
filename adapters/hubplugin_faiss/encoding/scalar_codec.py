"""Extra dimensions in the codes of a scalar quantiser."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codec import HALF, LARGEST, Codec, Coder, E, require_finite
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.layout import UpgradeSpec


class ScalarCodec(Codec):
    """One number a component, by a scalar quantiser.

    Faiss is many times slower where d is no multiple of 16, so the extra dimensions are padded up to the next one. The
    offset goes into several of them: the first holds it as far as it can, the next ones what that one loses.
    """

    FLOATS: ClassVar = {faiss.ScalarQuantizer.QT_fp16: 2.0**-10, faiss.ScalarQuantizer.QT_bf16: 2.0**-7}
    LEVELS: ClassVar = {
        faiss.ScalarQuantizer.QT_8bit: 255,
        faiss.ScalarQuantizer.QT_6bit: 63,
        faiss.ScalarQuantizer.QT_4bit: 15,
    }

    def __init__(self, index: faiss.Index):
        super().__init__(index)
        self.kind = index.sq.qtype
        if self.kind not in {**self.FLOATS, **self.LEVELS}:
            names = [name for name in dir(faiss.ScalarQuantizer) if name.startswith("QT_") and name != "QT_count"]
            name = next((name for name in names if getattr(faiss.ScalarQuantizer, name) == self.kind), str(self.kind))
            raise StoreError(
                f"codes of type {name} in this {type(index).__name__} cannot carry offsets; build it with SQ8, or "
                "leave it as it is and search with hubplugin_faiss.CorrectedSearch(index, offsets)"
            )

    @property
    def lossy(self) -> bool:
        return self.kind not in self.FLOATS

    def design(self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None) -> Coder:
        state = np.array([spec.low, spec.high]).tobytes() + (b"" if bases is None else bases.tobytes())
        if self.kind in self.LEVELS:
            return self._levels(spec, state, bases)
        if self.kind == HALF and (spec.longest if self.euclidean else spec.size / 30_000) > LARGEST / 2.1:
            raise StoreError(
                f"offsets from {spec.low:.4g} to {spec.high:.4g} do not fit codes of 16 bits; scale the vectors down "
                "before they are indexed, and fit the model on those"
            )
        if self.euclidean:
            query = [-np.sqrt(2 * spec.high), -spec.longest * np.sqrt(2 * self.FLOATS[self.kind])]
        else:
            query = [max(E, spec.size / 30_000)] * 2
        return self.coder(self.index.d, self._extra(spec, [_short(q) for q in query], self._width(2), state))

    def coder(self, d: int, extra: ExtraDimensions) -> Coder:
        trained = faiss.vector_to_array(self.index.sq.trained)
        return self._coder(d, extra, trained.reshape(2, -1)[:, d:] if self.kind in self.LEVELS else trained)

    def require_fits(self, vectors: np.ndarray) -> None:
        if self.kind == HALF:
            with np.errstate(over="ignore"):
                require_finite(np.ascontiguousarray(vectors, np.float16).view(np.uint16))

    def widen(self, new: faiss.Index, coder: Coder) -> None:
        trained = faiss.vector_to_array(self.index.sq.trained)
        if self.kind in self.LEVELS:
            extra_codes = faiss.vector_to_array(coder.quantiser.trained)  # type: ignore[attr-defined]
            trained = np.concatenate([trained.reshape(2, -1), extra_codes.reshape(2, -1)], axis=1).ravel()
        faiss.copy_array_to_vector(trained, new.sq.trained)

    def narrow(self, new: faiss.Index, d: int) -> None:
        trained = faiss.vector_to_array(self.index.sq.trained)
        if self.kind in self.LEVELS:
            trained = trained.reshape(2, -1)[:, :d].ravel()
        faiss.copy_array_to_vector(np.ascontiguousarray(trained), new.sq.trained)

    def _coder(self, d: int, extra: ExtraDimensions, trained: np.ndarray) -> Coder:
        quantiser = faiss.ScalarQuantizer(extra.width, self.kind)
        faiss.copy_array_to_vector(np.ascontiguousarray(trained, np.float32).ravel(), quantiser.trained)
        limits = (-LARGEST, LARGEST) if self.kind == HALF else (-np.inf, np.inf)
        # Ranks of lists cannot be rounded to a fifteenth: at equal nprobe that cost 0.006 of recall, and 0.06 by L2.
        fine = self.kind in self.LEVELS and self.kind != faiss.ScalarQuantizer.QT_4bit
        step = float(trained[1, 0]) / self.LEVELS[self.kind] if fine else 0.0
        return Coder(
            extra, quantiser, range(self._used), quantiser.bits * d, quantiser.bits * extra.width, limits, step
        )

    @property
    def _used(self) -> int:
        """How many dimensions hold the offset: two hold it with 12 bits or more, and of 4 bits each it takes three."""
        return 3 if self.kind == faiss.ScalarQuantizer.QT_4bit else 2

    def _width(self, used: int) -> int:
        """The number of extra dimensions, with at least one of padding, which has the fingerprint bits."""
        return used + 1 + -(int(self.index.d) + used + 1) % 16

    def _levels(self, spec: UpgradeSpec, state: bytes, bases: np.ndarray | None) -> Coder:
        """A coder whose components have ranges of their own: each spans what the one before may lose.

        A level is the middle of its interval. Neutral under inner product, and the largest offset under Euclidean,
        are levels, so that what is added through plain Faiss is coded without loss.
        """
        used, count = self._used, self.LEVELS[self.kind]
        spread = np.zeros(1) if bases is None else bases
        first = -np.sqrt(2 * spec.high) if self.euclidean else max(E, spec.size * 1e-30)
        extra = self._extra(spec, [first], self._width(used), state)
        q = extra.query.astype(np.float64)
        if self.euclidean:  # component i holds q_i + x_i, less the x of the centroid in the first
            about = np.zeros(1) if bases is None else np.sqrt(np.maximum(q[0] ** 2 - 2 * spread, 0))
            low, high = -about.max(), np.sqrt(q[0] ** 2 - 2 * spec.low) - about.min()
        else:
            low, high = (spec.low - spread.max()) / q[0], (spec.high - spread.min()) / q[0]
        ranges = np.zeros((2, extra.width))
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
        return self._coder(self.index.d, replace(extra, query=q.astype(np.float32)), ranges)


def _short(value: float) -> float:
    """The number next to `value`, not nearer to 0, that 7 bits hold, so that bf16 and fp16 have it exactly."""
    mantissa, exponent = np.frexp(value)
    return float(np.ldexp(np.copysign(np.ceil(abs(mantissa) * 128) / 128, mantissa), exponent))
