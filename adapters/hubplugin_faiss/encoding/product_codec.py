"""Extra dimensions in the codes of a product quantiser."""

from __future__ import annotations

import faiss
import numpy as np

from hubplugin_faiss.encoding.codec import Codec, Coder, E, Floats, exactly
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.layout import UpgradeSpec


class ProductCodec(Codec):
    """One more sub-quantiser, whose codebook is trained on the offsets. With less than 256 levels there are two: the
    second holds what the first loses."""

    @property
    def lossy(self) -> bool:
        return True

    def design(self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None) -> Coder:
        pq = self.index.pq
        used = 1 if pq.nbits >= 8 else 2
        state = sample.tobytes() + (b"" if bases is None else bases.tobytes())
        first = -np.sqrt(2 * spec.high) if self.euclidean else max(E, spec.size * 1e-30)
        extra = self._extra(spec, [first], used * pq.dsub, state)
        alone = ExtraDimensions(extra.query[:1], self.euclidean)
        about = np.zeros(1) if bases is None else Coder(alone, Floats(1), (0,), 0, 0).centres(bases)[:, 0]
        values = alone.components_for(sample, exactly, (0,))[:, 0] - about
        low, high = np.sort(alone.components_for(np.array([spec.low, spec.high]), exactly, (0,))[:, 0])
        codebooks = np.zeros((used, pq.ksub, pq.dsub), np.float32)
        codebooks[0, :, 0] = levels(values, pq.ksub, extra.query[0] - about, (low - about.max(), high - about.min()))
        if used == 2:
            kept = codebooks[0, _nearest(codebooks[0, :, 0], values), 0] + about
            lost = sample - alone.offsets(kept[:, None])
            if len(np.unique(values)) < pq.ksub:  # what comes later lies between the levels
                apart = np.diff(np.sort(alone.offsets(codebooks[0, :, :1] + about.mean())))
                lost = np.concatenate([lost, np.linspace(-0.5, 0.5, pq.ksub) * apart.max()])
            second = -np.sqrt(2 * np.abs(lost).max()) if self.euclidean else first
            query = np.zeros(extra.width)
            query[0], query[pq.dsub] = extra.query[0], second
            extra = self._extra(spec, query.tolist(), extra.width, state)
            second = extra.query[pq.dsub]
            values = ExtraDimensions(np.array([second]), self.euclidean).components_for(lost, exactly, (0,))[:, 0]
            base = 0.0 if bases is None else second
            codebooks[1, :, 0] = levels(values - base, pq.ksub, np.array([second - base]), (0.0, 0.0))
        return self._coder(self.index.d, extra, codebooks)

    def coder(self, d: int, extra: ExtraDimensions) -> Coder:
        pq = self.index.pq
        codebooks = faiss.vector_to_array(pq.centroids).reshape(pq.M, pq.ksub, pq.dsub)
        return self._coder(d, extra, codebooks[d // pq.dsub :])

    def widen(self, new: faiss.Index, coder: Coder) -> None:
        extra_codes = faiss.vector_to_array(coder.quantiser.centroids)  # type: ignore[attr-defined]
        self._set(new, np.concatenate([faiss.vector_to_array(self.index.pq.centroids), extra_codes]))

    def narrow(self, new: faiss.Index, d: int) -> None:
        self._set(new, faiss.vector_to_array(self.index.pq.centroids)[: d * self.index.pq.ksub])

    def _set(self, new: faiss.Index, centroids: np.ndarray) -> None:
        faiss.copy_array_to_vector(np.ascontiguousarray(centroids), new.pq.centroids)
        if self.index.pq.sdc_table.size():
            new.pq.compute_sdc_table()

    def _coder(self, d: int, extra: ExtraDimensions, codebooks: np.ndarray) -> Coder:
        pq, used = self.index.pq, len(codebooks)
        quantiser = faiss.ProductQuantizer(extra.width, used, pq.nbits)
        faiss.copy_array_to_vector(np.ascontiguousarray(codebooks).ravel(), quantiser.centroids)
        components = range(0, extra.width, pq.dsub)
        return Coder(extra, quantiser, components, d // pq.dsub * pq.nbits, used * pq.nbits)


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
