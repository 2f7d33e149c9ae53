"""What correction lies in a store, and what it does there."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hubplugin.jobs.comparison import compared
from hubplugin.jobs.suspects import Suspects, examined, has_bank
from hubplugin.jobs.unjudged import Unjudged
from hubplugin.measures.hubness import skewness_by_chance
from hubplugin.methods.robust import PROBES
from hubplugin.metric import Metric
from hubplugin.reductions import Compute
from hubplugin.selection.trials import OCCURRENCE
from hubplugin.store import Correction, Id, Store
from hubplugin.vectors import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found: the correction, if any, and of `count` targets how many lack an offset, how many have one
    that their vector no longer gives, and how many carry something else in its place. skewness: of the 10-occurrence
    of `probes` bank queries over the targets as they are now, searched raw and corrected; None where it was not
    measured. suspects: which targets look planted, measured likewise. finds: by id, how many of these queries find a
    target, raw and corrected. offsets: edges, and how many stored offsets lie between one and the next.
    """

    url: str
    metric: Metric
    dim: int
    count: int
    correction: Correction | None
    missing: int = 0
    stale: int = 0
    foreign: int = 0
    skewness: tuple[float, float] | None = None
    probes: int = 0
    notes: Sequence[str] = ()
    unjudged: Unjudged = field(default_factory=Unjudged)
    suspects: Suspects | None = None
    finds: tuple[Mapping[Id, int], Mapping[Id, int]] | None = field(default=None, repr=False)
    offsets: tuple[Sequence[float], Sequence[int]] | None = field(default=None, repr=False)

    @property
    def alarms(self) -> list[str]:
        """What somebody should look at now, a line each."""
        return [] if self.suspects is None else self.suspects.alarms

    def __str__(self) -> str:
        text = f"{self.url}: {self.count} targets, {self.dim} dimensions, {self.metric.value}"
        if self.correction is None:
            return f"{text}\nno correction"
        model, state = self.correction.model, "active" if self.correction.active else "half-written, searches are raw"
        text += f"\n{model}, {state}\nfingerprint {model.fingerprint}, query bank {model.bank_fingerprint}"
        if model.gallery is not None:
            text += (
                f"\noffsets from {model.gallery.smallest:+.4f} to {model.gallery.largest:+.4f}, "
                f"standard deviation {model.gallery.deviation:.4f}"
            )
        lines = [text, *self.notes, *([str(self.unjudged)] if self.unjudged.count else [])]
        if self.skewness is not None:
            raw, corrected = self.skewness
            chance = skewness_by_chance(self.probes, OCCURRENCE, self.count)
            lines.append(
                f"hubness now: skewness of the {OCCURRENCE}-occurrence of {self.probes} queries {raw:.2f} raw, "
                f"{corrected:.2f} corrected; by chance it would be {chance:.2f}"
            )
        health = "every target has its offset" if not self.missing + self.stale else "run refresh"
        lines.append(f"{self.missing} missing, {self.stale} stale: {health}")
        if self.foreign:
            lines.append(f"{self.foreign} with something in the place of offsets that this correction did not write")
        lines += [] if self.suspects is None else [str(self.suspects)]
        return "\n".join(lines)


def inspect(
    store: Store,
    *,
    probes: int = PROBES,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> Inspection:
    """What correction lies in `store`, whether every target has the offset that its vector gives, and what it does to
    hubness now, seen by searching for `probes` queries of the bank; 0 searches for none."""
    found = store.correction()
    logger.info("%s: inspecting", store.url)
    compute = Compute(device, memory, progress)
    health: dict[str, Any] = {}
    if found is not None and found.active and probes and has_bank(found.model):
        named, beside = examined(store, found.model, compute, probes)
        health = {"skewness": named.skewness, "probes": named.probes, "suspects": named, "finds": named.finds}
    elif found is not None:
        beside = compared(store, found.model, compute, "checking offsets")
    if found is not None:
        health |= {name: getattr(beside, name) for name in ("missing", "stale", "foreign", "unjudged")}
        if beside.edges is not None and beside.counts is not None:
            health["offsets"] = (beside.edges.tolist(), beside.counts.tolist())
    logger.info("%s: inspected", store.url)
    return Inspection(store.url, store.metric, store.dim, store.count(), found, notes=store.notes(), **health)
