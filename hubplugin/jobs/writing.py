"""Offsets of a fitted model into a store: compare, write, activate. How they are kept is the store's to say."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.jobs.comparison import Comparison, compared, one_pass
from hubplugin.jobs.sharded_store import ShardedStore, WrittenByShards
from hubplugin.jobs.spooled_gallery import SpooledGallery
from hubplugin.jobs.unjudged import Unjudged
from hubplugin.model import OffsetModel, Value, warn_if_swapped
from hubplugin.reductions import Compute
from hubplugin.selection import Judgement
from hubplugin.store import KEEP, Store
from hubplugin.vectors import Progress

logger = logging.getLogger(__name__)

CLOSING_PASSES = 3
"""How often a shared store is read again before the switch. Each pass finds what came during the one before, so
that more than one finds anything only where others write as fast as it reads."""

NAMED = 10
"""How many of the groups that stay neutral are named."""


@dataclass(frozen=True)
class Applied:
    """What `apply` or `refresh` did: the model, and of `scanned` targets how many had no offset by it before, and how
    many a different one. `written` is False after a dry run, which only counted them. neutral: the groups that have
    the offset 0, and why. notes: what was done to the store or, after a dry run, would be. judgement: what the guard
    saw before `apply`; None where it was not asked, or each group on its own."""

    model: OffsetModel
    scanned: int
    missing: int
    stale: int
    written: bool = True
    neutral: Mapping[Value, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    judgement: Judgement | None = None
    unjudged: Unjudged = field(default_factory=Unjudged)

    def __str__(self) -> str:
        text = (
            f"{self.scanned} targets, of which {self.missing} had no offset and {self.stale} another one; "
            f"{'active' if self.written else 'nothing was written; would be active'}: {self.model}"
        )
        if self.judgement is not None:
            tried, before, after = self.judgement.probes, self.judgement.uncorrected, self.judgement.candidate
            text += f"\ntried on {tried} held-out bank queries:\n  {before}\n  {after}"
            text += "".join(f"\nnote: {note}" for note in self.judgement.notes)
        if self.neutral:
            named = "; ".join(f"{value!r}: {why}" for value, why in itertools.islice(self.neutral.items(), NAMED))
            more = f"; and {len(self.neutral) - NAMED} more" if len(self.neutral) > NAMED else ""
            text += f"\nkept at offset 0: {named}{more}"
        if self.unjudged.count:
            text += f"\n{self.unjudged}"
        return "\n".join((text, *self.notes))


def refresh(
    store: Store,
    *,
    dry_run: bool = False,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> Applied:
    """Writes the offsets that are missing or stale under the active model, and no others. dry_run: only counts them."""
    found = store.correction()
    if found is None or not found.active:
        state = "a half-written correction; run apply again to finish it" if found else "no correction; apply one first"
        raise StoreError(f"{store.url} has {state}")
    if dry_run:
        return unwritten(store, found.model, Compute(device, memory, progress))
    return write(store, found.model, device=device, memory=memory, progress=progress)


def write(
    store: Store,
    model: OffsetModel,
    *,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
    keep: int = KEEP,
) -> Applied:
    """Writes the offsets of a fitted `model` to everything in `store` and activates them.

    keep: how many versions stay beside it, to return to by `rollback`. So that a store never holds more than these, the
    version being written included, the oldest goes before a new one is begun.
    """
    require_match(model, store)
    warn_if_swapped(model, store.count())
    gallery = None
    if model.gallery is None:
        gallery = SpooledGallery(store, progress)
        model = model.centred_on(gallery.vectors, device=device, memory=memory, progress=progress)
    return written(store, model, gallery, Compute(device, memory, progress), keep)


def written(
    store: Store, model: OffsetModel, gallery: SpooledGallery | ShardedStore | None, compute: Compute, keep: int = KEEP
) -> Applied:
    """`write`, of what was just read from the store, the `gallery`, where there is one; by its workers, where it has
    some."""

    def once(closing: bool) -> Comparison | WrittenByShards:
        is_new = writing.found != "active"
        if isinstance(gallery, ShardedStore):
            return gallery.written(writing.share(), compute, closing, is_new)
        read = gallery if store.shared and writing.found == "nothing" else None
        what = "closing" if closing else "writing offsets"
        batches = writing.scan() if read is None else writing.changed(read.batches()) if closing else read.batches()
        return one_pass(Comparison(store, model, compute, what, first=is_new), writing, batches)

    active = next((version for version in store.versions() if version.state == "active"), None)
    replaces = active is not None and active.model != model.fingerprint
    if replaces:
        store.prune(max(keep - 1, 0), compute.progress)
    with store.begin(model, compute.progress) as writing:
        first = once(closing=False)
        for _ in range(CLOSING_PASSES if store.shared and writing.found != "active" else 0):
            again = once(closing=True)
            if not again.missing + again.stale:
                break
        logger.info("%s: %d offsets written, activating", store.url, first.missing + first.stale)
        writing.activate()
    logger.info("%s: active is %s", store.url, model)
    if replaces and keep == 0:
        store.prune(0, compute.progress)
    return Applied(model, first.scanned, first.missing, first.stale, notes=store.notes(), unjudged=first.unjudged)


def unwritten(store: Store, model: OffsetModel, compute: Compute) -> Applied:
    """`model` compared with what `store` has, and nothing written."""
    found = compared(store, model, compute, "comparing offsets")
    return Applied(model, found.scanned, found.missing, found.stale, False, unjudged=found.unjudged)


def usable(device: str, memory: int | str, progress: Progress | None, keep: int) -> Compute:
    """With what offsets are computed; raises InputError for what cannot be used, before a gallery is read."""
    if keep < 0:
        raise InputError(Parameter("keep", keep), ": expected 0 or more")
    compute = Compute(device, memory, progress)
    compute.torch_device()
    compute.bytes()
    return compute


def require_match(model: OffsetModel, store: Store) -> None:
    """Raises InputError if `model` cannot give offsets to the vectors of `store`."""
    if model.dim != store.dim:
        raise InputError(f"the model has {model.dim} dimensions, {store.url} has {store.dim}; fit one on its vectors")
    if model.metric is not store.metric:
        raise InputError(
            f"the model is for {model.metric.value}, {store.url} ranks by {store.metric.value}; fit with ",
            Parameter("metric", store.metric.value),
        )
