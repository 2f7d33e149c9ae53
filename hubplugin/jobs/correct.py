"""Correct a store: read it, fit, try, write, activate.

`refit` works like `apply`, but compares the new correction with the active one before
it writes. The model computes the offsets, and the store keeps them.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from hubplugin.bank import Bank, BankLike, PreparedBank
from hubplugin.causes import HUBBY
from hubplugin.compute import Compute
from hubplugin.errors import CorrectionRefused, InputError, Parameter, StoreError
from hubplugin.executors import GalleryLike, read_by_workers
from hubplugin.fitting import require_executor
from hubplugin.guard import (
    FEWEST_PARAPHRASES,
    Trial,
    judge_by,
    require_displacement,
    require_kind,
    require_size,
    small_bank,
)
from hubplugin.jobs.health import is_in_bank, with_hubness
from hubplugin.jobs.results import Applied
from hubplugin.jobs.versus import OldVersusNew
from hubplugin.jobs.write import (
    ShardedStore,
    SpooledGallery,
    preview,
    write,
    write_gallery,
)
from hubplugin.learning import (
    LearnedMap,
    Teachers,
    learn_query_map,
    read_learn,
)
from hubplugin.measures.hubness import largest_by_chance, skewness_by_chance
from hubplugin.methods import METHODS, Method, build_method
from hubplugin.model import OffsetModel, Setting
from hubplugin.store import Store, for_job, read_recorded
from hubplugin.validation import (
    OCCURRENCE,
    Figures,
    as_it_is,
    change_of,
    cross_validate,
    fitted_by,
    folds_among,
    folds_of,
    uncorrected,
)

logger = logging.getLogger(__name__)


def apply(
    store: Store,
    bank: BankLike | OffsetModel,
    method: str = "blend",
    *,
    learn: bool | Bank = False,
    force: bool = False,
    dry_run: bool = False,
    compute: Compute = Compute(),
    executor: Executor | None = None,
    shards: int | None = None,
    **parameters: Setting,
) -> Applied:
    """Fit offsets on everything in a store, write them, and activate them in one step.

    The guard first tries the correction on held-out bank queries. If a run was cut off
    while writing, the same call with the same bank, method and parameters continues
    where it stopped, with the model that was already fitted. `rollback` returns to the
    model that was active before. If an error is raised, searches are unchanged.

    Args:
        store: Any store, such as one from `hubplugin.open_store`.
        bank: As in `hubplugin.fit`. A `hubplugin.Bank` without queries stands for the
            queries recorded from the store and, with `learn`, their clicks. A fitted
            model is written unchanged and untried.
        method, **parameters: As in `hubplugin.fit`.
        learn: As in `hubplugin.fit`; `Bank.from_field` reads pairs from the store. The
            store's search maps the queries.
        force: Apply the correction without a trial, even without any hubness.
        dry_run: Do everything except writing, and count what would be written.
        compute: Device, memory and progress.
        executor, shards: As in `hubplugin.fit`; the workers also write (docs/scale.md).

    Raises:
        CorrectionRefused: The correction would do harm.
        InputError: The bank or a parameter cannot be used, or the store cannot hold the
            map.
        StoreError: The store cannot be read or written.
    """
    store = for_job(store)
    if compute.device != "auto":  # "auto" cannot fail, and would import torch
        compute.torch_device()  # an error for a missing device, before anything is read
    if isinstance(bank, OffsetModel):
        if learn or parameters or executor or method != "blend":
            raise InputError(
                "a fitted model already has its bank and method: leave out all but ",
                Parameter("force"),
                " and ",
                Parameter("dry_run"),
            )
        return write(store, bank, compute=compute, force=force, dry_run=dry_run)
    require_executor(executor, shards)
    learn = read_learn_for(store, learn, method, executor)
    job = Job(store, build_method(METHODS, method, parameters), learn, force, dry_run)
    teachers = job.read(bank, compute)
    workers = None
    if executor is not None:
        if teachers.bank.clicks is not None:
            raise InputError(
                "clicks need all targets in one process: leave ",
                Parameter("executor"),
                " out",
            )
        workers = ShardedStore(store, shards, executor)
    half_written = find_half_written(job, teachers.bank)
    if half_written is not None:
        return write_gallery(store, half_written, workers, compute, force)
    gallery, teachers = job.read_gallery(teachers, workers)
    fit = job.fit(teachers)
    if fit.is_idle:
        return Applied(
            store.url,
            fit.model,
            scanned=teachers.bank.count,
            missing=0,
            stale=0,
            written=False,
            trial=fit.trial,
            sound=True,
        )
    return job.write(fit, teachers.bank, gallery)


def refit(
    store: Store,
    bank: BankLike | None = None,
    method: str | None = None,
    *,
    learn: bool | Bank | None = None,
    force: bool = False,
    dry_run: bool = False,
    compute: Compute = Compute(),
    **parameters: Setting,
) -> Applied:
    """Fit the active correction again on a newer bank; activate it unless it is worse.

    The guard tries the new correction as it does in `apply`. The old and new
    corrections are then compared on held-out queries of the new bank. With known
    answers, the new correction is worse if R@1 falls by more than two standard errors;
    without, if hubness rises by more than `WORSE`. If the new bank is smaller than the
    old one, a fall of one point must also be ruled out. The old model may have been
    fitted on some of these queries, which favours it. A query map would favour it too
    much, so with a map the two are compared on queries that the old bank lacks.
    `rollback` writes the old model. If an error is raised, searches are unchanged.

    Args:
        store: A store with an active correction.
        bank: As in `apply`; by default the recorded queries.
        method: By default the method of the active correction, with the parameters that
            it was given.
        learn: As in `apply`; by default True if the active correction has a query map.
        dry_run, compute, **parameters: As in `apply`.
        force: Activate the new correction even if it is worse.

    Raises:
        CorrectionRefused: The guard objects, or the new correction is worse; the
            message then has both figures.
        InputError: The bank or a parameter cannot be used.
        StoreError: The store has no active correction, or cannot be read or written.
    """
    store = for_job(store)
    correction = store.correction()
    if correction is None or not correction.active:
        raise StoreError(
            f"{store.url} has no active correction to fit again; apply one first"
        )
    compute.torch_device()
    old = correction.model
    teaches_again = learn is None and old.query_map is not None
    if learn is None:
        learn = teaches_again
    learn = read_learn_for(store, learn, method or old.method)
    if method is None:
        configuration = _configuration_like(old, parameters)
    else:
        configuration = build_method(METHODS, method, parameters)
    job = Job(store, configuration, learn, force, dry_run)
    teachers = job.read(Bank() if bank is None else bank, compute)
    if teaches_again and teachers.bank.known_answers is None:
        raise InputError(
            "the active correction has a query map, and this bank has no answers to "
            "learn a new one from: pass ",
            Parameter("answers"),
            ", learn from pairs again (docs/titles.md), or drop the map with ",
            Parameter("learn", False),
        )
    gallery, teachers = job.read_gallery(teachers)
    fit = job.fit(teachers)
    versus = compare_with_old(fit, teachers.bank, old)
    logger.info("%s", versus)
    if versus.objection and not force:
        raise CorrectionRefused(
            "the new correction is not shown to be as good as the active one: "
            f"{versus.objection}; nothing was changed: record more queries, or activate "
            "it all the same with ",
            Parameter("force", True),
        )
    applied = job.write(fit, teachers.bank, gallery)
    old_size = len(old.terms[0].bank)  # 1 for `dn`, which keeps only the mean
    new_size = len(teachers.bank.query_bank)
    notes = [*applied.notes]
    if new_size < old_size:
        notes.append(
            f"the new bank has {new_size:,} queries, the old one had {old_size:,}"
        )
    return replace(applied, notes=notes, versus=versus)


UNEVEN = 1.4
"""The ratio to the largest count by chance up to which the worst hub counts as chance.

With 300 to 2,500 random queries to 4,096 random vectors in 2 to 384 dimensions, the
worst hub had up to 1.00 times that count. In 24 of 30 real banks, query logs among
them, it had 1.48 to 8.64 times that count. In the other six, which have 100 to 1,500
queries, it had 1.00 to 1.40 times (`python -m benchmarks.causes --chance`)."""


@dataclass(frozen=True)
class Fit:
    """A fitted correction.

    method: The method with all its parameters.
    trial: The guard's measurements; None if the correction was forced.
    lesson: The map learned from known answers; None if none was asked for.
    """

    model: OffsetModel
    method: Method
    trial: Trial | None
    lesson: LearnedMap | None

    @property
    def is_idle(self) -> bool:
        """True if there is no hubness beyond chance, no gain and no query map.

        Without a trial, this cannot be known, and the property is False.
        """
        trial = self.trial
        if trial is None or self.model.query_map is not None:
            return False
        for side in (trial.right, trial.asked):
            if side is not None and side.change.sign > 0:
                return False
        targets = sum(trial.raw.occurrences.values())
        skewness = skewness_by_chance(trial.queries, OCCURRENCE, targets)
        largest = largest_by_chance(trial.queries, OCCURRENCE, targets)
        is_even = trial.raw.skewness < skewness + HUBBY
        worst = trial.raw.largest * trial.queries
        return is_even and worst <= UNEVEN * largest


@dataclass(frozen=True)
class Job:
    """A requested correction; the fields are arguments of `apply`.

    learn: True if known answers also teach a map, or the pairs that teach it.
    """

    store: Store
    configuration: Method
    learn: bool | Bank
    force: bool
    dry_run: bool

    def read(self, bank: BankLike, compute: Compute) -> Teachers:
        """Read the banks, and raise every error that can be found without the gallery.

        Args:
            bank, compute: As in `apply`.
        """
        store = self.store
        chosen = bank_for(store, bank, self.learn is not False)
        teachers = Teachers.read(chosen, self.learn, store.metric, compute, store)
        self.configuration.require_banks(teachers.bank)
        store.require_writable(dry_run=self.dry_run)
        if not store.count():
            raise InputError(f"{store.url} is empty; add vectors, then correct it")
        if not self.force:
            require_size(teachers.bank, self.configuration)
        return teachers

    def read_gallery(
        self, teachers: Teachers, workers: ShardedStore | None = None
    ) -> tuple[SpooledGallery | ShardedStore, Teachers]:
        """Read the gallery; return it, and the banks with it.

        Args:
            teachers: The banks.
            workers: The shards, if workers read them; this process then has only a
                sample of the gallery.
        """
        bank = teachers.bank
        if workers is not None:
            source = cast(GalleryLike, self.store)
            read = read_by_workers(
                bank, source, workers.shards, self.configuration, workers.executor
            )
            return workers, Teachers(read)
        if self.learn is True:
            bank.require_answers()
        gallery = SpooledGallery(self.store, bank.compute, teachers.clicks)
        return gallery, teachers.against(gallery.vectors, gallery.rows)

    def fit(self, teachers: Teachers) -> Fit:
        """Try a correction on held-out queries, and fit it on all of the bank.

        Raises CorrectionRefused if it would do harm.
        """
        bank = teachers.bank
        logger.info("%s: trying %s", self.store.url, self.configuration.name)
        profile = None
        if not self.force:
            profile = require_kind(bank)  # before the first fit, which takes longer
        lesson = learned = None
        if self.learn is False:
            method = self.configuration.resolve(bank)
        else:
            lesson = learn_query_map(self.configuration, teachers)
            method = lesson.map_fit.offset_method
            if lesson.model.query_map is not None:
                learned = lesson.map_fit
        trial = right = None
        if not self.force:
            trial = judge_by(bank, method, 0, profile, learned).require_passed()
            right = trial.right
        logger.info(
            "%s: fitting %s on %d bank queries",
            self.store.url,
            method.name,
            len(bank.query_bank),
        )
        model = method.fit(bank) if lesson is None else lesson.model
        if bank.whole is None:  # otherwise, this process has only a sample
            model = with_hubness(model, bank, right)
        if not self.force:
            require_displacement(model, bank)
        return Fit(model, method, trial, lesson)

    def write(
        self, fit: Fit, bank: PreparedBank, gallery: SpooledGallery | ShardedStore
    ) -> Applied:
        """Write a correction, or count what would be written."""
        store = self.store
        model = fit.model
        # Before writing, since that replaces the active correction.
        drops_map = model.query_map is None and _has_map(store)
        if self.dry_run:
            applied = preview(store, model, bank.compute, store.plan())
        else:
            applied = write_gallery(store, model, gallery, bank.compute, self.force)
        notes = [*applied.notes]
        if fit.trial is None:
            # Nothing was tried, so say at least what to expect of a small bank.
            notes = [*small_bank(len(bank.distinct)), *notes]
        if fit.lesson is not None:
            notes += fit.lesson.notes
        if drops_map:
            notes.append(
                "the previous correction had a query map, and this one has none: "
                "rollback returns to it"
            )
        return replace(applied, trial=fit.trial, notes=notes)


def _has_map(store: Store) -> bool:
    """Return True if the active correction of `store` has a query map."""
    correction = store.correction()
    if correction is None or not correction.active:
        return False
    return correction.model.query_map is not None


def compare_with_old(fit: Fit, bank: PreparedBank, old: OffsetModel) -> OldVersusNew:
    """Compare the old and the new correction on held-out queries.

    A map knows the answers that taught it. So if either correction has a map, the test
    queries are the queries that the old model's bank lacks. If these are too few, the
    new model is tested as it is, and not fitted again without the test queries: both
    models have then seen most of them. A model does not keep pairs such as titles, so
    some test queries may still have taught an old map.

    Args:
        fit: The new correction.
        bank: The new bank, with the gallery.
        old: The active model.
    """
    new = fitted_by(fit.method) if fit.lesson is None else fit.lesson.map_fit
    folds = folds_of(bank)
    if fit.lesson is not None or old.query_map is not None:
        may_test = _may_test(bank, old)
        if may_test[bank.distinct].sum() >= FEWEST_PARAPHRASES:
            folds = folds_among(bank, may_test)
        else:
            new = as_it_is(fit.model)
    margins = cross_validate([uncorrected, as_it_is(old), new], bank, folds)
    return OldVersusNew(
        Figures.of(margins, 0),
        Figures.of(margins, 1, old.method, old.parameters),
        Figures.of(margins, 2, fit.method.name, fit.method.parameters),
        change_of(margins, 1, 2),
        len(bank.query_bank) / len(old.terms[0].bank),
    )


def _may_test(bank: PreparedBank, old: OffsetModel) -> np.ndarray:
    """Return the queries with known answers that the bank of `old` lacks: bool [m]."""
    answers = bank.known_answers
    if answers is None:
        return np.zeros(len(bank.query_bank), bool)
    may_test: np.ndarray = ~is_in_bank(old, bank.query_bank) & (answers >= 0)
    return may_test


def read_learn_for(
    store: Store, learn: object, method: str, executor: Executor | None = None
) -> bool | Bank:
    """Read `learn` with `read_learn`. Raises InputError if `store` cannot hold a map."""
    read = read_learn(learn, method, store.metric, store, executor)
    if read is not False and not store.maps_queries:
        raise InputError(
            f"{store.url} cannot hold a query map: leave out ", Parameter("learn")
        )
    return read


def bank_for(store: Store, bank: BankLike, learn: bool = False) -> Bank:
    """Return `bank`, or the recorded queries of `store` if it has no queries.

    Recorded clicks are included only if `learn` is True: people click on results they
    were shown, so clicks favour the correction that was active then. Raises InputError
    if no queries are recorded either.
    """
    bank = Bank.of(bank)
    if bank.queries is not None:
        return bank
    recorded = read_recorded(store)
    if recorded is None:
        place = "" if store.record is None else f" in {store.record}"
        raise InputError(
            f"{store.url}: no queries are recorded{place}; pass ",
            Parameter("bank"),
            ", vectors or the texts of a log with their model, or collect queries: "
            f"{store.how_to_record}",
        )
    answers = bank.answers
    if learn and answers is None:
        answers = recorded.answers
    return replace(bank, queries=recorded, answers=answers)


def find_half_written(job: Job, bank: PreparedBank) -> OffsetModel | None:
    """Return the half-written model of the store if `job` would fit the same one.

    Return None for a job that learns: a model does not record which answers taught its
    map, so it must be fitted again. If that gives the same model, writing still
    continues where it stopped.
    """
    if job.dry_run or job.learn:
        return None
    correction = job.store.correction()
    if correction is None or correction.active:
        return None
    model = correction.model
    is_same = job.configuration.has_made(model, bank) and model.query_map is None
    return model if is_same else None


def _configuration_like(model: OffsetModel, changes: dict[str, Setting]) -> Method:
    """Return the configuration of `model` with `changes`.

    A parameter whose default leaves the choice to the method is left out, so that the
    method chooses again.
    """
    parameters = dict(model.parameters)
    for name, field in METHODS[model.method].model_fields.items():
        if field.default in (None, "auto"):
            parameters.pop(name, None)
    return build_method(METHODS, model.method, parameters | changes)
