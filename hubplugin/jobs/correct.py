"""A correction of a store: read it, fit, try, write, activate. `refit` is `apply` against the correction that is there.

What offsets are is the model's to say, and how they are kept the store's. Within groups: hubs are relative to what a
search can return, and one that is filtered returns the targets of its group only. Offsets depend on bank and target,
not on the other targets, but for two things: the centre, which is the group's own, and under `sn` and `dbsn` log alpha.
So all groups share one bank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from hubplugin.bank import Bank, BankLike, PreparedBank
from hubplugin.compute import Compute
from hubplugin.errors import CorrectionRefused, InputError, Parameter, StoreError
from hubplugin.executors import GalleryLike, read_by_workers
from hubplugin.fitting import require_executor
from hubplugin.guard import (
    FEWEST_WORDINGS,
    Trial,
    check,
    require_displacement,
    require_kind,
    require_size,
    small_bank,
)
from hubplugin.jobs.health import counted
from hubplugin.jobs.results import Applied, OldVersusNew, Refitted
from hubplugin.jobs.write import (
    Members,
    ShardedStore,
    SpooledGallery,
    require_match,
    unwritten,
    write,
    written,
)
from hubplugin.learning import Lesson, require_learnable, taught
from hubplugin.methods import METHODS, FitInput, Method, build_method
from hubplugin.model import (
    Dot,
    GalleryStatistics,
    Group,
    GroupedModel,
    LogSumExp,
    OffsetModel,
    Setting,
    Value,
    group_key,
)
from hubplugin.store import Answered, Store, recorded_of
from hubplugin.validation import Configuration, Margins, cross_validate, folds_of

logger = logging.getLogger(__name__)


def apply(
    store: Store,
    bank: BankLike | OffsetModel,
    method: str = "blend",
    *,
    group_by: str | None = None,
    learn: bool = False,
    judged: BankLike | None = None,
    force: bool = False,
    dry_run: bool = False,
    compute: Compute = Compute(),
    executor: Executor | None = None,
    shards: int | None = None,
    **parameters: Setting,
) -> Applied:
    """Fits offsets on everything in `store`, writes them, and activates them in one step.

    bank, method, learn, judged, parameters: as in `hubplugin.fit`; learn not with group_by. With learn the store's own
    search maps the queries; a store that cannot hold the map is refused. A `hubplugin.Bank` without queries is of those
    that were recorded of the store, and with learn of their clicks. A fitted model in the place of the bank is written
    as it is, and not tried.

    The correction is first tried on held-out bank queries (`hubplugin.guard`), which raises CorrectionRefused if
    it would do harm; force=True applies it untried. group_by: a key of the targets, where searches are filtered by its
    value. Offsets are then fitted, centred and tried within each value's own targets, by one method for all. Targets of
    a value that is refused or has too few of them keep the offset 0. A run that was cut off while writing is taken up
    where it stopped, with its own model, if it is started again with the same bank, method and parameters.
    dry_run=True does all of it but the writing, and counts what would be written. The model that was
    active before is kept for `rollback`.
    executor, shards: as in `hubplugin.fit`; the workers of the executor write, too (docs/scale.md).
    Raises InputError for the bank or a parameter, StoreError for the store; searches are unchanged in every case.
    """
    compute = _usable(compute)
    if isinstance(bank, OffsetModel):
        given = {"method": method != "blend", "group_by": group_by, "learn": learn, "executor": executor, **parameters}
        for name in (name for name, value in given.items() if value is not None and value is not False):
            raise InputError("a fitted model has its bank and its method already: leave out ", Parameter(name))
        require_match(bank, store)
        if dry_run:
            return replace(unwritten(store, bank, compute), notes=store.plan())
        return write(store, bank, force=force, compute=compute)
    if learn:
        require_learnable_in(store, learn, method, group_by, executor)
    job = Job(store, build_method(METHODS, method, parameters, apply), group_by, learn, force, dry_run)
    prepared, looked_at = job.read(bank, judged, compute)
    if require_executor(executor, shards) and (group_by is not None or prepared.clicks is not None):
        what = "clicks" if prepared.clicks is not None else "groups"
        raise InputError(f"{what} need all targets in one process: leave ", Parameter("executor"), " out")
    cut_off = None if dry_run else _cut_off(job, prepared)
    by_workers = None if executor is None else ShardedStore(store, shards, executor)
    if cut_off is not None:
        return written(store, cut_off, by_workers, compute, force)
    if by_workers is not None:
        source = cast(GalleryLike, store)
        prepared = read_by_workers(prepared, source, by_workers.shards, job.configuration, by_workers.executor)
    return _corrected(job, prepared, looked_at, by_workers)[0]


def refit(
    store: Store,
    bank: BankLike | None = None,
    method: str | None = None,
    *,
    learn: bool | None = None,
    judged: BankLike | None = None,
    force: bool = False,
    dry_run: bool = False,
    compute: Compute = Compute(),
    **parameters: Setting,
) -> Refitted:
    """Fits the active correction of `store` anew on a newer bank, and activates it if it is not worse than the old one.

    bank: as for `hubplugin.apply`; by default the queries that were recorded. method: by default that of the
    active correction with its parameters, but for those that a method finds in bank and gallery.
    learn: likewise, by default a correction with a query map is learned anew.
    judged: as for `hubplugin.apply`.
    dry_run: as for `hubplugin.apply`. force: activates it though it is worse.

    The guard tries the new correction as it does in `apply`. Then old and new rank held-out queries of the new bank.
    With known answers the new one is worse if R@1 falls by more than two standard errors, otherwise if hubness rises
    by more than `WORSE`. The old model may have been fitted on some of these queries, which speaks for it. A query map
    would speak too loudly: with one, they are compared on queries that the old bank lacks.
    Offsets within groups stay so. Each group is fitted and tried among its own targets, and old and new are compared
    over all groups: their queries together, and their hubness on average, by the number of targets.

    Raises CorrectionRefused, with both figures, if it is worse or the guard objects; InputError for the bank or a
    parameter; StoreError for a store without an active correction. Searches are then unchanged. `rollback`
    writes the old model.
    """
    correction = store.correction()
    if correction is None or not correction.active:
        raise StoreError(f"{store.url} has no active correction to fit anew; apply one first")
    old, compute = correction.model, _usable(compute)
    if learn is None:
        learn = old.query_map is not None
    if learn:
        require_learnable_in(store, learn, method or old.method, group_key(old), None)
    configuration = _same(old, parameters) if method is None else build_method(METHODS, method, parameters, refit)
    job = Job(store, configuration, group_key(old), learn, force, dry_run, old)
    prepared, looked_at = job.read(Bank() if bank is None else bank, judged, compute)
    done, versus = _corrected(job, prepared, looked_at)
    assert versus is not None
    before, now = len(old.terms[0].bank), len(prepared.query_bank)  # of `dn` the old one kept is its mean alone
    fewer = [f"the new bank has {now:,} queries, the old one had {before:,}"] if now < before else []
    return Refitted(**vars(replace(done, notes=[*done.notes, *fewer])), versus=versus)


@dataclass(frozen=True)
class Job:
    """What is asked for. group_by: the key within whose values offsets are fitted. learn: what known answers teach
    beyond offsets. old: the active model that the new one must not be worse than."""

    store: Store
    configuration: Method
    group_by: str | None
    learn: bool
    force: bool
    dry_run: bool
    old: OffsetModel | None = None

    def read(
        self, bank: BankLike, judged: BankLike | None, compute: Compute
    ) -> tuple[PreparedBank, PreparedBank | None]:
        """The bank, and what chooses how strong a map is; raises what can be told before the gallery is read."""
        store = self.store
        prepared = bank_for(store, bank, self.learn).prepare(store.metric, compute, store)
        self.configuration.require_banks(prepared)
        store.require_writable(dry_run=self.dry_run)
        if not store.count():
            raise InputError(f"{store.url} is empty; add vectors, then correct it")
        if not self.force:
            require_size(prepared, self.configuration)
        if judged is None:
            return prepared, None
        if not self.learn:
            raise InputError(Parameter("judged"), " chooses how strong a map is: pass ", Parameter("learn", True))
        return prepared, Bank.of(judged).prepare(store.metric, compute, store)


def _corrected(
    job: Job, bank: PreparedBank, judged: PreparedBank | None, by_workers: ShardedStore | None = None
) -> tuple[Applied, OldVersusNew | None]:
    """Reads the gallery, unless workers have, tries, fits and writes, or only counts what would be written. Raises
    CorrectionRefused where that would do harm, or the new correction is worse than the old one; nothing is written
    then."""
    store, compute, gallery = job.store, bank.compute, None
    if by_workers is None:
        clicked = [each.clicks for each in (bank, judged) if each is not None and each.clicks is not None]
        named = np.concatenate(clicked) if clicked else None
        gallery = SpooledGallery(store, compute.progress, job.group_by, named)
        bank = bank.against(gallery.vectors, gallery.rows)
        judged = None if judged is None else judged.against(gallery.vectors, gallery.rows)
    logger.info("%s: trying %s", store.url, job.configuration.name)
    trial, lesson, versus, neutral = None, None, None, dict[Value, str]()
    if job.group_by is None:
        seen = None if job.force else require_kind(bank)
        lesson = taught(job.configuration, bank, judged) if job.learn else None
        if seen is not None:  # what would be applied is judged
            method = job.configuration.resolve(bank) if lesson is None else lesson.how.offsets
            trial = check(bank, method, seen, None if lesson is None else lesson.how)
        versus = None if job.old is None else _versus(job, bank, job.old, lesson)
        logger.info("%s: fitting %s on %d bank queries", store.url, job.configuration.name, len(bank.query_bank))
        model = job.configuration.fit(bank) if lesson is None else lesson.model
        model = model if gallery is None else counted(model, bank)
        if not job.force:
            require_displacement(model, bank)
    else:
        assert gallery is not None
        old = job.old if isinstance(job.old, GroupedModel) else None
        model, neutral, parts = fit_within(bank, job.configuration, job.group_by, gallery.groups(), job.force, old)
        versus = None if old is None else _not_worse(OldVersusNew.of(parts, old, job.configuration), job.force)
    if job.dry_run:
        done = replace(unwritten(store, model, compute), notes=store.plan())
    else:
        done = written(store, model, gallery or by_workers, compute, job.force, _answered(bank, trial))
    # Where nothing was tried, what to expect of the bank is still worth a line.
    notes = [*(small_bank(len(bank.distinct)) if trial is None else []), *done.notes]
    notes += [] if lesson is None else lesson.notes
    return replace(done, neutral=neutral, trial=trial, notes=notes), versus


def _versus(job: Job, bank: PreparedBank, old: OffsetModel, lesson: Lesson | None) -> OldVersusNew:
    """Old and new beside each other. A map knows the answers it was taught, so that it would be ahead of any that
    learns without them: with one, they are tried on queries that the old model has not seen. Where there are few, both
    are tried as they are: they have seen the same. Raises CorrectionRefused where the new one is worse."""
    tried = folds_of(bank)
    method = job.configuration.resolve(bank) if lesson is None else lesson.how.offsets
    new: Configuration = method if lesson is None else lesson.how
    if lesson is not None or old.query_map is not None:
        seen = {row.tobytes() for row in old.terms[0].bank.round(5) + 0.0}
        fresh = np.array([row.tobytes() not in seen for row in bank.query_bank.round(5) + 0.0])
        if bank.known is not None and (fresh & (bank.known >= 0))[bank.distinct].sum() >= FEWEST_WORDINGS:
            tried = folds_of(bank, tried=fresh)
        else:
            new = method.fit(bank) if lesson is None else lesson.model
    return _not_worse(OldVersusNew.of([cross_validate([None, old, new], bank, tried)], old, method), job.force)


def _answered(bank: PreparedBank, trial: Trial | None) -> Answered | None:
    """What a store can try its own searches with; None where clicks are not known."""
    rows = bank.clicked_rows
    if rows is None:
        return None
    sides = [] if trial is None else [side for side in (trial.right, trial.asked) if side is not None]
    gains = [(side.change.value, side.error) for side in sides]
    return Answered(bank.query_bank[rows >= 0], rows[rows >= 0], min(gains, default=None))


def _usable(compute: Compute) -> Compute:
    """With what offsets are computed; raises InputError for a device that is not there, before a gallery is read."""
    if compute.device not in ("auto", "numpy"):
        compute.torch_device()
    return compute


def require_learnable_in(
    store: Store, learn: bool, method: str, group_by: str | None, executor: Executor | None
) -> None:
    """Raises InputError where the store cannot hold what is learned, before anything is read."""
    if not store.maps_queries:
        raise InputError(f"{store.url} holds no map of queries: leave out ", Parameter("learn"))
    require_learnable(learn, method, store.metric, store, group_by=group_by, executor=executor)


def bank_for(store: Store, bank: BankLike, learn: bool = False) -> Bank:
    """`bank` as one for `store`, whose recorded queries take the place of none; raises InputError if there are none.

    learn: with what was recorded of their clicks. Nothing else uses those: people click what a search showed them, so
    they speak for the correction that was active then.
    """
    if not isinstance(store, Store):
        raise InputError(f"expected a store, got {type(store).__name__}; open one: hubplugin.open_store(URL)")
    bank = Bank.of(bank)
    if bank.queries is not None:
        return bank
    recorded = recorded_of(store)
    if recorded is None:
        place = "" if store.record is None else f" in {store.record}"
        raise InputError(
            f"{store.url}: no queries are recorded{place}; pass ",
            Parameter("bank"),
            f", vectors or a log's texts with their model, or collect queries: {store.how_to_record}",
        )
    answers = recorded.answers if learn and bank.answers is None else bank.answers
    return replace(bank, queries=recorded, answers=answers)


def _cut_off(job: Job, bank: FitInput) -> OffsetModel | None:
    """The model whose writing was cut off, if it is the one that is asked for. Of what was learned only another fit
    tells: a model does not say which answers taught it. If that is the same, it is still written where it stopped."""
    correction = job.store.correction()
    if correction is None or correction.active or job.learn:
        return None
    model = correction.model
    same = job.configuration.has_made(model, bank) and group_key(model) == job.group_by and model.query_map is None
    return model if same else None


def _same(model: OffsetModel, changes: dict[str, Setting]) -> Method:
    """The configuration of `model`, with `changes`. What the method finds by itself it finds anew."""
    fields = METHODS[model.method].model_fields if model.method in METHODS else {}
    found = {name for name, field in fields.items() if field.default in (None, "auto")}
    own = {name: value for name, value in model.parameters.items() if name not in found}
    return build_method(METHODS, model.method, own | changes, refit)


def _not_worse(versus: OldVersusNew, force: bool) -> OldVersusNew:
    """`versus`; raises CorrectionRefused where the new correction is worse, unless by force."""
    logger.info("%s", versus)
    if versus.objection and not force:
        raise CorrectionRefused(
            f"the new correction is worse than the active one: {versus.objection}; nothing was changed: record more "
            "queries, or activate it all the same with ",
            Parameter("force", True),
        )
    return versus


SMALLEST_GROUP = 100
"""Targets below which a group has no hubs to speak of: the 10 best of it are a tenth of it."""


def fit_within(
    bank: PreparedBank,
    configuration: Method,
    key: str,
    groups: Sequence[tuple[Value, Members]],
    force: bool,
    old: GroupedModel | None = None,
) -> tuple[GroupedModel, dict[Value, str], list[Margins]]:
    """A fit on each of `groups` that has `SMALLEST_GROUP` targets and that the guard lets pass on its own gallery,
    and why the others, whose targets stay neutral, have none. What the method takes from the gallery, such as the
    temperature of `blend`, it takes from the whole gallery of `bank`, and has it in common for all groups.

    With an `old` model also the margins of no correction, old and new in each group that is large enough; one that
    either model leaves neutral is tried without a correction there. Raises CorrectionRefused if no group is left.
    """
    method = configuration.resolve(bank)
    fitted: dict[Value, OffsetModel] = {}
    neutral: dict[Value, str] = {}
    tried: dict[Value, Margins] = {}
    for number, (value, members) in enumerate(groups):
        try:
            if members.rows < SMALLEST_GROUP:
                raise CorrectionRefused(f"{members.rows} targets, {SMALLEST_GROUP} are needed")
            among = bank.among(members, members.numbers)
            if old is not None:
                before = old.within(value) if value in old.groups else None
                tried[value] = cross_validate([None, before, method], among, folds_of(among))
            if not force:
                check(among, method.resolve(among), require_kind(among))
            fitted[value] = method.fit(among)
        except CorrectionRefused as refusal:
            neutral[value] = str(refusal).partition("; nothing was changed")[0]  # which holds for all of it or none
        bank.compute.report(f"fitting within each {key!r}", number + 1, len(groups))
    if not fitted:
        first = "; ".join(f"{value!r}: {reason}" for value, reason in list(neutral.items())[:1])
        raise CorrectionRefused(
            f"no value of {key!r} can be corrected by itself ({len(neutral)} tried; {first or 'no target has one'})"
        )
    parts = [margins if value in fitted else margins.of([0, 1, 0]) for value, margins in tried.items()]
    return _one_model(key, fitted, bank.require_targets(method.name).rows), neutral, parts


def _one_model(key: str, models: Mapping[Value, OffsetModel], count: int) -> GroupedModel:
    """One model of those of all groups, which share bank and method, for `count` targets in groups or not."""
    first = next(iter(models.values()))
    groups = {value: _group(model) for value, model in models.items()}
    return GroupedModel(
        method=first.method,
        parameters=first.parameters,
        metric=first.metric,
        terms=tuple(replace(t, log_weights=None) if isinstance(t, LogSumExp) else t for t in first.terms),
        bank_fingerprint=first.bank_fingerprint,
        gallery=_statistics([group.gallery for group in groups.values()], count),
        key=key,
        groups=groups,
    )


def _group(model: OffsetModel) -> Group:
    assert model.gallery is not None
    weights = next((term.log_weights for term in model.terms if isinstance(term, LogSumExp)), None)
    answers = next((term.answers for term in model.terms if not isinstance(term, Dot)), None)
    return Group(model.centre, model.gallery, weights, answers)


def _statistics(parts: list[GalleryStatistics], count: int) -> GalleryStatistics:
    """Of `count` targets, of which those outside of `parts` have the offset 0."""
    return GalleryStatistics(
        count,
        min(0.0, *(part.smallest for part in parts)),
        max(0.0, *(part.largest for part in parts)),
        math.sqrt(sum(part.count * part.deviation**2 for part in parts) / count),
    )
