"""A correction of a store: read it, fit, check, write, activate. What offsets are is the model's to say, and how they
are kept the store's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hubplugin.errors import InputError
from hubplugin.fitting import fit
from hubplugin.guard import check, check_bank
from hubplugin.jobs.comparison import compared
from hubplugin.jobs.groups import fit_within
from hubplugin.jobs.spooled_gallery import SpooledGallery
from hubplugin.jobs.writing import Applied, write, written
from hubplugin.methods import FitInput, asked_for
from hubplugin.model import GroupedModel, OffsetModel, Value
from hubplugin.reductions import Compute
from hubplugin.store import Store
from hubplugin.tuning import Pairs, choose
from hubplugin.vectors import Progress, VectorLike, as_vectors


def apply(
    store: Store,
    query_bank: VectorLike,
    method: str = "blend",
    target_bank: VectorLike | None = None,
    *,
    pairs: Pairs = None,
    same_kind: bool = False,
    group_by: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
    **parameters: Any,
) -> Applied:
    """Fits offsets on everything in `store`, writes them, and activates them in one step.

    query_bank, target_bank, method, parameters: as in `hubplugin.fit`.

    The correction is first tried on held-out bank queries (`guard.check`), which raises CorrectionRefused if it
    would do harm; force=True applies it untried. pairs: see `tuning.Pairs`. same_kind: documents are asked by
    documents, see `hubplugin.judge`. group_by: a key of the targets, where searches are filtered by its value: offsets
    are fitted, centred and tried within each value's own targets, by one method for all; targets of a value that is
    refused or has too few of them keep the offset 0. A run that was cut off while writing is taken up where it stopped,
    with its own model, if it is started again with the same banks, method and parameters; method="auto" chooses again
    first. dry_run=True does all of it but the writing, and counts what would be written.
    Raises InputError for banks or parameters, StoreError for the store; searches are unchanged in every case.
    """
    if not isinstance(store, Store):
        raise InputError(f"expected a store, got {type(store).__name__}; open one: hubplugin.open_store(URL)")
    bank = as_vectors(query_bank, "query bank")
    if bank.dim != store.dim:
        raise InputError(
            f"{bank.name} has {bank.dim} dimensions, {store.url} has {store.dim}; embed the queries with its model"
        )
    # What cannot be used is told before the gallery is read.
    computing: dict[str, Any] = {"device": device, "memory": memory, "progress": progress}
    compute = Compute(**computing)
    compute.torch_device()
    compute.bytes()
    configuration = asked_for(method, parameters, apply)
    given = FitInput.read(bank, None, target_bank, store.metric, compute)
    if configuration is not None:
        configuration.require_banks(given)
    look: dict[str, Any] = {"pairs": pairs, "same_kind": same_kind, "metric": store.metric}
    if not store.count():
        raise InputError(f"{store.url} is empty; add vectors, then correct it")
    if not force:
        check_bank(bank, None, configuration, target_bank, compute=compute, **look)
    if group_by is not None:
        store.group_by(group_by)
    cut_off = store.correction()
    if (
        cut_off is not None
        and not (cut_off.active or dry_run)
        and configuration is not None
        and configuration.made(cut_off.model, given)
        and _key(cut_off.model) == group_by
    ):
        return write(store, cut_off.model, **computing)
    gallery = SpooledGallery(store, progress, grouped=group_by is not None)
    neutral: dict[Value, str] = {}
    judgement = None
    if group_by is None:
        if not force:
            # Before the search for a method.
            check_bank(bank, gallery.vectors, configuration, target_bank, compute=compute, **look)
        model = fit(bank, method, gallery.vectors, target_bank, store.metric, pairs=pairs, **computing, **parameters)
        if not force:
            judgement = check(
                bank, gallery.vectors, model.method, target_bank,
                **look, **computing, **model.parameters,
            )  # fmt: skip
    else:
        if configuration is None:
            found = choose(bank, gallery.vectors, target_bank, pairs=pairs, metric=store.metric, **computing)
            configuration = found.winner
        given = replace(given, targets=gallery.vectors)
        model, neutral = fit_within(
            group_by,
            gallery.groups(),
            gallery.vectors.rows,
            bank,
            configuration,
            given,
            target_bank,
            pairs,
            same_kind,
            force,
        )
    if dry_run:
        beside = compared(store, model, store.scan(), compute, "comparing offsets")
        return Applied(
            model, beside.scanned, beside.missing, beside.stale, False,
            neutral, store.plan(), judgement, beside.unjudged,
        )  # fmt: skip
    return replace(written(store, model, gallery, compute), neutral=neutral, judgement=judgement)


def _key(model: OffsetModel) -> str | None:
    return model.key if isinstance(model, GroupedModel) else None
