"""Offsets of a model on the scale of an index's own similarities, whose codes change
the lengths of vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin_faiss.encoding.offsets import QUERIES, evenly, nearness_of
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
        as_it_is = cls(handler.euclidean)
        if model.metric is not Metric.COSINE or not handler.lossy:
            return as_it_is
        vectors, stored = handler.take(handler.sample())
        vectors = handler.with_zeros(vectors)
        usable = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
        vectors = vectors[usable]
        if not len(vectors):
            return as_it_is
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        squares = np.zeros(len(lengths))
        if handler.euclidean:
            squares = lengths**2 / 2
        if stored is None or not handler.holds_offsets_of(model.fingerprint):
            queries = model.queries(evenly(model.terms[0].bank, QUERIES))
            nearness = STEP * round(nearness_of(queries, vectors, handler.count) / STEP)
            mean = float(np.mean(nearness * lengths - squares))
            return cls(handler.euclidean, nearness, CENTRE * round(mean / CENTRE))
        offsets = model.offsets(vectors.astype(np.float32))
        rest = stored[usable] - lengths * offsets - squares
        steps = STEP * np.arange(-10, 31)
        bias = (
            rest + steps[:, None] * lengths
        )  # [steps, n], all alike for the right one
        means = CENTRE * np.round(np.median(bias, axis=1) / CENTRE)
        errors = np.abs(bias - means[:, None])
        best = np.quantile(errors, 0.25, axis=1).argmin()  # some may be stale
        return cls(handler.euclidean, float(steps[best]), float(means[best]))

    def to_index(self, offsets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Return what the index holds for `offsets` [b] of the model: [b].

        vectors: As the index reconstructs them [b, d].
        """
        if self.nearness is None:
            return offsets
        lengths, bias = self._lengths_and_bias(vectors, self.nearness)
        return lengths * offsets - bias

    def to_model(self, offsets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Return the offsets of the model for which the index holds `offsets` [b]: [b].

        vectors: As in `to_index`.
        """
        if self.nearness is None:
            return offsets
        lengths, bias = self._lengths_and_bias(vectors, self.nearness)
        return (offsets + bias) / lengths

    def _lengths_and_bias(
        self, vectors: np.ndarray, nearness: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the factor and the norm bias [b] of `vectors` [b, d].

        They are 1 and 0 for a zero vector, which has no length that codes could have
        changed.
        """
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        bias = nearness * lengths
        if self.euclidean:
            bias -= lengths**2 / 2
        bias -= self.mean
        has_length = lengths > 0
        return np.where(has_length, lengths, 1.0), np.where(has_length, bias, 0.0)
