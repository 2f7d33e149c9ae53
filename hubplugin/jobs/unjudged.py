"""Offsets of everything in a store, also of vectors that its model cannot judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.store import Batch

if TYPE_CHECKING:
    from hubplugin.reductions import Compute

UNIT = 1e-2
"""How far from 1 the length of a vector may lie that counts as normalised; float16 keeps it within 1e-3."""

NAMED = 10
"""How many targets are named."""


@dataclass
class Unjudged:
    """The targets that a model could not judge: how many, and what is wrong with the first of them, by id."""

    count: int = 0
    named: dict[int | str, str] = field(default_factory=dict)

    def note(self, ids: Sequence[int | str], vectors: np.ndarray, rows: np.ndarray) -> None:
        self.count += len(rows)
        for row in rows[: NAMED - len(self.named)].tolist():
            length = float(np.linalg.norm(vectors[row].astype(np.float64)))
            self.named[ids[row]] = f"length {length:.4g}" if np.isfinite(length) else "not finite"

    def __str__(self) -> str:
        which = ", ".join(f"{name} ({what})" for name, what in self.named.items())
        more = f" and {self.count - len(self.named)} more" if self.count > len(self.named) else ""
        return f"{self.count} with vectors that the model cannot judge have its smallest offset: {which}{more}"


def offsets_of_all(model: OffsetModel, batch: Batch, unjudged: Unjudged, *, unit: bool, compute: Compute) -> np.ndarray:
    """Offsets of the vectors of `batch` by `model`, float32 [b]; the ones it cannot judge are added to `unjudged`.

    Those are vectors that are not finite, and for a model of cosine vectors of length 0 and, where `unit` says that the
    store does not normalise, of another length than 1. They get the smallest offset of the model's gallery. A neutral
    one would rank a vector that somebody planted above most others, and no honest one loses much by it: the store ranks
    what has another length, or none, by something else than cosine anyway.
    """

    def judged_by_model(batch: Batch) -> np.ndarray:
        return model.offsets(batch.vectors, groups=batch.groups, device=compute.device, memory=compute.memory)

    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.linalg.norm(batch.vectors.astype(np.float64), axis=1)
    judged = np.isfinite(lengths)
    if model.metric is Metric.COSINE:
        judged &= (np.abs(lengths - 1) <= UNIT) if unit else (lengths > 0)
    if judged.all():
        return judged_by_model(batch)
    rows = np.flatnonzero(judged)
    unjudged.note(batch.ids, batch.vectors, np.flatnonzero(~judged))
    offsets = np.full(len(batch.vectors), 0.0 if model.gallery is None else model.gallery.smallest, np.float32)
    if len(rows):
        offsets[rows] = judged_by_model(batch.some(rows))
    return offsets
