"""A correction of a store: read it, fit, check, write, activate. What offsets are is the model's to say, and how they
are kept the store's."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from hubplugin.cluster import Workspace, require_executor
from hubplugin.errors import InputError, Parameter
from hubplugin.jobs.comparison import group_key
from hubplugin.jobs.finds import counted
from hubplugin.jobs.groups import fit_within
from hubplugin.jobs.reach import require_reach
from hubplugin.jobs.sharded_store import ShardedStore
from hubplugin.jobs.spooled_gallery import SpooledGallery
from hubplugin.jobs.writing import Applied, unwritten, usable, written
from hubplugin.methods import FitInput, Method, asked_for
from hubplugin.methods.robust import bounded
from hubplugin.model import OffsetModel, Setting, Value
from hubplugin.selection import (
    Banks,
    Experiment,
    Judgement,
    Pairs,
    check_by,
    choose_by,
    require_kind,
    require_size,
)
from hubplugin.store import KEEP, Store
from hubplugin.texts import Embed, vectors_of
from hubplugin.vectors import Progress, VectorLike, Vectors

logger = logging.getLogger(__name__)


def apply(
    store: Store,
    query_bank: VectorLike | Sequence[str],
    method: str = "blend",
    target_bank: VectorLike | None = None,
    *,
    pairs: Pairs = None,
    same_kind: bool = False,
    group_by: str | None = None,
    robust: bool = False,
    force: bool = False,
    dry_run: bool = False,
    keep: int = KEEP,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
    embed: Embed = None,
    executor: Executor | None = None,
    shards: int | None = None,
    workspace: str | os.PathLike[str] | None = None,
    **parameters: Setting,
) -> Applied:
    """Fits offsets on everything in `store`, writes them, and activates them in one step.

    query_bank, target_bank, method, robust, parameters, embed: as in `hubplugin.fit`; robust not with group_by.

    The correction is first tried on held-out bank queries (`hubplugin.check`), which raises CorrectionRefused if it
    would do harm; force=True applies it untried. pairs: see `selection.Pairs`. same_kind: documents are asked by
    documents, see `hubplugin.judge`. group_by: a key of the targets, where searches are filtered by its value: offsets
    are fitted, centred and tried within each value's own targets, by one method for all; targets of a value that is
    refused or has too few of them keep the offset 0. A run that was cut off while writing is taken up where it stopped,
    with its own model, if it is started again with the same banks, method and parameters; method="auto" chooses again
    first. dry_run=True does all of it but the writing, and counts what would be written. keep: how many versions stay
    beside the new one, for `rollback`: one, because each takes as much space as the first and is kept up by writes.
    executor, shards, workspace: as in `hubplugin.fit`; the workers of the executor write, too (docs/scale.md).
    Raises InputError for banks or parameters, StoreError for the store; searches are unchanged in every case.
    """
    bank = bank_for(store, query_bank, embed, progress, group_by if robust else None)
    compute = usable(device, memory, progress, keep)
    configuration = asked_for(method, parameters, apply)
    banks = Banks.read(bank, target_bank, pairs, store.metric, compute, same_kind)
    if require_executor(executor, shards, workspace):
        _require_by_shards(banks, group_by, robust)
    _require_usable(store, banks, configuration, force)
    cut_off = None if dry_run else _cut_off(store, configuration, banks.given, group_by, robust)
    with ExitStack() as held:
        gallery: SpooledGallery | ShardedStore
        if executor is not None:
            gallery = ShardedStore(store, shards, executor, held.enter_context(Workspace(workspace)), compute)
        elif cut_off is None:
            gallery = SpooledGallery(store, progress, group_by, banks.clicks)
        if cut_off is not None:
            return written(store, cut_off, None if executor is None else gallery, compute, keep)
        fitted = _fitted(banks.against(gallery.vectors, gallery.rows), configuration, gallery, group_by, force, robust)
        if not force and group_by is None:
            require_reach(fitted.model, bank, gallery.vectors, compute)
        if dry_run:
            return fitted.told(replace(unwritten(store, fitted.model, compute), notes=store.plan()))
        return fitted.told(written(store, fitted.model, gallery, compute, keep))


def _require_by_shards(banks: Banks, group_by: str | None, robust: bool) -> None:
    """Raises InputError for what needs all targets in one place."""
    if group_by is not None or banks.clicks is not None or robust:
        what = "clicks" if banks.clicks is not None else "groups" if group_by is not None else "a bound"
        raise InputError(f"{what} need all targets in one process: leave ", Parameter("executor"), " out")


def _require_usable(store: Store, banks: Banks, configuration: Method | None, force: bool) -> None:
    """Raises what can be told before the gallery is read."""
    if configuration is not None:
        configuration.require_banks(banks.given)
    if not store.count():
        raise InputError(f"{store.url} is empty; add vectors, then correct it")
    if not force:
        require_size(banks, configuration)


def bank_for(
    store: Store,
    query_bank: VectorLike | Sequence[str],
    embed: Embed = None,
    progress: Progress | None = None,
    grouped_and_robust: str | None = None,
) -> Vectors:
    """`query_bank` as a bank for `store`; raises InputError if it cannot be one."""
    if not isinstance(store, Store):
        raise InputError(f"expected a store, got {type(store).__name__}; open one: hubplugin.open_store(URL)")
    if grouped_and_robust is not None:
        raise InputError(
            Parameter("robust", True), " bounds offsets over a whole gallery: leave out ", Parameter("group_by")
        )
    bank = vectors_of(query_bank, embed, progress=progress)
    if bank.dim != store.dim:
        raise InputError(
            f"{bank.name} has {bank.dim} dimensions, {store.url} has {store.dim}; embed the queries with its model"
        )
    return bank


@dataclass(frozen=True)
class Fitted:
    """A model to be written, and what was tried before: see `Applied`."""

    model: OffsetModel
    judgement: Judgement | None = None
    neutral: Mapping[Value, str] = field(default_factory=dict)

    def told(self, done: Applied) -> Applied:
        """`done`, with what was tried before."""
        return replace(done, neutral=self.neutral, judgement=self.judgement)


def _fitted(
    banks: Banks,
    configuration: Method | None,
    gallery: SpooledGallery | ShardedStore,
    group_by: str | None,
    force: bool,
    robust: bool,
) -> Fitted:
    """A model for the whole gallery, or for its groups. configuration: None where it is chosen."""
    named = "auto" if configuration is None else configuration.name
    logger.info("fitting %s on %d bank queries", named, len(banks.given.query_bank))
    judgement = None
    with closing(Experiment(banks, robust=robust)) as experiment:
        guarded = group_by is None and not force
        if guarded:
            require_kind(experiment)  # before the search for a method
        if configuration is None:
            configuration = choose_by(experiment).winner
        configuration = configuration.resolved(banks.given)
        if guarded:
            judgement = check_by(experiment, configuration)
    if group_by is None:
        model = configuration.fit(banks.given)
        logger.info("fitted %s", model)
        model = bounded(model, banks.given) if robust else model
        return Fitted(counted(model, banks.given) if isinstance(gallery, SpooledGallery) else model, judgement)
    assert isinstance(gallery, SpooledGallery)
    model, neutral = fit_within(banks, configuration, group_by, gallery.groups(), force)
    return Fitted(model, neutral=neutral)


def _cut_off(
    store: Store, configuration: Method | None, given: FitInput, group_by: str | None, robust: bool
) -> OffsetModel | None:
    """The model whose writing was cut off, if it is the one that is asked for."""
    found = store.correction()
    if found is None or found.active or configuration is None:
        return None
    same = configuration.made(found.model, given) and group_key(found.model) == group_by
    same &= (found.model.bound is not None) == robust
    return found.model if same else None
