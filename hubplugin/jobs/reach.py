"""Whether offsets leave queries a say: offsets far wider than the similarities rank by themselves."""

from __future__ import annotations

import numpy as np

from hubplugin.errors import CorrectionRefused, Parameter
from hubplugin.metric import Metric, normalise
from hubplugin.model import OffsetModel
from hubplugin.reductions import Compute, Similarities, dense
from hubplugin.vectors import Vectors, as_vectors

QUERIES, TARGETS = 64, 2048
"""The bank queries and targets that are tried, drawn evenly."""

FARTHEST = 0.05
"""The share of the gallery that may on average be nearer to a query than its corrected nearest target. On 27
banks of text and code, text and image, two languages and query logs it is at most 0.017, by `blend`, `dbsn`, `is` or
`nnn`; on the same banks as if another model had embedded them, 0.11 to 0.47 (benchmarks/reach.py)."""


def reach(model: OffsetModel, bank: Vectors, gallery: Vectors, compute: Compute) -> float:
    """The share of the gallery that is nearer to a bank query than its corrected nearest target, on average."""
    queries, targets = _evenly(bank, QUERIES), _evenly(gallery, TARGETS)
    offsets = model.members.offsets(targets)
    if model.metric is Metric.COSINE:
        queries, targets = normalise(queries, bank.name), normalise(targets, gallery.name)
    raw = dense(Similarities(queries, model.metric, compute), as_vectors(targets, "targets")).numpy()
    best = np.argmax(raw + offsets, axis=1)
    return float((raw > np.take_along_axis(raw, best[:, None], axis=1)).mean())


def require_reach(model: OffsetModel, bank: Vectors, gallery: Vectors, compute: Compute) -> None:
    """Raises CorrectionRefused if the offsets reach too far to be found among the candidates of a search."""
    share = reach(model, bank, gallery, compute)
    if share > FARTHEST:
        raise CorrectionRefused(
            "the offsets are far wider than the similarities to the bank: what comes first would have "
            f"{share:.0%} of the gallery nearer to the query ({FARTHEST:.0%} at most); was the bank embedded by the "
            "gallery's model? ",
            Parameter("force", True),
            " applies them all the same",
        )


def _evenly(vectors: Vectors, most: int) -> np.ndarray:
    return vectors.some(np.linspace(0, vectors.rows - 1, min(most, vectors.rows)).astype(int))
