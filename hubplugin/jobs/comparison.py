"""What lies in a store beside what a model gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hubplugin.jobs.unjudged import Unjudged, offsets_of_all
from hubplugin.model import GroupedModel, OffsetModel
from hubplugin.reductions import Compute
from hubplugin.store import Batch, Store


@dataclass
class Comparison:
    """Of the targets `scanned` so far, how many have no offset (`missing`), how many one that `model` does not give
    (`stale`), how many something else in its place (`foreign`), and which the model cannot judge. what: the name of
    the work, for progress."""

    store: Store
    model: OffsetModel
    compute: Compute
    what: str
    scanned: int = 0
    missing: int = 0
    stale: int = 0
    foreign: int = 0
    unjudged: Unjudged = field(default_factory=Unjudged)

    def __post_init__(self) -> None:
        self._total, self._precision = self.store.count(), self.store.precision

    def offsets(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """What the model gives to the targets of `batch`, float32 [b], and whose stored offset differs, bool [b]."""
        offsets = offsets_of_all(self.model, batch, self.unjudged, unit=self.store.unit, compute=self.compute)
        absent = np.isnan(batch.offsets)
        differs = ~absent & (np.abs(batch.offsets - offsets) > self._precision)
        self.missing += int(absent.sum())
        self.stale += int(differs.sum())
        self.foreign += batch.foreign
        return offsets, absent | differs

    def done(self, batch: Batch) -> None:
        """`batch` is finished with."""
        self.scanned += len(batch.ids)
        self.compute.report(self.what, min(self.scanned, self._total), self._total)


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
