"""The job on a store: scan, fit, check, write, verify, activate. What offsets are is the model's to say, and how they
are kept the store's."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.experiment import OCCURRENCE
from hubplugin.fitting import fit
from hubplugin.guard import Judgement, check, check_bank
from hubplugin.jobs.groups import fit_within
from hubplugin.jobs.spooled_gallery import SpooledGallery
from hubplugin.jobs.unjudged import Unjudged, offsets_of_all
from hubplugin.measures.hubness import skewness_by_chance, skewness_of_finds
from hubplugin.methods import FitInput, asked_for
from hubplugin.metric import Metric
from hubplugin.model import GroupedModel, OffsetModel, Value, warn_if_swapped
from hubplugin.reductions import Compute
from hubplugin.store import Batch, Correction, Store
from hubplugin.tuning import Pairs, choose
from hubplugin.vectors import Progress, VectorLike, as_vectors

CLOSING_PASSES = 3
"""How often a shared store is read again before the switch. Each pass finds what came during the one before, so
that more than one finds anything only where others write as fast as it reads."""

NAMED = 10
"""How many of the groups that stay neutral are named."""

PROBES = 200
"""Bank queries with which an inspection looks at hubness."""


@dataclass(frozen=True)
class Applied:
    """What `apply` or `refresh` did: the model, and of `scanned` targets how many had no offset, and how many a
    different one, before. `written` is False after a dry run, which only counted them. neutral: the groups that have
    the offset 0, and why. plan: what would be done to the store, after a dry run. judgement: what the guard saw before
    `apply`; None where it was not asked, or each group on its own."""

    model: OffsetModel
    scanned: int
    missing: int
    stale: int
    written: bool = True
    neutral: Mapping[Value, str] = field(default_factory=dict)
    plan: Sequence[str] = ()
    judgement: Judgement | None = None
    unjudged: Unjudged = field(default_factory=Unjudged)

    def __str__(self) -> str:
        text = (
            f"{self.scanned} targets, of which {self.missing} had no offset and {self.stale} another one; "
            f"{'active' if self.written else 'nothing was written; would be active'}: {self.model}"
        )
        if self.judgement is not None:
            tried, before, after = self.judgement.probes, self.judgement.uncorrected, self.judgement.candidate
            text += f"\ntried on {tried} held-out bank queries:\n  {before}\n  {after}"
        if self.neutral:
            named = "; ".join(f"{value!r}: {why}" for value, why in itertools.islice(self.neutral.items(), NAMED))
            more = f"; and {len(self.neutral) - NAMED} more" if len(self.neutral) > NAMED else ""
            text += f"\nkept at offset 0: {named}{more}"
        if self.unjudged.count:
            text += f"\n{self.unjudged}"
        return "\n".join((text, *self.plan))


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found: the correction, if any, and of `count` targets how many lack an offset, how many have one
    that their vector no longer gives, and how many carry something else in its place. skewness: of the 10-occurrence
    of `probes` bank queries over the targets as they are now, searched raw and corrected; None where it was not
    measured.
    """

    url: str
    metric: Metric
    dim: int
    count: int
    correction: Correction | None
    missing: int = 0
    stale: int = 0
    foreign: int = 0
    skewness: tuple[float, float] | None = None
    probes: int = 0
    notes: Sequence[str] = ()
    unjudged: Unjudged = field(default_factory=Unjudged)

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
        lines = [text, *self.notes, *([str(self.unjudged)] if self.unjudged.count else [])]
        if self.skewness is not None:
            raw, corrected = self.skewness
            chance = skewness_by_chance(self.probes, OCCURRENCE, self.count)
            lines.append(
                f"hubness now: skewness of the {OCCURRENCE}-occurrence of {self.probes} queries {raw:.2f} raw, "
                f"{corrected:.2f} corrected; by chance it would be {chance:.2f}"
            )
        health = "every target has its offset" if not self.missing + self.stale else "run refresh"
        lines.append(f"{self.missing} missing, {self.stale} stale: {health}")
        if self.foreign:
            lines.append(f"{self.foreign} with something in the place of offsets that this correction did not write")
        return "\n".join(lines)


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
        scanned, missing, stale, _, unjudged = _compared(store, model, "comparing offsets", device, memory, progress)
        return Applied(model, scanned, missing, stale, False, neutral, store.plan(), judgement, unjudged)
    return replace(_write(store, model, gallery, device, memory, progress), neutral=neutral, judgement=judgement)


def refresh(
    store: Store, *, device: str = "auto", memory: int | str = "1GiB", progress: Progress | None = None
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
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> Applied:
    """Writes the offsets of a fitted `model` to everything in `store` and activates them."""
    require_match(model, store)
    warn_if_swapped(model, store.count())
    gallery = None
    if model.gallery is None:
        gallery = SpooledGallery(store, progress)
        model = model.centred_on(gallery.vectors, device=device, memory=memory, progress=progress)
    return _write(store, model, gallery, device, memory, progress)


def _write(
    store: Store,
    model: OffsetModel,
    gallery: SpooledGallery | None,
    device: str,
    memory: int | str,
    progress: Progress | None,
) -> Applied:
    """`write`, of what was just read from the store, the `gallery`, where there is one."""
    store.progress = progress
    found = store.correction()
    lies = found is not None and found.model.fingerprint == model.fingerprint
    amends = found is not None and found.active and lies

    def one_pass(what: str, batches: Iterator[Batch], everything: bool) -> tuple[int, int, int, Unjudged]:
        """Of how many targets how many had no offset, how many another one, and which the model cannot judge."""
        scanned = missing = stale = 0
        total, unjudged = store.count(), Unjudged()
        for batch in batches:
            offsets = _offsets(store, model, batch, unjudged, device, memory)
            absent, differs = _differences(store, batch, offsets)
            wrong = np.ones(len(offsets), bool) if everything else absent | differs
            if wrong.all():
                store.write(batch, offsets)
            elif wrong.any():
                store.write(batch.some(np.flatnonzero(wrong)), offsets[wrong])
            scanned, missing, stale = scanned + len(offsets), missing + int(absent.sum()), stale + int(differs.sum())
            if progress is not None:
                progress(what, min(scanned, total), total)
        return scanned, missing, stale, unjudged

    try:
        after = store.begin(model)
        # In a shared store a scan has the offsets of what is being written, so that only what lacks them is written.
        anew = store.scan(after) if gallery is None or lies or not store.shared else gallery.batches()
        first = one_pass("writing offsets", anew, not (amends or store.shared))
        for _ in range(CLOSING_PASSES if store.shared and not amends else 0):
            _, missing, stale, _ = one_pass("closing", store.scan(), False)
            if not missing + stale:
                break
        store.activate()
    finally:
        store.release()
    scanned, missing, stale, unjudged = first
    return Applied(model, scanned, missing, stale, unjudged=unjudged)


def inspect(
    store: Store,
    *,
    probes: int = PROBES,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> Inspection:
    """What correction lies in `store`, whether every target has the offset that its vector gives, and what it does to
    hubness now, seen by searching for `probes` queries of the bank; 0 searches for none."""
    found, missing, stale, foreign, unjudged = store.correction(), 0, 0, 0, Unjudged()
    if found is not None:
        _, missing, stale, foreign, unjudged = _compared(
            store, found.model, "checking offsets", device, memory, progress
        )
    skewness = None
    if found is not None and found.active:
        bank = found.model.terms[0].bank
        probes = min(probes, len(bank)) if len(bank) > 1 else 0  # where a model keeps no more than a mean
        skewness = _skewness(store, bank[np.linspace(0, len(bank) - 1, probes).astype(int)]) if probes else None
    return Inspection(
        store.url, store.metric, store.dim, store.count(),
        found, missing, stale, foreign, skewness, probes, store.notes(), unjudged,
    )  # fmt: skip


def _skewness(store: Store, queries: np.ndarray) -> tuple[float, float]:
    """Of the k-occurrence of `queries` [m, d], searched raw and corrected."""
    count = store.count()

    def skewness(raw: bool) -> float:
        found = Counter(itertools.chain.from_iterable(store.search(queries, OCCURRENCE, raw=raw).ids))
        return skewness_of_finds(np.array([*found.values()]), count)

    return skewness(raw=True), skewness(raw=False)


def _compared(
    store: Store, model: OffsetModel, what: str, device: str, memory: int | str, progress: Progress | None
) -> tuple[int, int, int, int, Unjudged]:
    """How many targets there are, how many have no offset, how many one that `model` would not give, how many
    something else in its place, and which the model cannot judge."""
    scanned = missing = stale = foreign = 0
    total, unjudged = store.count(), Unjudged()
    for batch in store.scan():
        absent, differs = _differences(store, batch, _offsets(store, model, batch, unjudged, device, memory))
        scanned, missing, stale = scanned + len(absent), missing + int(absent.sum()), stale + int(differs.sum())
        foreign += batch.foreign
        if progress is not None:
            progress(what, min(scanned, total), total)
    return scanned, missing, stale, foreign, unjudged


def _offsets(
    store: Store, model: OffsetModel, batch: Batch, unjudged: Unjudged, device: str, memory: int | str
) -> np.ndarray:
    return offsets_of_all(
        model, batch.vectors, batch.ids, unjudged,
        unit=store.unit, groups=batch.groups, device=device, memory=memory,
    )  # fmt: skip


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
            f"the model is for {model.metric.value}, {store.url} ranks by {store.metric.value}; fit with ",
            Parameter("metric", store.metric.value),
        )


def _key(model: OffsetModel) -> str | None:
    return model.key if isinstance(model, GroupedModel) else None
