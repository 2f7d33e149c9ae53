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
from hubplugin.learning import FEWEST_WORDINGS, Lesson, require_learnable, taught
from hubplugin.measures.hubness import skewness
from hubplugin.methods import METHODS, FitInput, Method, configured
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
from hubplugin.trial import (
    Experiment,
    Outcome,
    Trial,
    check_by,
    require_displacement,
    require_kind,
    require_size,
    small_bank,
)
from hubplugin.vectors import as_vectors

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

    The correction is first tried on held-out bank queries (`hubplugin.judge`), which raises CorrectionRefused if it
    would do harm; force=True applies it untried. group_by: a key of the targets, where searches are filtered by its
    value. Offsets are then fitted, centred and tried within each value's own targets, by one method for all. Targets of
    a value that is refused or has too few of them keep the offset 0. A run that was cut off while writing is taken up
    where it stopped, with its own model, if it is started again with the same bank, method and parameters.
    dry_run=True does all of it but the writing, and counts what would be written. The model that was
    active before is kept for `rollback`.
    executor, shards: as in `hubplugin.fit`; the workers of the executor write, too (docs/scale.md).
    Raises InputError for the bank or a parameter, StoreError for the store; searches are unchanged in every case.
    """
    if isinstance(bank, OffsetModel):
        compute = _usable(compute)
        method_given = method != "blend"
        _require_none(method=method_given, group_by=group_by, learn=learn, executor=executor, **parameters)
        require_match(bank, store)
        if dry_run:
            return replace(unwritten(store, bank, compute), notes=store.plan())
        return write(store, bank, force=force, compute=compute)
    if learn:
        require_learnable_in(store, learn, method, group_by, executor)
    compute = _usable(compute)
    configuration = configured(METHODS, method, parameters, apply)
    prepared = bank_for(store, bank, learn).prepare(store.metric, compute, store)
    if require_executor(executor, shards):
        _require_by_shards(prepared, group_by)
    _require_usable(store, prepared, configuration, force, dry_run)
    looked_at = _looked_at(store, judged, learn, compute)
    clicked = _clicked(prepared, looked_at)
    recipe = Recipe(configuration, group_by, learn, force)
    cut_off = None if dry_run else _cut_off(store, recipe, prepared)
    by_workers = None if executor is None else ShardedStore(store, shards, executor)
    if cut_off is not None:
        return written(store, cut_off, by_workers, compute, force)
    if by_workers is not None:
        source = cast(GalleryLike, store)
        sampled = read_by_workers(prepared, source, by_workers.shards, configuration, by_workers.executor)
        return _corrected(store, sampled, by_workers, recipe, dry_run)[0]
    gallery = SpooledGallery(store, compute.progress, group_by, clicked)
    if looked_at is not None:
        recipe = replace(recipe, judged=looked_at.against(gallery.vectors, gallery.rows))
    return _corrected(store, prepared.against(gallery.vectors, gallery.rows), gallery, recipe, dry_run)[0]


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
    old = _active(store)
    compute = _usable(compute)
    if learn is None:
        learn = old.query_map is not None
    if learn:
        given = old.method if method is None else method
        require_learnable_in(store, learn, given, group_key(old), None)
    configuration = _same(old, parameters) if method is None else configured(METHODS, method, parameters, refit)
    prepared = bank_for(store, Bank() if bank is None else bank, learn).prepare(store.metric, compute, store)
    _require_usable(store, prepared, configuration, force, dry_run)
    looked_at = _looked_at(store, judged, learn, compute)
    clicked = _clicked(prepared, looked_at)
    gallery = SpooledGallery(store, compute.progress, group_key(old), clicked)
    looked_at = None if looked_at is None else looked_at.against(gallery.vectors, gallery.rows)
    recipe = Recipe(configuration, group_key(old), learn, force, old, looked_at)
    done, versus = _corrected(store, prepared.against(gallery.vectors, gallery.rows), gallery, recipe, dry_run)
    assert versus is not None
    before, now = len(old.terms[0].bank), len(prepared.query_bank)  # of `dn` the old one kept is its mean alone
    fewer = [f"the new bank has {now:,} queries, the old one had {before:,}"] if now < before else []
    return Refitted(**vars(replace(done, notes=[*done.notes, *fewer])), versus=versus)


@dataclass(frozen=True)
class Recipe:
    """How to make a correction. group_by: the key within whose values it is fitted. learn: what known answers teach
    beyond offsets. old: the active model that the new one must not be worse than. judged: what chooses how strong a map
    is."""

    configuration: Method
    group_by: str | None
    learn: bool
    force: bool
    old: OffsetModel | None = None
    judged: PreparedBank | None = None


def _corrected(
    store: Store, bank: PreparedBank, gallery: SpooledGallery | ShardedStore, recipe: Recipe, dry_run: bool
) -> tuple[Applied, OldVersusNew | None]:
    """Tries, fits and writes, or only counts what would be written. Raises CorrectionRefused where that would do harm,
    or the new correction is worse than the old one; nothing is written then."""
    configuration, compute = recipe.configuration, bank.compute
    logger.info("%s: trying %s", store.url, configuration.name)
    trial, versus, lesson, neutral = None, None, None, dict[Value, str]()
    experiment = Experiment(bank)
    if not recipe.force and (recipe.group_by is None or recipe.old is not None):
        require_kind(experiment)  # before anything is fitted
    asked, configuration = configuration, configuration.resolved(bank)
    if recipe.group_by is None:
        trial = None if recipe.force else check_by(experiment, configuration)
        # Its parameters are found on the bank as it maps that.
        lesson = taught(asked, bank, recipe.judged) if recipe.learn else None
        if recipe.old is not None:
            if lesson is None and recipe.old.query_map is None:
                versus = _versus([tuple(experiment.run([None, recipe.old, configuration]))])
            else:
                versus = _on_what_is_new(bank, recipe, configuration, lesson)
            _require_not_worse(versus, recipe.force)
    logger.info("%s: fitting %s on %d bank queries", store.url, configuration.name, len(bank.query_bank))
    if recipe.group_by is None:
        model = configuration.fit(bank) if lesson is None else lesson.model
        model = counted(model, bank) if isinstance(gallery, SpooledGallery) else model
        if not recipe.force:
            require_displacement(
                model, as_vectors(bank.query_bank, "query bank"), bank.require_targets(model.method), compute
            )
    else:
        assert isinstance(gallery, SpooledGallery)
        old = recipe.old if isinstance(recipe.old, GroupedModel) else None
        model, neutral, trials = fit_within(bank, configuration, recipe.group_by, gallery.groups(), recipe.force, old)
        if old is not None:
            versus = _versus(trials)
            _require_not_worse(versus, recipe.force)
    if dry_run:
        done = replace(unwritten(store, model, compute), notes=store.plan())
    else:
        done = written(store, model, gallery, compute, recipe.force, _answered(bank, trial))
    # Where nothing was tried, what to expect of the bank is still worth a line.
    notes = [*(small_bank(len(bank.distinct)) if trial is None else []), *done.notes]
    notes += [] if lesson is None else lesson.notes
    return replace(done, neutral=neutral, trial=trial, notes=notes), versus


def _on_what_is_new(bank: PreparedBank, recipe: Recipe, configuration: Method, lesson: Lesson | None) -> OldVersusNew:
    """Old and new on queries that the old model has not seen. A map knows the answers it was taught, so that it would
    be ahead of any that learns without them. Where there are few, both are tried as they are: they have seen the same.
    """
    old, known = recipe.old, bank.known
    assert old is not None
    seen = {row.tobytes() for row in old.terms[0].bank.round(5) + 0.0}
    fresh = np.array([row.tobytes() not in seen for row in bank.query_bank.round(5) + 0.0])
    if known is not None and (fresh & (known >= 0))[bank.distinct].sum() >= FEWEST_WORDINGS:
        experiment = Experiment(bank, tried=fresh)
        return _versus([tuple(experiment.run([None, old, configuration if lesson is None else lesson.how]))])
    new = configuration.fit(bank) if lesson is None else lesson.model
    return _versus([tuple(Experiment(bank).run([None, old, new]))])


def _answered(bank: PreparedBank, trial: Trial | None) -> Answered | None:
    """What a store can try its own searches with; None where clicks are not known."""
    if bank.clicks is None:
        return None
    rows = bank.clicked_rows
    assert rows is not None
    asked, gains = rows >= 0, list[tuple[float, float]]()
    if trial is not None and trial.gain is not None and trial.error is not None:
        gains.append((trial.gain, trial.error))
    if trial is not None and trial.asked is not None:
        gains.append((trial.asked.after - trial.asked.before, trial.asked.error))
    return Answered(bank.query_bank[asked], rows[asked], min(gains, default=None))


def _usable(compute: Compute) -> Compute:
    """With what offsets are computed; raises InputError for a device that is not there, before a gallery is read."""
    if compute.device not in ("auto", "numpy"):
        compute.torch_device()
    return compute


def _require_none(**arguments: object) -> None:
    """Raises InputError for the first of the `arguments` beside a fitted model that is there."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise InputError("a fitted model has its bank and its method already: leave out ", Parameter(name))


def require_learnable_in(
    store: Store, learn: bool, method: str, group_by: str | None, executor: Executor | None
) -> None:
    """Raises InputError where the store cannot hold what is learned, before anything is read."""
    if not store.maps_queries:
        raise InputError(f"{store.url} holds no map of queries: leave out ", Parameter("learn"))
    require_learnable(learn, method, store.metric, store, group_by=group_by, executor=executor)


def _looked_at(store: Store, judged: BankLike | None, learn: bool, compute: Compute) -> PreparedBank | None:
    """The judged bank; raises InputError where nothing is learned."""
    if judged is None:
        return None
    if not learn:
        raise InputError(Parameter("judged"), " chooses how strong a map is: pass ", Parameter("learn", True))
    return Bank.of(judged).prepare(store.metric, compute, store)


def _clicked(*banks: PreparedBank | None) -> np.ndarray | None:
    """The ids that were clicked in any of `banks`."""
    known = [bank.clicks for bank in banks if bank is not None and bank.clicks is not None]
    return np.concatenate(known) if known else None


def _require_by_shards(bank: PreparedBank, group_by: str | None) -> None:
    """Raises InputError for what needs all targets in one place."""
    if group_by is not None or bank.clicks is not None:
        what = "clicks" if bank.clicks is not None else "groups"
        raise InputError(f"{what} need all targets in one process: leave ", Parameter("executor"), " out")


def _require_usable(store: Store, bank: PreparedBank, configuration: Method, force: bool, dry_run: bool) -> None:
    """Raises what can be told before the gallery is read."""
    configuration.require_banks(bank)
    store.require_writable(dry_run=dry_run)
    if not store.count():
        raise InputError(f"{store.url} is empty; add vectors, then correct it")
    if not force:
        require_size(bank, configuration)


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


def _cut_off(store: Store, recipe: Recipe, bank: FitInput) -> OffsetModel | None:
    """The model whose writing was cut off, if it is the one that is asked for. Of what was learned only another fit
    tells: a model does not say which answers taught it. If that is the same, it is still written where it stopped."""
    correction = store.correction()
    if correction is None or correction.active or recipe.learn:
        return None
    model = correction.model
    same = recipe.configuration.made(model, bank) and group_key(model) == recipe.group_by and model.query_map is None
    return model if same else None


def _active(store: Store) -> OffsetModel:
    """The model to be replaced."""
    correction = store.correction()
    if correction is None or not correction.active:
        raise StoreError(f"{store.url} has no active correction to fit anew; apply one first")
    return correction.model


def _same(model: OffsetModel, changes: dict[str, Setting]) -> Method:
    """The configuration of `model`, with `changes`. What the method finds by itself it finds anew."""
    fields = METHODS[model.method].model_fields if model.method in METHODS else {}
    found = {name for name, field in fields.items() if field.default in (None, "auto")}
    own = {name: value for name, value in model.parameters.items() if name not in found}
    return configured(METHODS, model.method, own | changes, refit)


def _require_not_worse(versus: OldVersusNew, force: bool) -> None:
    logger.info("%s", versus)
    if versus.objection and not force:
        raise CorrectionRefused(
            f"the new correction is worse than the active one: {versus.objection}; nothing was changed: record more "
            "queries, or activate it all the same with ",
            Parameter("force", True),
        )


def _versus(trials: Sequence[tuple[Outcome, ...]]) -> OldVersusNew:
    """From raw, old and new of each group, or of the whole gallery."""
    raw, old, new = (list(each) for each in zip(*trials, strict=True))
    after = _pooled(new, old)
    return OldVersusNew(_pooled(raw, raw), _pooled(old, raw), _pooled(new, raw), after.gain, after.error)


def _pooled(outcomes: list[Outcome], raw: list[Outcome]) -> Trial:
    """All groups as one: their queries together, each on a gallery of its own, and their hubness on average, by the
    number of targets."""

    def together(outcomes: list[Outcome]) -> Outcome:
        known = [each for each in outcomes if each.hits is not None]
        hits, ranks = (
            np.concatenate([getattr(each, name) for each in known]) if known else None for name in ("hits", "log_ranks")
        )
        gap = float(np.average([each.gap for each in outcomes], weights=[len(each.costs) for each in outcomes]))
        occurrence, costs = (
            np.concatenate([getattr(each, name) for each in outcomes]) for name in ("occurrence", "costs")
        )
        return replace(
            outcomes[0], occurrence=occurrence, costs=costs, gap=gap, hits=hits, log_ranks=ranks, nearest=None
        )

    skewnesses = [skewness(each.occurrence) for each in outcomes]
    average = np.average(skewnesses, weights=[len(each.occurrence) for each in outcomes])
    return replace(together(outcomes).trial(together(raw)), skewness=float(average))


SMALLEST_GROUP = 100
"""Targets below which a group has no hubs to speak of: the 10 best of it are a tenth of it."""


def fit_within(
    bank: PreparedBank,
    configuration: Method,
    key: str,
    groups: Sequence[tuple[Value, Members]],
    force: bool,
    old: GroupedModel | None = None,
) -> tuple[GroupedModel, dict[Value, str], list[tuple[Outcome, ...]]]:
    """A fit on each of `groups` that has `SMALLEST_GROUP` targets and that the guard lets pass on its own gallery,
    and why the others, whose targets stay neutral, have none. What the method takes from the gallery, such as the
    temperature of `blend`, it takes from the whole gallery of `bank`, and has it in common for all groups.

    With an `old` model also raw, old and new beside each other in each group that is large enough; one that either
    model leaves neutral is tried without a correction there. Raises CorrectionRefused if no group is left.
    """
    method = configuration.resolved(bank)
    fitted: dict[Value, OffsetModel] = {}
    neutral: dict[Value, str] = {}
    tried: dict[Value, list[Outcome]] = {}
    for number, (value, members) in enumerate(groups):
        try:
            if members.rows < SMALLEST_GROUP:
                raise CorrectionRefused(f"{members.rows} targets, {SMALLEST_GROUP} are needed")
            among = bank.among(members, members.numbers)
            experiment = Experiment(among)  # computes nothing until it is asked
            if old is not None:
                before = old.within(value) if value in old.groups else None
                tried[value] = experiment.run([None, before, method])
            if not force:
                check_by(experiment, method)
            fitted[value] = method.fit(among)
        except CorrectionRefused as refusal:
            neutral[value] = str(refusal).partition("; nothing was changed")[0]  # which holds for all of it or none
        bank.compute.report(f"fitting within each {key!r}", number + 1, len(groups))
    if not fitted:
        first = "; ".join(f"{value!r}: {reason}" for value, reason in list(neutral.items())[:1])
        raise CorrectionRefused(
            f"no value of {key!r} can be corrected by itself ({len(neutral)} tried; {first or 'no target has one'})"
        )
    trials: list[tuple[Outcome, ...]] = [
        (raw, replace(before, configuration=old), replace(after if value in fitted else raw, configuration=method))
        for value, (raw, before, after) in tried.items()
    ]
    return _one_model(key, fitted, bank.require_targets(method.name).rows), neutral, trials


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
