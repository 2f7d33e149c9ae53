"""A correction fitted anew on a newer bank, beside the one that is active."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, replace

from hubplugin.errors import CorrectionRefused, InputError, Parameter, StoreError
from hubplugin.jobs.correction import bank_for
from hubplugin.jobs.finds import counted
from hubplugin.jobs.reach import require_reach
from hubplugin.jobs.spooled_gallery import SpooledGallery
from hubplugin.jobs.writing import Applied, unwritten, usable, written
from hubplugin.methods import METHODS, Method, asked_for
from hubplugin.methods.robust import bounded
from hubplugin.model import GroupedModel, OffsetModel, Setting
from hubplugin.selection import Banks, Experiment, Judgement, Pairs, check_by, choose_by, require_kind, require_size
from hubplugin.selection.trials import Candidate
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

    Raises CorrectionRefused, with both figures, if it is worse or the guard objects; InputError for the bank or a
    parameter; StoreError for a store without an active correction, or with offsets within groups. Searches are then
    unchanged. The version before is kept; see `hubplugin.rollback`.
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
    gallery = SpooledGallery(store, progress, None, banks.clicks)
    banks = banks.against(gallery.vectors, gallery.rows)
    configuration, beside, judgement = _tried(banks, configuration, old, force)
    new = configuration.fit(banks.given)
    new = counted(new if old.bound is None else bounded(new, banks.given), banks.given)
    if not force:
        require_reach(new, bank, gallery.vectors, compute)
    if dry_run:
        done = replace(unwritten(store, new, compute), notes=store.plan())
    else:
        done = written(store, new, gallery, compute, keep)
    return Refitted(replace(done, judgement=judgement), beside)


def _active(store: Store) -> OffsetModel:
    """The model to be replaced."""
    found = store.correction()
    if found is None or not found.active:
        raise StoreError(f"{store.url} has no active correction to fit anew; apply one first")
    if isinstance(found.model, GroupedModel):
        raise StoreError(
            f"{store.url} has offsets within groups of {found.model.key!r}, which are not compared with others; "
            "apply a new correction with ",
            Parameter("group_by", found.model.key),
            ", and roll it back if it does not help",
        )
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


def _tried(
    banks: Banks, configuration: Method | None, old: OffsetModel, force: bool
) -> tuple[Method, Beside, Judgement | None]:
    """What is fitted, beside the old model, and what the guard says. configuration: None where it is chosen."""
    with closing(Experiment(banks)) as experiment:
        if not force:
            require_kind(experiment)
        if configuration is None:
            configuration = choose_by(experiment).winner
        configuration = configuration.resolved(banks.given)
        judgement = None if force else check_by(experiment, configuration)
        beside = _beside(experiment, old, configuration)
    logger.info("%s", beside)
    if beside.objection and not force:
        raise CorrectionRefused(
            f"the new correction is worse than the active one: {beside.objection}; nothing was changed; record more "
            "queries, or ",
            Parameter("force", True),
            " activates it all the same",
        )
    return configuration, beside, judgement


def _beside(experiment: Experiment, old: OffsetModel, configuration: Method) -> Beside:
    raw, before, after = experiment.run([None, old, configuration])
    new = after.candidate(before)
    return Beside(raw.candidate(raw), before.candidate(raw), after.candidate(raw), new.gain, new.error)
