"""The job on a store: scan, fit, check, write, verify, activate. It computes nothing and knows no store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin.fitting import fit
from hubplugin.model import OffsetModel
from hubplugin.store import Batch, Store
from hubplugin.vectors import Progress, VectorLike, Vectors, as_vectors, spool

TOLERANCE = 1e-5
"""Offsets that differ by less are the same: float32 rounding of a sum in another order."""


@dataclass(frozen=True)
class Applied:
    """What `apply` or `refresh` did: the model, and of `scanned` targets how many had no offset, and how many a
    different one, before."""

    model: OffsetModel
    scanned: int
    missing: int
    stale: int


def apply(
    store: Store,
    query_bank: VectorLike,
    method: str = "dbsn",
    target_bank: VectorLike | None = None,
    *,
    check: Callable[[OffsetModel, Vectors], None] | None = None,
    device: str = "auto",
    memory: int | str = "512MiB",
    progress: Progress | None = None,
    **parameters: Any,
) -> Applied:
    """Fits offsets on everything in `store`, writes them, and activates them in one step.

    `check(model, gallery)` raises CorrectionRefused if the correction would not help. A run that was cut off is
    taken up where it stopped if it is started again with the same arguments.
    Raises InputError for banks or parameters, StoreError for the store; searches are unchanged in both cases.
    """
    bank = as_vectors(query_bank, "query bank")
    if bank.dim != store.dim:
        raise InputError(
            f"{bank.name} has {bank.dim} dimensions, {store.url} has {store.dim}; embed the queries with its model"
        )
    gallery = spool(_reported(store, "reading the gallery", progress), store.url)
    model = fit(
        bank, method, gallery, target_bank, store.metric, device=device, memory=memory, progress=progress, **parameters
    )
    if check is not None:
        check(model, gallery)
    return write(store, model, device=device, memory=memory, progress=progress)


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
    if model.gallery is None:
        gallery = spool(_reported(store, "reading the gallery", progress), store.url)
        model = model.centred_on(gallery, device=device, memory=memory, progress=progress)
    found = store.correction()
    amends = found is not None and found.active and found.model.fingerprint == model.fingerprint
    scanned = missing = stale = 0
    total = store.count()
    for batch in store.scan(store.begin(model)):
        offsets = model.offsets(batch.vectors, device=device, memory=memory)
        absent = np.isnan(batch.offsets)
        differs = ~absent & (np.abs(batch.offsets - offsets) > TOLERANCE)
        wrong = absent | differs if amends else np.ones(len(offsets), bool)
        if wrong.all():
            store.write(batch, offsets)
        elif wrong.any():
            rows = np.flatnonzero(wrong).tolist()
            part = Batch([batch.ids[row] for row in rows], batch.vectors[rows], batch.offsets[rows], batch.resume)
            store.write(part, offsets[rows])
        scanned, missing, stale = scanned + len(offsets), missing + int(absent.sum()), stale + int(differs.sum())
        if progress is not None:
            progress("writing offsets", min(scanned, total), total)
    store.activate()
    return Applied(model, scanned, missing, stale)


def require_match(model: OffsetModel, store: Store) -> None:
    """Raises InputError if `model` cannot give offsets to the vectors of `store`."""
    if model.dim != store.dim:
        raise InputError(f"the model has {model.dim} dimensions, {store.url} has {store.dim}; fit one on its vectors")
    if model.metric is not store.metric:
        raise InputError(
            f"the model is for {model.metric.value}, {store.url} ranks by {store.metric.value}; "
            f"fit with metric='{store.metric.value}'"
        )


def _reported(store: Store, what: str, progress: Progress | None) -> Any:
    total, done = store.count(), 0
    for batch in store.scan():
        yield batch.vectors
        done += len(batch.vectors)
        if progress is not None:
            progress(what, min(done, total), total)
