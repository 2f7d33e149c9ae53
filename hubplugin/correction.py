"""The job on a store: scan, fit, check, write, verify, activate. It computes nothing and knows no store."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin.fitting import fit
from hubplugin.methods import FitInput, configure
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.reductions import Compute
from hubplugin.store import Batch, Correction, Store
from hubplugin.tuning import Pairs, check
from hubplugin.vectors import Progress, VectorLike, as_vectors, spool

CLOSING_PASSES = 3
"""How often a shared store is read again before the switch. Each pass finds what came during the one before, so
that more than one finds anything only where others write as fast as it reads."""


@dataclass(frozen=True)
class Applied:
    """What `apply` or `refresh` did: the model, and of `scanned` targets how many had no offset, and how many a
    different one, before. `written` is False after a dry run, which only counted them."""

    model: OffsetModel
    scanned: int
    missing: int
    stale: int
    written: bool = True

    def __str__(self) -> str:
        return (
            f"{self.scanned} targets, of which {self.missing} had no offset and {self.stale} another one; "
            f"{'active' if self.written else 'nothing was written; would be active'}: {self.model}"
        )


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found: the correction, if any, and of `count` targets how many lack an offset, and how many
    have one that their vector no longer gives."""

    url: str
    metric: Metric
    dim: int
    count: int
    correction: Correction | None
    missing: int = 0
    stale: int = 0
    notes: Sequence[str] = ()

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
        health = "every target has its offset" if not self.missing + self.stale else "run refresh"
        return "\n".join((text, *self.notes, f"{self.missing} missing, {self.stale} stale: {health}"))


def apply(
    store: Store,
    query_bank: VectorLike,
    method: str = "auto",
    target_bank: VectorLike | None = None,
    *,
    pairs: Pairs = None,
    force: bool = False,
    dry_run: bool = False,
    device: str = "auto",
    memory: int | str = "512MiB",
    progress: Progress | None = None,
    **parameters: Any,
) -> Applied:
    """Fits offsets on everything in `store`, writes them, and activates them in one step.

    query_bank, target_bank, method, parameters: as in `hubplugin.fit`; by default the method and its parameters are
    chosen on held-out bank queries, since no setting is safe on every gallery.

    The correction is first tried on held-out bank queries (`tuning.check`), which raises CorrectionRefused if it
    would not help; force=True applies it untried. pairs: see `tuning.Pairs`. A run that was cut off while writing is
    taken up where it stopped, with its own model, if it is started again with the same banks, method and parameters;
    method="auto" chooses again first. dry_run=True does all of it but the writing, and counts what would be written.
    Raises InputError for banks or parameters, StoreError for the store; searches are unchanged in every case.
    """
    bank = as_vectors(query_bank, "query bank")
    if bank.dim != store.dim:
        raise InputError(
            f"{bank.name} has {bank.dim} dimensions, {store.url} has {store.dim}; embed the queries with its model"
        )
    cut_off = store.correction()
    if cut_off is not None and not cut_off.active and method != "auto" and not dry_run:
        given = FitInput.read(bank, None, target_bank, store.metric, Compute(device, memory))
        if configure(method, **parameters).made(cut_off.model, given):
            return write(store, cut_off.model, device=device, memory=memory, progress=progress)
    gallery = _Gallery(store, progress)
    model = fit(
        bank, method, gallery.vectors, target_bank, store.metric,
        device=device, memory=memory, progress=progress, pairs=pairs, **parameters,
    )  # fmt: skip
    if not force:
        check(
            bank, gallery.vectors, model.method, target_bank,
            pairs=pairs, metric=store.metric, device=device, memory=memory, progress=progress, **model.parameters,
        )  # fmt: skip
    if dry_run:
        counts = _compared(store, model, "comparing offsets", device, memory, progress)
        return Applied(model, *counts, written=False)
    return _write(store, model, gallery, device, memory, progress)


def refresh(
    store: Store, *, device: str = "auto", memory: int | str = "512MiB", progress: Progress | None = None
) -> Applied:
    """Writes the offsets that are missing or stale under the active model, and no others."""
    found = store.correction()
    if found is None or not found.active:
        state = "a half-written correction; run apply again to finish it" if found else "no correction; apply one first"
        raise StoreError(f"{store.url} has {state}")
    return write(store, found.model, device=device, memory=memory, progress=progress)


def write(
    store: Store,
    model: OffsetModel,
    *,
    device: str = "auto",
    memory: int | str = "512MiB",
    progress: Progress | None = None,
) -> Applied:
    """Writes the offsets of a fitted `model` to everything in `store` and activates them."""
    require_match(model, store)
    gallery = None
    if model.gallery is None:
        gallery = _Gallery(store, progress)
        model = model.centred_on(gallery.vectors, device=device, memory=memory, progress=progress)
    return _write(store, model, gallery, device, memory, progress)


def _write(
    store: Store,
    model: OffsetModel,
    gallery: _Gallery | None,
    device: str,
    memory: int | str,
    progress: Progress | None,
) -> Applied:
    """`write`, of what was just read from the store, the `gallery`, where there is one."""
    found = store.correction()
    lies = found is not None and found.model.fingerprint == model.fingerprint
    amends = found is not None and found.active and lies

    def one_pass(what: str, batches: Iterator[Batch], everything: bool) -> tuple[int, int, int]:
        """Of how many targets how many had no offset, and how many another one."""
        scanned = missing = stale = 0
        total = store.count()
        for batch in batches:
            offsets = model.offsets(batch.vectors, device=device, memory=memory)
            absent, differs = _differences(store, batch, offsets)
            wrong = np.ones(len(offsets), bool) if everything else absent | differs
            if wrong.all():
                store.write(batch, offsets)
            elif wrong.any():
                store.write(batch.some(np.flatnonzero(wrong)), offsets[wrong])
            scanned, missing, stale = scanned + len(offsets), missing + int(absent.sum()), stale + int(differs.sum())
            if progress is not None:
                progress(what, min(scanned, total), total)
        return scanned, missing, stale

    try:
        after = store.begin(model)
        # In a shared store a scan has the offsets of what is being written, so that only what lacks them is written.
        anew = store.scan(after) if gallery is None or lies or not store.shared else gallery.batches()
        first = one_pass("writing offsets", anew, not (amends or store.shared))
        for _ in range(CLOSING_PASSES if store.shared and not amends else 0):
            _, missing, stale = one_pass("closing", store.scan(), False)
            if not missing + stale:
                break
        store.activate()
    finally:
        store.release()
    return Applied(model, *first)


def inspect(
    store: Store, *, device: str = "auto", memory: int | str = "512MiB", progress: Progress | None = None
) -> Inspection:
    """What correction lies in `store`, and whether every target has the offset that its vector gives."""
    found, missing, stale = store.correction(), 0, 0
    if found is not None:
        _, missing, stale = _compared(store, found.model, "checking offsets", device, memory, progress)
    return Inspection(store.url, store.metric, store.dim, store.count(), found, missing, stale, store.notes())


def _compared(
    store: Store, model: OffsetModel, what: str, device: str, memory: int | str, progress: Progress | None
) -> tuple[int, int, int]:
    """How many targets there are, how many have no offset, and how many one that `model` would not give."""
    scanned = missing = stale = 0
    total = store.count()
    for batch in store.scan():
        absent, differs = _differences(store, batch, model.offsets(batch.vectors, device=device, memory=memory))
        scanned, missing, stale = scanned + len(absent), missing + int(absent.sum()), stale + int(differs.sum())
        if progress is not None:
            progress(what, min(scanned, total), total)
    return scanned, missing, stale


def _differences(store: Store, batch: Batch, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which targets of `batch` have no offset, and which one that is not in `offsets`: bool [b] each."""
    absent = np.isnan(batch.offsets)
    return absent, ~absent & (np.abs(batch.offsets - offsets) > store.precision)


def require_match(model: OffsetModel, store: Store) -> None:
    """Raises InputError if `model` cannot give offsets to the vectors of `store`."""
    if model.dim != store.dim:
        raise InputError(f"the model has {model.dim} dimensions, {store.url} has {store.dim}; fit one on its vectors")
    if model.metric is not store.metric:
        raise InputError(
            f"the model is for {model.metric.value}, {store.url} ranks by {store.metric.value}; "
            f"fit with metric='{store.metric.value}'"
        )


class _Gallery:
    """What a store holds, read once and kept on disk: its `vectors`, and, of a shared store, the batches they came in.

    So a fit reads them as often as it needs, and they are written without another scan.
    """

    def __init__(self, store: Store, progress: Progress | None):
        self._lines = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it goes with this object
        self.vectors = spool(self._read(store, progress), store.url)

    def _read(self, store: Store, progress: Progress | None) -> Iterator[np.ndarray]:
        total, done = store.count(), 0
        for batch in store.scan():
            if store.shared:
                print(json.dumps([batch.place, batch.ids]), file=self._lines)
            yield batch.vectors
            done += len(batch.vectors)
            if progress is not None:
                progress("reading the gallery", min(done, total), total)

    def batches(self) -> Iterator[Batch]:
        self._lines.seek(0)
        first = 0
        for line in self._lines:
            place, ids = json.loads(line)
            vectors = self.vectors.take(slice(first, first + len(ids)))
            first += len(ids)
            yield Batch(ids, vectors, np.full(len(ids), np.nan, np.float32), place=place)
