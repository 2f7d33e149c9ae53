"""Conversion of offsets between a model and an index whose codes change lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hubplugin.measures.hubness import pick_evenly
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin_faiss.encoding.offsets import QUERIES, nearness_of
from hubplugin_faiss.handlers.base import SAMPLED, IndexHandler

STEP = 0.05
"""The unit of `IndexScale.nearness`: a multiple can be recovered from an index."""

CENTRE = 0.02
"""The unit of `IndexScale.mean`: a multiple can be recovered, too."""


@dataclass(frozen=True)
class IndexScale:
    """The scale on which an index holds offsets.

    Let t be the direction of a target and L its length in the index. Its score is
    L (q.t), minus L^2 / 2 under L2. The index holds L offset - nearness L, plus L^2 / 2
    under L2. The score becomes L (q.t + offset - nearness). So near the top of a
    ranking, where q.t + offset is about `nearness`, lengths no longer matter, as in
    cosine.

    euclidean: True for an index with L2.
    nearness: The similarity of a query to the targets at the top of a ranking; see
        `nearness_of`. None if offsets are held unchanged, because the model is not for
        cosine or codes do not change lengths.
    mean: A constant added to all offsets, so that they stay centred.
    """

    euclidean: bool
    nearness: float | None = None
    mean: float = 0.0

    @classmethod
    def of(cls, handler: IndexHandler, model: OffsetModel) -> IndexScale:
        """Return the scale on which the index of `handler` holds offsets of `model`.

        For an index without offsets of the model, a scale is computed from a sample of
        entries. An index with such offsets keeps its scale, since another scale would
        make all of them wrong. The scale is recovered from the offsets.
        """
        euclidean = handler.euclidean
        if model.metric is not Metric.COSINE or not handler.lossy:
            return cls(euclidean)
        sample = pick_evenly(np.arange(handler.count), SAMPLED)
        vectors, stored = handler.take(sample)
        vectors = handler.with_zeros(vectors)
        usable = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
        vectors = vectors[usable]
        if not len(vectors):
            return cls(euclidean)
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        squares = euclidean * lengths**2 / 2  # without L2, `euclidean` counts as 0
        if not handler.holds_offsets_of(model.fingerprint):
            queries = model.queries(pick_evenly(model.terms[0].bank, QUERIES))
            nearness = STEP * round(nearness_of(queries, vectors, handler.count) / STEP)
            mean = float(np.mean(nearness * lengths - squares))
            return cls(euclidean, nearness, CENTRE * round(mean / CENTRE))
        # Choose the step for which most entries imply the same mean.
        steps = STEP * np.arange(-10, 31)
        offsets = model.offsets(vectors.astype(np.float32))
        # `rest` is mean - nearness L, so each step implies a mean for each entry.
        rest = stored[usable] - lengths * offsets - squares
        means = rest + steps[:, None] * lengths  # [steps, n]
        rounded = CENTRE * np.round(np.median(means, axis=1) / CENTRE)
        errors = np.abs(means - rounded[:, None])
        # A quantile, because some offsets may be stale.
        best_step = np.quantile(errors, 0.25, axis=1).argmin()
        return cls(euclidean, float(steps[best_step]), float(rounded[best_step]))

    def to_index(self, offsets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Convert `offsets` [b] of the model to the values in the index: [b].

        vectors: The vectors that the index reconstructs, [b, d].
        """
        factors, bias = self._factors_and_bias(vectors)
        return factors * offsets - bias

    def to_model(self, offsets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Convert the values `offsets` [b] in the index to offsets of the model: [b].

        vectors: See `to_index`.
        """
        factors, bias = self._factors_and_bias(vectors)
        return (offsets + bias) / factors

    def _factors_and_bias(
        self, vectors: np.ndarray
    ) -> tuple[np.ndarray | float, np.ndarray | float]:
        """Return the factors [b] and the norm biases [b] of `vectors` [b, d].

        A zero vector, whose length codes cannot have changed, has factor 1 and bias 0.
        """
        if self.nearness is None:
            return 1.0, 0.0
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        # Without L2, `euclidean` counts as 0.
        bias = self.nearness * lengths - self.euclidean * lengths**2 / 2 - self.mean
        has_length = lengths > 0
        return np.where(has_length, lengths, 1.0), np.where(has_length, bias, 0.0)
