"""Whether newcomers look planted when they are written, and what becomes of those that do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hubplugin.compute import Compute, count_reaching
from hubplugin.errors import InputError
from hubplugin.methods.robust import floor_of
from hubplugin.model import Dot, OffsetModel
from hubplugin.vectors import as_vectors

logger = logging.getLogger(__name__)

NAMED = 5
"""How many flagged targets an error names."""


@dataclass(frozen=True)
class Admission:
    """What a writer does with newcomers that look planted.

    A newcomer is flagged if its penalty is beyond those of the whole gallery of the fit, or if it lies so far from the
    bank that its offset is capped; and, by a robust model, if without its bound it would stand in the 10 nearest of
    more than `share` of the bank: by default the largest share that any target of the gallery had at the fit.

    policy: "admit" writes it with its offset and logs a warning; "quarantine" writes it with an offset with which it is
    not found; "refuse" raises InputError before anything is written. A Qdrant client also enters what it keeps out into
    the quarantine list of the collection, so that it stays there; a Faiss index in memory has no list, and the next
    refresh gives it the model's offset: keep what the hook is told. hook: is called with the id of each flagged
    newcomer, or its row where it has none yet, and the reason.
    """

    policy: Literal["admit", "quarantine", "refuse"] = "admit"
    share: float | None = None
    hook: Callable[[int | str, str], None] | None = None

    def __post_init__(self) -> None:
        if self.policy not in ("admit", "quarantine", "refuse"):
            raise InputError(f"policy={self.policy!r}: use 'admit', 'quarantine' or 'refuse'")
        if self.share is not None and not 0 < self.share <= 1:
            raise InputError(f"share={self.share!r}: it is a share of the bank, above 0 and at most 1")

    def offsets(
        self, model: OffsetModel, vectors: np.ndarray, ids: Sequence[int | str], compute: Compute | None = None
    ) -> np.ndarray:
        """The offsets with which `vectors` [b, d], called `ids`, are written: float32 [b]."""
        compute = compute or Compute()
        offsets = model.offsets(vectors, device=compute.device, memory=compute.memory)
        reasons = self.reasons(model, vectors, compute)
        self.tell({ids[row]: reason for row, reason in reasons.items()}, len(vectors))
        if reasons and self.policy == "quarantine":
            offsets[list(reasons)] = floor_of(model)
        return offsets

    def tell(self, reasons: Mapping[int | str, str], newcomers: int) -> None:
        """Logs why some of the newcomers are flagged, by id, and calls the hook; raises InputError to refuse all."""
        for name, reason in reasons.items():
            logger.warning("newcomer %r looks planted: %s", name, reason)
            if self.hook is not None:
                self.hook(name, reason)
        if reasons and self.policy == "refuse":
            named = "; ".join(f"{name!r}: {reason}" for name, reason in list(reasons.items())[:NAMED])
            raise InputError(f"{len(reasons)} of {newcomers} newcomers look planted, and none is written: {named}")

    def reasons(self, model: OffsetModel, vectors: np.ndarray, compute: Compute) -> dict[int, str]:
        """Why some of `vectors` are flagged, by row."""
        if model.gallery is None:
            return {}
        targets, gallery = as_vectors(vectors, "newcomers"), model.gallery
        plain = model.raw_offsets(targets, compute) - model.centre
        found = {}
        for row in np.flatnonzero(plain > gallery.largest + gallery.rounding).tolist():
            found[row] = "it lies farther from the bank than all targets of the gallery"
        for row in np.flatnonzero(plain < gallery.smallest - gallery.rounding).tolist():
            found[row] = f"its penalty {-plain[row]:.4f} is beyond the largest of the gallery, {-gallery.smallest:.4f}"
        if model.bound is not None and not isinstance(model.terms[0], Dot):
            similarities, m = compute.similarities(model.terms[0].bank, model.metric), len(model.bound.levels)
            counts = count_reaching(similarities, targets, model.bound.levels, np.minimum(plain, gallery.cap))
            most = model.bound.largest if self.share is None else self.share
            for row in np.flatnonzero(counts > most * m).tolist():
                found[row] = f"it would be found by {counts[row] / m:.1%} of the bank, where {most:.1%} is the most"
        return found
