"""Offsets of a model on the scale of an index's own similarities, whose codes change
the lengths of vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hubplugin.measures.hubness import pick_evenly
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin_faiss.encoding.offsets import QUERIES, nearness_of
from hubplugin_faiss.handlers.base import IndexHandler

STEP = 0.05
"""`IndexScale.nearness` is a multiple of it, so that it can be read off an index."""

CENTRE = 0.02
"""`IndexScale.mean` is a multiple of it, likewise."""


@dataclass(frozen=True)
class IndexScale:
    """The scale on which an index holds offsets.

    A target of length L scores L (q.t), and q.t under L2 less L^2 / 2. With
    L offset - nearness L, and under L2 L^2 / 2 more, it scores L (q.t + offset), less
    the same for all: as by cosine where two targets are as near as `nearness`.

    nearness: How similar a query is to the targets between which a ranking decides, see
        `nearness_of`. None where an offset stays as it is: the model does not take all
        vectors for unit vectors, or codes do not change them.
    mean: Added to all, so that offsets stay centred.
    """

    euclidean: bool
    nearness: float | None = None
    mean: float = 0.0

    @classmethod
    def of(cls, handler: IndexHandler, model: OffsetModel) -> IndexScale:
        """Return the scale on which the index of `handler` holds offsets of `model`.

        An index without offsets gets a scale for them, by some of its entries. An index
        with offsets keeps its scale, or all that it holds would be wrong at once: it is
        read off them.
        """
        euclidean = handler.euclidean
        if model.metric is not Metric.COSINE or not handler.lossy:
            return cls(euclidean)
        vectors, stored = handler.take(handler.sample())
        vectors = handler.with_zeros(vectors)
        usable = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
        vectors = vectors[usable]
        if not len(vectors):
            return cls(euclidean)
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        squares = euclidean * lengths**2 / 2
        if stored is None or not handler.holds_offsets_of(model.fingerprint):
            queries = model.queries(pick_evenly(model.terms[0].bank, QUERIES))
            nearness = STEP * round(nearness_of(queries, vectors, handler.count) / STEP)
            mean = float(np.mean(nearness * lengths - squares))
            return cls(euclidean, nearness, CENTRE * round(mean / CENTRE))
        # Of all steps, take the one for which most entries lead to the same mean.
        steps = STEP * np.arange(-10, 31)
        offsets = model.offsets(vectors.astype(np.float32))
        rest = stored[usable] - lengths * offsets - squares
        means = rest + steps[:, None] * lengths  # [steps, n]
        rounded = CENTRE * np.round(np.median(means, axis=1) / CENTRE)
        errors = np.abs(means - rounded[:, None])
        best = np.quantile(errors, 0.25, axis=1).argmin()  # some may be stale
        return cls(euclidean, float(steps[best]), float(rounded[best]))

    def to_index(self, offsets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Return what the index holds for `offsets` [b] of the model: [b].

        vectors: As the index reconstructs them [b, d].
        """
        factors, bias = self._factors_and_bias(vectors)
        return factors * offsets - bias

    def to_model(self, offsets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Return the offsets of the model for which the index holds `offsets` [b]: [b].

        vectors: As in `to_index`.
        """
        factors, bias = self._factors_and_bias(vectors)
        return (offsets + bias) / factors

    def _factors_and_bias(
        self, vectors: np.ndarray
    ) -> tuple[np.ndarray | float, np.ndarray | float]:
        """Return the factor and the norm bias [b] of `vectors` [b, d].

        They are 1 and 0 for a zero vector, which has no length that codes could have
        changed.
        """
        if self.nearness is None:
            return 1.0, 0.0
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        bias = self.nearness * lengths - self.euclidean * lengths**2 / 2 - self.mean
        has_length = lengths > 0
        return np.where(has_length, lengths, 1.0), np.where(has_length, bias, 0.0)
