"""Offsets of a model on the scale of an index's own similarities, whose codes change the lengths of vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin_faiss.encoding.codecs import QUERIES, evenly
from hubplugin_faiss.handlers.base import IndexHandler, nearness_of

STEP, CENTRE = 0.05, 0.02
"""`IndexScale.nearness` and `mean` are multiples of these, so that they can be read off an index."""


@dataclass(frozen=True)
class IndexScale:
    """What an index holds in the place of an offset.

    A target of length L scores L (q.t), and q.t under L2 less L^2 / 2. With L offset - nearness L, and under L2 L^2 / 2
    more, it scores L (q.t + offset), less the same for all: as by cosine where two targets are as near as `nearness`.

    nearness: how similar a query is to the targets between which a ranking decides, see `nearness_of`; None where an
    offset stays as it is: the model does not take all vectors for unit vectors, or codes do not change them. mean: what
    is added to all, so that offsets stay centred.
    """

    euclidean: bool
    nearness: float | None = None
    mean: float = 0.0

    @classmethod
    def of(cls, handler: IndexHandler, model: OffsetModel) -> IndexScale:
        """The scale on which the index of `handler` holds offsets of `model`.

        An index without offsets gets a scale for them, by some of its entries. An index with offsets keeps its scale,
        or all that it holds would be wrong at once: it is read off them.
        """
        if model.metric is not Metric.COSINE or not handler.lossy:
            return cls(handler.euclidean)
        vectors, stored = handler.take(handler.sample())
        vectors = handler.with_zeros(vectors)
        usable = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
        vectors = vectors[usable]
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        if not len(vectors):
            return cls(handler.euclidean)
        squares = lengths**2 / 2 if handler.euclidean else np.zeros(len(lengths))
        if not handler.holds_offsets_of(model.fingerprint):
            queries = model.queries(evenly(model.terms[0].bank, QUERIES))
            nearness = STEP * round(nearness_of(queries, vectors, handler.count) / STEP)
            mean = float(np.mean(nearness * lengths - squares))
            return cls(handler.euclidean, nearness, CENTRE * round(mean / CENTRE))
        assert stored is not None
        rest = (
            stored[usable]
            - lengths * model.offsets(vectors.astype(np.float32))
            - squares
        )
        steps = STEP * np.arange(-10, 31)[:, None]
        means = (
            CENTRE
            * np.round(np.median(rest + steps * lengths, axis=1) / CENTRE)[:, None]
        )
        best = np.quantile(
            np.abs(rest + steps * lengths - means), 0.25, axis=1
        ).argmin()  # some may be stale
        return cls(handler.euclidean, float(steps[best, 0]), float(means[best, 0]))

    def to_index(self, offsets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """What the index holds for `offsets` [b] of the model: [b]. `vectors` [b, d] are as the index reconstructs
        them."""
        if self.nearness is None:
            return offsets
        lengths, bias = self._lengths_and_bias(vectors, self.nearness)
        return np.asarray(lengths * offsets - bias)

    def to_model(self, offsets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """The offsets of the model for which the index holds `offsets` [b] of `vectors` [b, d]: [b]."""
        if self.nearness is None:
            return offsets
        lengths, bias = self._lengths_and_bias(vectors, self.nearness)
        return np.asarray((offsets + bias) / lengths)

    def _lengths_and_bias(
        self, vectors: np.ndarray, nearness: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """A zero vector has no length that codes could have changed."""
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        bias = (
            nearness * lengths - (lengths**2 / 2 if self.euclidean else 0) - self.mean
        )
        return np.where(lengths > 0, lengths, 1.0), np.where(lengths > 0, bias, 0.0)
