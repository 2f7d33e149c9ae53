"""A correction fitted anew on a newer bank, beside the one that is active."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from hubplugin.errors import CorrectionRefused, InputError, Parameter, StoreError
from hubplugin.jobs.comparison import group_key
from hubplugin.jobs.correction import Fitted, bank_for
from hubplugin.jobs.finds import counted
from hubplugin.jobs.groups import fit_within
from hubplugin.jobs.reach import require_reach
from hubplugin.jobs.spooled_gallery import SpooledGallery
from hubplugin.jobs.writing import Applied, unwritten, usable, written
from hubplugin.measures.hubness import skewness
from hubplugin.methods import METHODS, Method, asked_for
from hubplugin.methods.robust import bounded
from hubplugin.model import GroupedModel, OffsetModel, Setting, Value
from hubplugin.selection import Banks, Experiment, Pairs, check_by, choose_by, require_kind, require_size
from hubplugin.selection.trials import Candidate, Trial, pooled
from hubplugin.store import KEEP, Store
from hubplugin.vectors import Progress, VectorLike, Vectors

logger = logging.getLogger(__name__)

WORSE = 0.1
"""The rise of skewness, as a share of that of the raw ranking, from which a new correction is worse where nothing says
what the queries ask for. On eight galleries a bank of twice the size rises by 0.08 at most; every bank that rose by
more than 0.1 lost R@1, up to 2.4 points (benchmarks/keeping.py)."""


@dataclass(frozen=True)
class Beside:
    """The old and the new correction on held-out queries of the new bank: `old` and `new`; `raw` is no correction.

    gain, error: of R@1 of the new one over the old one, 0 to 1, and its standard error; None without pairs or clicks.
    """

    raw: Candidate
    old: Candidate
    new: Candidate
    gain: float | None
    error: float | None

    @property
    def objection(self) -> str | None:
        """Why the new one is worse, with both figures; None if it is not."""
        if self.gain is not None and self.error is not None:
            assert self.old.recall is not None
            assert self.new.recall is not None
            if self.gain >= -2 * self.error:
                return None
            return f"R@1 of held-out queries goes from {100 * self.old.recall:.1f} to {100 * self.new.recall:.1f}"
        if self.new.skewness - self.old.skewness <= WORSE * max(self.raw.skewness, 0.0):
            return None
        return (
            f"hubness (skewness) of held-out queries goes from {self.old.skewness:.2f} to {self.new.skewness:.2f}, "
            f"where it is {self.raw.skewness:.2f} raw"
        )

    def __str__(self) -> str:
        return f"on held-out queries of the new bank:\n  raw  {self.raw}\n  old  {self.old}\n  new  {self.new}"


@dataclass(frozen=True)
class Refitted:
    """What `refit` did: what was written, as of `hubplugin.apply`, and old and new beside each other."""

    applied: Applied
    beside: Beside

    def __str__(self) -> str:
        return f"{self.applied}\n{self.beside}"


def refit(
    store: Store,
    query_bank: VectorLike | None = None,
    method: str | None = None,
    target_bank: VectorLike | None = None,
    *,
    pairs: Pairs = None,
    same_kind: bool = False,
    force: bool = False,
    dry_run: bool = False,
    keep: int = KEEP,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
    **parameters: Setting,
) -> Refitted:
    """Fits the active correction of `store` anew on a newer bank, and activates it if it is not worse than the old one.

    query_bank: as for `hubplugin.apply`; by default the queries that were recorded. method: by default that of the
    active correction with its parameters, but for those that a method finds in bank and gallery; "auto" chooses.
    A robust correction stays one.
    target_bank, pairs, same_kind, dry_run, keep: as for `hubplugin.apply`. force: activates it though it is worse.

    The guard tries the new correction as it does in `apply`. Then old and new rank held-out queries of the new bank.
    With pairs or clicks the new one is worse if R@1 falls by more than two standard errors, otherwise if hubness rises
    by more than `WORSE`. The old model may have been fitted on some of these queries, which speaks for it.
    Offsets within groups stay so. Each group is fitted and tried among its own targets, and old and new are compared
    over all groups: their queries together, and their hubness on average, by the number of targets.

    Raises CorrectionRefused, with both figures, if it is worse or the guard objects; InputError for the bank or a
    parameter; StoreError for a store without an active correction. Searches are then unchanged. The version before is
    kept; see `hubplugin.rollback`.
    """
    old = _active(store)
    bank = bank_for(store, _recorded(store) if query_bank is None else query_bank)
    compute = usable(device, memory, progress, keep)
    configuration = _same(old, parameters) if method is None else asked_for(method, parameters, refit)
    banks = Banks.read(bank, target_bank, pairs, store.metric, compute, same_kind)
    if configuration is not None:
        configuration.require_banks(banks.given)
    if not force:
        require_size(banks, configuration)
    logger.info("%s: fitting %s anew", store.url, configuration.name if configuration is not None else "auto")
    gallery = SpooledGallery(store, progress, group_key(old), banks.clicks)
    banks = banks.against(gallery.vectors, gallery.rows)
    if isinstance(old, GroupedModel):
        fitted, beside = _fitted_within(banks, configuration, old, gallery, force)
    else:
        fitted, beside = _fitted(banks, configuration, old, force)
        if not force:
            require_reach(fitted.model, bank, gallery.vectors, compute)
    if dry_run:
        done = replace(unwritten(store, fitted.model, compute), notes=store.plan())
    else:
        done = written(store, fitted.model, gallery, compute, keep)
    return Refitted(fitted.told(done), beside)


def _active(store: Store) -> OffsetModel:
    """The model to be replaced."""
    found = store.correction()
    if found is None or not found.active:
        raise StoreError(f"{store.url} has no active correction to fit anew; apply one first")
    return found.model


def _recorded(store: Store) -> Vectors:
    found = store.recorded()
    if found is None:
        raise InputError(
            f"no queries to {store.url} are recorded; pass ",
            Parameter("query_bank"),
            f", or collect queries: {store.how_to_record()}",
        )
    return found


def _same(model: OffsetModel, changes: dict[str, Setting]) -> Method:
    """The configuration of `model`, with `changes`. What the method finds by itself it finds anew."""
    fields = METHODS[model.method].model_fields
    own = {name: value for name, value in model.parameters.items() if fields[name].default not in (None, "auto")}
    found = asked_for(model.method, own | changes, refit)
    assert found is not None
    return found


def _fitted(banks: Banks, configuration: Method | None, old: OffsetModel, force: bool) -> tuple[Fitted, Beside]:
    """The new model, with what the guard says, and old and new beside each other. configuration: None where it is
    chosen. Raises CorrectionRefused if the new one is worse."""
    robust = old.bound is not None
    with closing(Experiment(banks, robust=robust)) as experiment:
        if not force:
            require_kind(experiment)
        if configuration is None:
            configuration = choose_by(experiment).winner
        configuration = configuration.resolved(banks.given)
        judgement = None if force else check_by(experiment, configuration)
        raw, before, after = experiment.run([None, old, configuration])
    beside = _beside([raw], [before], [after])
    _require_not_worse(beside, force)
    new = configuration.fit(banks.given)
    new = bounded(new, banks.given) if robust else new
    return Fitted(counted(new, banks.given), judgement), beside


def _fitted_within(
    banks: Banks, configuration: Method | None, old: GroupedModel, gallery: SpooledGallery, force: bool
) -> tuple[Fitted, Beside]:
    """`_fitted` within the groups of `old`. A group that either model leaves neutral is tried without a correction."""
    with closing(Experiment(banks)) as experiment:
        if not force:
            require_kind(experiment)  # of the whole bank, towards the whole gallery
        method = (choose_by(experiment).winner if configuration is None else configuration).resolved(banks.given)
    trials: dict[Value, list[Trial]] = {}

    def tried(value: Value, experiment: Experiment) -> None:
        before = old.within(value) if value in old.groups else None
        trials[value] = experiment.run([None, before, method])

    new, neutral = fit_within(banks, method, old.key, gallery.groups(), force, tried)
    raws = [raw for raw, _, _ in trials.values()]
    olds = [replace(before, configuration=old) for _, before, _ in trials.values()]
    news = [
        replace(after if value in new.groups else raw, configuration=method)
        for value, (raw, _, after) in trials.items()
    ]
    beside = _beside(raws, olds, news)
    _require_not_worse(beside, force)
    return Fitted(new, neutral=neutral), beside


def _require_not_worse(beside: Beside, force: bool) -> None:
    logger.info("%s", beside)
    if beside.objection and not force:
        raise CorrectionRefused(
            f"the new correction is worse than the active one: {beside.objection}; nothing was changed; record more "
            "queries, or ",
            Parameter("force", True),
            " activates it all the same",
        )


def _beside(raw: list[Trial], old: list[Trial], new: list[Trial]) -> Beside:
    """From the trials of each group, or of the whole gallery."""
    after = _together(new, old)
    return Beside(_together(raw, raw), _together(old, raw), _together(new, raw), after.gain, after.error)


def _together(trials: list[Trial], uncorrected: list[Trial]) -> Candidate:
    """All groups as one: their queries together, and their hubness on average, by the number of targets."""
    found = pooled(trials).candidate(pooled(uncorrected))
    skewnesses = [skewness(each.occurrence) for each in trials]
    return replace(found, skewness=float(np.average(skewnesses, weights=[len(each.occurrence) for each in trials])))
