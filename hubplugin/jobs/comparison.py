"""What lies in a store beside what a model gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hubplugin.jobs.unjudged import Unjudged, offsets_of_all
from hubplugin.methods.robust import floor_of
from hubplugin.model import GroupedModel, OffsetModel
from hubplugin.reductions import Compute
from hubplugin.store import Batch, Store, Writing

BINS = 40
"""Of the distribution of the stored offsets."""


@dataclass
class Comparison:
    """Of the targets `scanned` so far, how many have no offset (`missing`), how many one that `model` does not give
    (`stale`), how many something else in its place (`foreign`), and which the model cannot judge. counts: how many
    stored offsets lie between one of `edges` and the next; None for a model that knows no gallery. what: the name of
    the work, for progress. first: whether the model is written for the first time, to its members. Later what has no
    right offset is a newcomer, which a robust model tells from members; a member keeps what it has."""

    store: Store
    model: OffsetModel
    compute: Compute
    what: str
    first: bool = False
    scanned: int = 0
    missing: int = 0
    stale: int = 0
    foreign: int = 0
    unjudged: Unjudged = field(default_factory=Unjudged)
    edges: np.ndarray | None = None
    counts: np.ndarray | None = None

    def __post_init__(self) -> None:
        self._total, self._precision = self.store.count(), self.store.precision
        self._quarantined = set(self.store.quarantined().last)
        self._floor = floor_of(self.model) if self._quarantined else 0.0
        if self.model.gallery is not None:
            self.edges = np.linspace(self.model.gallery.smallest, self.model.gallery.largest, BINS + 1)
            self.counts = np.zeros(BINS, np.int64)

    def offsets(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """What the model gives to the targets of `batch`, float32 [b], and whose stored offset differs, bool [b]."""
        absent = np.isnan(batch.offsets)
        offsets = self._offsets(self.model.members, batch, self.unjudged)
        differs = self._differs(batch, offsets)
        rows = np.flatnonzero(absent | differs)
        if self.model.bound is not None and len(rows):
            some = batch.some(rows)
            of_newcomers = self._offsets(self.model, some, Unjudged())
            newcomers = ~absent[rows] & ~self._differs(some, of_newcomers)
            differs[rows[newcomers]] = False
            given = newcomers | (not self.first)
            offsets[rows[given]] = of_newcomers[given]
        self._hold(batch, offsets, differs)
        self.missing += int(absent.sum())
        self.stale += int(differs.sum())
        self.foreign += batch.foreign
        if self.edges is not None and self.counts is not None:
            inside = np.clip(batch.offsets[~absent], self.edges[0], self.edges[-1])
            self.counts += np.histogram(inside, self.edges)[0]
        return offsets, absent | differs

    def _hold(self, batch: Batch, offsets: np.ndarray, differs: np.ndarray) -> None:
        """Gives the targets of `batch` that are in quarantine their offset, whatever the model says."""
        if self._quarantined:
            held = np.array([name in self._quarantined for name in batch.ids], bool)
            offsets[held] = self._floor
            differs[held] = self._differs(batch, offsets)[held]

    def _offsets(self, model: OffsetModel, batch: Batch, unjudged: Unjudged) -> np.ndarray:
        return offsets_of_all(model, batch, unjudged, unit=self.store.unit, compute=self.compute)

    def _differs(self, batch: Batch, offsets: np.ndarray) -> np.ndarray:
        """Whose stored offset is another one than `offsets` [b], bool [b]."""
        apart: np.ndarray = np.abs(batch.offsets - offsets) > self._precision  # of NaN, none
        return apart

    def done(self, batch: Batch) -> None:
        """`batch` is finished with."""
        self.scanned += len(batch.ids)
        self.compute.report(self.what, min(self.scanned, self._total), self._total)


def one_pass(comparison: Comparison, writing: Writing, batches: Iterable[Batch]) -> Comparison:
    """Writes the offsets of `batches` that are missing or differ."""
    for batch in batches:
        offsets, wrong = comparison.offsets(batch)
        if wrong.all():
            writing.write(batch, offsets)
        elif wrong.any():
            writing.write(batch.some(np.flatnonzero(wrong)), offsets[wrong])
        comparison.done(batch)
    return comparison


def compared(store: Store, model: OffsetModel, compute: Compute, what: str) -> Comparison:
    """Everything in `store` beside `model`."""
    found = Comparison(store, model, compute, what)
    for batch in store.scan(group_key(model)):
        found.offsets(batch)
        found.done(batch)
    return found


def group_key(model: OffsetModel) -> str | None:
    """The key within whose values `model` has offsets, if it has them within groups."""
    return model.key if isinstance(model, GroupedModel) else None
