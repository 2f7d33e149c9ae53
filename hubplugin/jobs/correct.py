"""A correction of a store: read it, fit, try, write, activate. `refit` is `apply` against the correction that is there.

What offsets are is the model's to say, and how they are kept the store's.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import cast

from hubplugin.bank import Bank, BankLike, PreparedBank
from hubplugin.compute import Compute
from hubplugin.errors import CorrectionRefused, InputError, Parameter, StoreError
from hubplugin.executors import GalleryLike, read_by_workers
from hubplugin.fitting import require_executor
from hubplugin.guard import (
    FEWEST_PARAPHRASES,
    Trial,
    check,
    require_displacement,
    require_kind,
    require_size,
    small_bank,
)
from hubplugin.jobs.health import is_in_bank, with_hubness
from hubplugin.jobs.results import Applied, OldVersusNew, Refitted
from hubplugin.jobs.write import (
    ShardedStore,
    SpooledGallery,
    preview,
    require_match,
    write,
    write_gallery,
)
from hubplugin.learning import (
    Banks,
    LearnedMap,
    learn_query_map,
    read_learn,
    require_learnable,
)
from hubplugin.methods import METHODS, FitInput, Method, build_method
from hubplugin.model import OffsetModel, Setting
from hubplugin.store import LabelledQueries, Store, read_recorded
from hubplugin.validation import Configuration, cross_validate, folds_of

logger = logging.getLogger(__name__)


def apply(
    store: Store,
    bank: BankLike | OffsetModel,
    method: str = "blend",
    *,
    learn: bool | Bank = False,
    judged: BankLike | None = None,
    force: bool = False,
    dry_run: bool = False,
    compute: Compute = Compute(),
    executor: Executor | None = None,
    shards: int | None = None,
    **parameters: Setting,
) -> Applied:
    """Fits offsets on everything in a store, writes them, and activates them in one step.

    The guard tries the correction first, on held-out bank queries. A run that was cut off while it wrote goes on where
    it stopped, with its own model, if it is started again with the same bank, method and parameters. `rollback` returns
    to the model that was active before. Searches are unchanged whenever an error is raised.

    Args:
        store: any store, such as `hubplugin.open_store` returns.
        bank: as in `hubplugin.fit`. A `hubplugin.Bank` without queries stands for those that were recorded of the
            store, with learn for their clicks, too. A fitted model is written as it is, and not tried.
        method, judged, **parameters: as in `hubplugin.fit`.
        learn: as in `hubplugin.fit`; `Bank.from_field` reads pairs of the store itself. The store's own search maps
            the queries.
        force: applies the correction untried.
        dry_run: does all but the writing, and counts what would be written.
        compute: device, memory and progress.
        executor, shards: as in `hubplugin.fit`; the workers write, too (docs/scale.md).

    Raises:
        CorrectionRefused: the correction would do harm.
        InputError: for the bank or a parameter, or where the store cannot hold the map.
        StoreError: for the store.
    """
    compute, learn = _usable(compute), read_learn(learn)
    if isinstance(bank, OffsetModel):
        args = {
            "method": method != "blend",
            "learn": learn,
            "judged": judged,
        }
        for name, value in {**args, "executor": executor, **parameters}.items():
            if value is None or value is False:
                continue
            raise InputError(
                "a fitted model has its bank and its method already: leave out ",
                Parameter(name),
            )
        require_match(bank, store)
        if dry_run:
            return replace(preview(store, bank, compute), notes=store.plan())
        return write(store, bank, force=force, compute=compute)
    if learn is not False:
        require_learnable_in(store, method, executor)
    job = Job(
        store,
        build_method(METHODS, method, parameters, apply),
        learn,
        force,
        dry_run,
    )
    banks = job.read(bank, judged, compute)
    prepared = banks.bank
    if require_executor(executor, shards) and prepared.clicks is not None:
        raise InputError(
            "clicks need all targets in one process: leave ",
            Parameter("executor"),
            " out",
        )
    cut_off = None if dry_run else find_cut_off(job, prepared)
    by_workers = None if executor is None else ShardedStore(store, shards, executor)
    if cut_off is not None:
        return write_gallery(store, cut_off, by_workers, compute, force)
    if by_workers is not None:
        source = cast(GalleryLike, store)
        prepared = read_by_workers(
            prepared, source, by_workers.shards, job.configuration, by_workers.executor
        )
        banks = Banks(prepared)
    return _fit_and_write(job, banks, by_workers)[0]


def refit(
    store: Store,
    bank: BankLike | None = None,
    method: str | None = None,
    *,
    learn: bool | Bank | None = None,
    judged: BankLike | None = None,
    force: bool = False,
    dry_run: bool = False,
    compute: Compute = Compute(),
    **parameters: Setting,
) -> Refitted:
    """Fits the active correction of a store anew on a newer bank, and activates it if it is not worse than the old one.

    The guard tries the new correction as it does in `apply`. Then old and new rank held-out queries of the new bank.
    With known answers the new one is worse if R@1 falls by more than two standard errors, otherwise if hubness rises by
    more than `WORSE`. The old model may have been fitted on some of these queries, which speaks for it. A query map
    would speak too loudly: with one, they are compared on queries that the old bank lacks. `rollback` writes the old
    model. Searches are unchanged whenever an error is raised.

    Args:
        store: a store with an active correction.
        bank: as in `apply`; by default the queries that were recorded.
        method: by default that of the active correction, with those of its parameters that were given to it.
        learn: as in `apply`; by default a correction with a query map is learned anew.
        judged, dry_run, compute, **parameters: as in `apply`.
        force: activates the new correction though it is worse.

    Raises:
        CorrectionRefused: the new correction is worse, with both figures, or the guard objects.
        InputError: for the bank or a parameter.
        StoreError: for a store without an active correction.
    """
    correction = store.correction()
    if correction is None or not correction.active:
        raise StoreError(
            f"{store.url} has no active correction to fit anew; apply one first"
        )
    old, compute = correction.model, _usable(compute)
    by_default = learn is None
    learn = old.query_map is not None if learn is None else read_learn(learn)
    if learn is not False:
        require_learnable_in(store, method or old.method, None)
    if method is None:
        configuration = _configuration_of(old, parameters)
    else:
        configuration = build_method(METHODS, method, parameters, refit)
    job = Job(store, configuration, learn, force, dry_run, old)
    banks = job.read(Bank() if bank is None else bank, judged, compute)
    if by_default and learn and banks.bank.known_answers is None:
        raise InputError(
            "the active correction has a map of queries, and nothing here teaches a new one: pass ",
            Parameter("answers"),
            ", the pairs again (docs/titles.md), or ",
            Parameter("learn", False),
            " for a correction without a map",
        )
    done, versus = _fit_and_write(job, banks)
    assert versus is not None
    old_size = len(old.terms[0].bank)  # of `dn` the old one kept is its mean alone
    new_size = len(banks.bank.query_bank)
    notes = (
        [f"the new bank has {new_size:,} queries, the old one had {old_size:,}"]
        if new_size < old_size
        else []
    )
    return Refitted(**vars(replace(done, notes=[*done.notes, *notes])), versus=versus)


@dataclass(frozen=True)
class Job:
    """What is asked for. learn: what known answers teach beyond offsets. old: the active model, than which the new one
    must not be worse."""

    store: Store
    configuration: Method
    learn: bool | Bank
    force: bool
    dry_run: bool
    old: OffsetModel | None = None

    def read(self, bank: BankLike, judged: BankLike | None, compute: Compute) -> Banks:
        """`bank`, and `judged`, which chooses how strong a map is, prepared under `compute`; raises what can be told
        before the gallery is read."""
        store = self.store
        learned = self.learn is not False
        banks = Banks.read(
            bank_for(store, bank, learned),
            self.learn,
            judged,
            store.metric,
            compute,
            store,
        )
        self.configuration.require_banks(banks.bank)
        store.require_writable(dry_run=self.dry_run)
        if not store.count():
            raise InputError(f"{store.url} is empty; add vectors, then correct it")
        if not self.force:
            require_size(banks.bank, self.configuration)
        return banks


def _fit_and_write(
    job: Job, banks: Banks, by_workers: ShardedStore | None = None
) -> tuple[Applied, OldVersusNew | None]:
    """Reads the gallery, unless workers have, tries, fits and writes, or only counts what would be written. Raises
    CorrectionRefused where that would do harm, or the new correction is worse than the old one; nothing is written
    then."""
    store, compute, gallery = job.store, banks.bank.compute, None
    if by_workers is None:
        gallery = SpooledGallery(store, compute.progress, banks.clicks)
        banks = banks.against(gallery.vectors, gallery.rows)
    bank = banks.bank
    logger.info("%s: trying %s", store.url, job.configuration.name)
    trial, lesson = None, None
    profile = None if job.force else require_kind(bank)
    if job.learn is not False:
        lesson = learn_query_map(job.configuration, banks)
    if profile is not None:  # what would be applied is judged
        method = (
            job.configuration.resolve(bank) if lesson is None else lesson.how.offsets
        )
        trial = check(bank, method, profile, None if lesson is None else lesson.how)
    versus = None if job.old is None else compare_with_old(job, bank, job.old, lesson)
    logger.info(
        "%s: fitting %s on %d bank queries",
        store.url,
        job.configuration.name,
        len(bank.query_bank),
    )
    model = job.configuration.fit(bank) if lesson is None else lesson.model
    model = model if gallery is None else with_hubness(model, bank)
    if not job.force:
        require_displacement(model, bank)
    before = store.correction() if job.old is None and model.query_map is None else None
    if job.dry_run:
        done = replace(preview(store, model, compute), notes=store.plan())
    else:
        done = write_gallery(
            store,
            model,
            gallery or by_workers,
            compute,
            job.force,
            _queries_to_try(bank, trial),
        )
    # Where nothing was tried, what to expect of the bank is still worth a line.
    notes = [*(small_bank(len(bank.distinct)) if trial is None else []), *done.notes]
    notes += [] if lesson is None else lesson.notes
    if before is not None and before.active and before.model.query_map is not None:
        notes.append(
            "the correction of before had a map of queries, and this one has none: rollback returns to it"
        )
    return replace(done, trial=trial, notes=notes), versus


def compare_with_old(
    job: Job, bank: PreparedBank, old: OffsetModel, lesson: LearnedMap | None
) -> OldVersusNew:
    """Compares old and new correction on held-out queries.

    A map knows the answers that it was taught, so that it would be ahead of any correction that learns without them:
    with a map, they are tried on queries that the old model's bank lacks. Where there are few, both are tried as they
    are: they have seen the same. Pairs such as titles are not kept, so an old map may have been taught some.

    Args:
        job: what is asked for.
        bank: the new bank, with the gallery.
        old: the active model.
        lesson: the new map, if there is one.

    Raises:
        CorrectionRefused: the new correction is worse.
    """
    folds = folds_of(bank)
    method = job.configuration.resolve(bank) if lesson is None else lesson.how.offsets
    new: Configuration = method if lesson is None else lesson.how
    if lesson is not None or old.query_map is not None:
        fresh = ~is_in_bank(old, bank.query_bank)
        answers = bank.known_answers
        if (
            answers is not None
            and (fresh & (answers >= 0))[bank.distinct].sum() >= FEWEST_PARAPHRASES
        ):
            folds = folds_of(bank, may_test=fresh)
        else:
            new = method.fit(bank) if lesson is None else lesson.model
    return require_not_worse(
        OldVersusNew.of(cross_validate([None, old, new], bank, folds), old, method),
        job.force,
    )


def _queries_to_try(bank: PreparedBank, trial: Trial | None) -> LabelledQueries | None:
    """What a store can try its own searches with; None where clicks are not known."""
    rows = bank.clicked_rows
    if rows is None:
        return None
    sides = (
        []
        if trial is None
        else [side for side in (trial.right, trial.asked) if side is not None]
    )
    gains = [(side.change.value, side.error) for side in sides]
    return LabelledQueries(
        bank.query_bank[rows >= 0], rows[rows >= 0], min(gains, default=None)
    )


def _usable(compute: Compute) -> Compute:
    """With what offsets are computed; raises InputError for a device that is not there, before a gallery is read."""
    if compute.device not in ("auto", "numpy"):
        compute.torch_device()
    return compute


def require_learnable_in(store: Store, method: str, executor: Executor | None) -> None:
    """Raises InputError where `store` cannot hold a map, or none goes with `method` or `executor`, before anything is
    read."""
    if not store.maps_queries:
        raise InputError(
            f"{store.url} holds no map of queries: leave out ", Parameter("learn")
        )
    require_learnable(method, store.metric, store, executor=executor)


def bank_for(store: Store, bank: BankLike, learn: bool = False) -> Bank:
    """`bank` as one for `store`, whose recorded queries take the place of none; raises InputError if there are none.

    If `learn`, what was recorded of their clicks comes along. Nothing else uses those: people click what a search
    showed them, so they speak for the correction that was active then.
    """
    if not isinstance(store, Store):
        raise InputError(
            f"expected a store, got {type(store).__name__}; open one: hubplugin.open_store(URL)"
        )
    bank = Bank.of(bank)
    if bank.queries is not None:
        return bank
    recorded = read_recorded(store)
    if recorded is None:
        place = "" if store.record is None else f" in {store.record}"
        raise InputError(
            f"{store.url}: no queries are recorded{place}; pass ",
            Parameter("bank"),
            f", vectors or a log's texts with their model, or collect queries: {store.how_to_record}",
        )
    answers = recorded.answers if learn and bank.answers is None else bank.answers
    return replace(bank, queries=recorded, answers=answers)


def find_cut_off(job: Job, bank: FitInput) -> OffsetModel | None:
    """The model whose writing was cut off, if `job` with `bank` asks for the same.

    A model does not say which answers taught its map, so that only another fit tells whether it is the same. If it is,
    it is still written where it stopped.
    """
    correction = job.store.correction()
    if correction is None or correction.active or job.learn:
        return None
    model = correction.model
    same = job.configuration.has_made(model, bank) and model.query_map is None
    return model if same else None


def _configuration_of(model: OffsetModel, changes: dict[str, Setting]) -> Method:
    """The configuration of `model`, with `changes`. What the method finds by itself it finds anew."""
    fields = METHODS[model.method].model_fields if model.method in METHODS else {}
    automatic = {
        name for name, field in fields.items() if field.default in (None, "auto")
    }
    chosen = {
        name: value for name, value in model.parameters.items() if name not in automatic
    }
    return build_method(METHODS, model.method, chosen | changes, refit)


def require_not_worse(versus: OldVersusNew, force: bool) -> OldVersusNew:
    """`versus`; raises CorrectionRefused where the new correction is worse, unless `force`."""
    logger.info("%s", versus)
    if versus.objection and not force:
        raise CorrectionRefused(
            f"the new correction is worse than the active one: {versus.objection}; nothing was changed: record more "
            "queries, or activate it all the same with ",
            Parameter("force", True),
        )
    return versus
