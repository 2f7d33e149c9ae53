"""Offsets of a fitted model into a store: read, compare, write, activate; by one process or by shards.

How offsets are kept is the store's to say.
"""

from __future__ import annotations

import logging
import pickle
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from hubplugin.bank import places
from hubplugin.compute import Compute
from hubplugin.errors import HubpluginError, InputError, Parameter, StoreError, telling
from hubplugin.executors import Shard, Sharded, map_shards
from hubplugin.jobs.results import Applied, InvalidVectors, Removed
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, refuse_query_map, warn_if_swapped
from hubplugin.store import Batch, LabelledQueries, Share, Store, StoreShard, Writing
from hubplugin.vectors import Progress, Sliceable, cannot_keep, to_tempfile

UNIT = 1e-2
"""How far from 1 the length of a vector may lie that counts as normalised; float16 keeps it within 1e-3."""


def offsets_of_all(
    model: OffsetModel,
    batch: Batch,
    invalid_vectors: InvalidVectors,
    *,
    unit: bool,
    compute: Compute,
    fitted: np.ndarray | None = None,
) -> np.ndarray:
    """The offsets of the vectors of a batch, float32 [b].

    A model cannot judge a vector that is not finite. Under cosine it cannot judge one of length 0 either, nor, where
    the store does not normalise, one of another length than 1. Such a vector gets the smallest offset of the gallery,
    since the neutral one would rank it above most others. One of length 0 is near to no query, and gets the neutral
    one.

    Args:
        model, batch: the model and the targets.
        invalid_vectors: counts and names the vectors that the model cannot judge.
        unit: the store does not normalise.
        compute: device, memory and progress.
        fitted: the offsets of these vectors, where the fit has given them.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.linalg.norm(batch.vectors.astype(np.float64), axis=1)
    is_valid = np.isfinite(lengths)
    if model.metric is Metric.COSINE:
        is_valid &= (np.abs(lengths - 1) <= UNIT) if unit else (lengths > 0)
    rows, part = np.flatnonzero(is_valid), batch
    if not is_valid.all():
        part = batch.take(rows)
        invalid_vectors.note(batch.ids, batch.vectors, np.flatnonzero(~is_valid))
    offsets = np.full(
        len(batch.vectors),
        0.0 if model.gallery is None else model.gallery.smallest,
        np.float32,
    )
    if model.metric is Metric.COSINE:
        offsets[lengths == 0] = 0
    if fitted is not None:
        offsets[rows] = fitted[rows]
    elif len(rows):
        offsets[rows] = model.offsets(part.vectors, compute=compute.without_progress)
    return offsets


ROUNDING = 1e-6
"""Of the largest offset: what float32 loses of offsets on their way through a store and back, some ten roundings. Under
Euclidean distance and dot product they grow with the square of the vectors, and what is lost grows with them."""


@dataclass
class Counts:
    """Of the targets `scanned`, how many have no offset (`missing`), how many one that the model does not give
    (`stale`), how many something else in its place (`foreign`), and which the model cannot judge."""

    scanned: int = 0
    missing: int = 0
    stale: int = 0
    foreign: int = 0
    invalid_vectors: InvalidVectors = field(default_factory=InvalidVectors)

    def add(self, other: Counts) -> None:
        for name in ("scanned", "missing", "stale", "foreign"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.invalid_vectors.count += other.invalid_vectors.count
        self.invalid_vectors.named |= other.invalid_vectors.named

    def as_applied(self, store: Store, model: OffsetModel, **fields: Any) -> Applied:
        counts = self.scanned, self.missing, self.stale
        return Applied(
            store.url, model, *counts, invalid_vectors=self.invalid_vectors, **fields
        )


def compare(
    store: Store,
    model: OffsetModel,
    batches: Iterable[Batch],
    counts: Counts,
    compute: Compute,
    label: str,
    gallery: Sliceable | None = None,
) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
    """Yields each batch, the offsets that the model gives to its targets, float32 [b], and whose stored offset is
    missing or differs, bool [b].

    Args:
        store, model: the store and the model.
        batches: all targets of the store.
        counts: is brought up to date with each batch.
        compute: device, memory and progress.
        label: the name of the work, for progress.
        gallery: what the model was just fitted on, in the order of `batches`: its offsets are not computed again.
    """
    total, scale = store.count(), 0.0
    if model.gallery is not None:
        scale = max(abs(model.gallery.smallest), abs(model.gallery.largest))
    for batch in batches:
        rows, fitted = slice(counts.scanned, counts.scanned + len(batch.ids)), None
        if (
            gallery is not None
            and model.fitted is not None
            and np.array_equal(gallery.take(rows), batch.vectors)
        ):
            fitted = model.fitted[rows]
        offsets = offsets_of_all(
            model,
            batch,
            counts.invalid_vectors,
            unit=store.unit,
            compute=compute,
            fitted=fitted,
        )
        absent, differs = np.isnan(batch.offsets), np.zeros(len(offsets), bool)
        if not absent.all():
            room = store.precision + ROUNDING * np.maximum(scale, np.abs(offsets))
            room += 0.0 if batch.rounding is None else batch.rounding(offsets)
            differs = np.abs(batch.offsets - offsets) > room  # of NaN, none
        counts.missing += int(absent.sum())
        counts.stale += int(differs.sum())
        counts.foreign += batch.foreign
        yield batch, offsets, absent | differs
        counts.scanned = rows.stop
        compute.report(label, min(rows.stop, total), total)


def write_wrong(
    writing: Writing, compared: Iterable[tuple[Batch, np.ndarray, np.ndarray]]
) -> None:
    """Writes by `writing` the offsets that are missing or differ, from what `compare` yields, `compared`."""
    for batch, offsets, wrong in compared:
        if writing.takes_all or wrong.all():
            writing.write(batch, offsets)
        elif wrong.any():
            writing.write(batch.take(np.flatnonzero(wrong)), offsets[wrong])


class SpooledGallery:
    """The `vectors` of a store, and, of a shared one, the batches they came in: so a fit reads them as often as it
    needs, and they are written without another scan. rows: of the ids in `clicked`."""

    def __init__(
        self,
        store: Store,
        progress: Progress | None,
        clicked: np.ndarray | None = None,
    ):
        self.rows: dict[int | str, int] = {}
        self._clicked = set() if clicked is None else set(clicked.tolist())
        self._lists = tempfile.TemporaryFile()  # noqa: SIM115 - it goes with this object
        weakref.finalize(self, self._lists.close)
        self.vectors = to_tempfile(
            self._read(store, progress), store.url, store.count()
        )

    def _read(self, store: Store, progress: Progress | None) -> Iterator[np.ndarray]:
        total, done = store.count(), 0
        for batch in store.scan():
            if store.shared:
                try:
                    pickle.dump((batch.place, batch.ids), self._lists)
                    self._lists.flush()
                except OSError as error:
                    raise cannot_keep(store.url, error, 4 * store.dim * total) from None
            if self._clicked:
                self.rows.update(places(batch.ids, done, self._clicked))
            yield batch.vectors
            done += len(batch.vectors)
            if progress is not None:
                progress("reading the gallery", min(done, total), total)

    def batches(self) -> Iterator[Batch]:
        """The batches as they came, without offsets."""
        self._lists.seek(0)
        first = 0
        while first < self.vectors.rows:
            place, ids = pickle.load(self._lists)
            vectors = self.vectors.take(slice(first, first + len(ids)))
            yield Batch(
                ids,
                vectors,
                np.full(len(ids), np.nan, np.float32),
                place=place,
            )
            first += len(ids)


class ShardedStore:
    """The shards of `store`, whose offsets workers write."""

    def __init__(self, store: Store, count: int | None, executor: Executor):
        if not isinstance(store, Sharded):
            raise StoreError(f"{store.url} cannot be read in parts by other machines")
        self.shards = store.shards(count)
        self.executor = executor

    def write(self, share: Share, compute: Compute, label: str) -> Counts:
        """Reads all shards once, and writes by `share` the offsets that are missing or differ, under `compute`;
        progress calls the work `label`."""
        counts = Counts()
        for part in map_shards(
            self.executor,
            _WriteShard(share, compute.without_progress, label),
            self.shards,
            compute,
            label,
        ):
            counts.add(part)
        return counts


@dataclass(frozen=True)
class _WriteShard:
    """What a worker does with a shard of a store."""

    share: Share
    compute: Compute
    label: str

    def __call__(self, number: int, shard: Shard) -> Counts:
        store, writing, model = self.share.join(cast(StoreShard, shard))
        counts = Counts()
        with writing:
            write_wrong(
                writing,
                compare(store, model, writing.scan(), counts, self.compute, self.label),
            )
            writing.wait()
        return counts


logger = logging.getLogger(__name__)

CLOSING_PASSES = 3
"""How often a shared store is read again before the switch. Each pass finds what came during the one before, so
that more than one finds anything only where others write as fast as it reads."""


def refresh(
    store: Store, *, dry_run: bool = False, compute: Compute = Compute()
) -> Applied:
    """Writes the offsets that are missing or stale under the active model, and no others.

    Args:
        store: A store with an active correction.
        dry_run: Only counts them.
        compute: Device, memory and progress.

    Raises:
        StoreError: The store has no active correction, or cannot be read or written.
    """
    correction = store.correction()
    if correction is None or not correction.active:
        half = "a half-written correction; run apply again to finish it"
        state = half if correction else "no correction; apply one first"
        raise StoreError(f"{store.url} has {state}")
    if dry_run:
        return preview(store, correction.model, compute)
    return write(store, correction.model, compute=compute)


def remove(
    store: Store, *, dry_run: bool = False, compute: Compute = Compute()
) -> Removed:
    """Takes the correction out of `store`, as if it had never been there.

    Args:
        store: Any store; without a correction nothing happens.
        dry_run: Only says what it would take out.
        compute: Its progress is reported.

    Raises:
        StoreError: The store cannot be written.
    """
    try:
        correction = store.correction()
        removed = Removed(
            store.url,
            not dry_run and correction is not None,
            correction,
            store.previous(),
        )
    except HubpluginError:  # a removal needs no model, and takes a damaged one out, too
        if dry_run:
            raise
        removed = Removed(store.url, True)
    if not dry_run:
        with telling(
            f"{store.url}: the correction was being taken out; the same command finishes"
        ):
            store.remove(compute.progress)
    return removed


def rollback(
    store: Store, *, compute: Compute = Compute(), dry_run: bool = False
) -> Applied:
    """Writes the model that was active before the present one, as `apply` writes a fitted model.

    Every target gets the offset that this model gives it now. The model that was left is the previous one then, so that
    a second rollback returns to it.

    Args:
        store: A store with a correction.
        compute: Device, memory and progress.
        dry_run: Only counts what would be written.

    Raises:
        StoreError: No model was active before, or the store cannot be read or written.
    """
    model = store.previous()
    if model is None:
        none = (
            "has no correction"
            if store.correction() is None
            else "keeps no model that was active before this one"
        )
        raise StoreError(f"{store.url} {none}, so there is nothing to roll back to")
    if dry_run:
        return preview(store, model, compute)
    return write(store, model, compute=compute, force=True)  # it was active before


def write(
    store: Store,
    model: OffsetModel,
    *,
    compute: Compute = Compute(),
    force: bool = False,
) -> Applied:
    """Writes the offsets of a fitted `model` to everything in `store` and activates them, under `compute`; `force` is
    `Writing.forced`."""
    require_match(model, store)
    store.require_writable()
    warn_if_swapped(model, store.count())
    gallery = None
    if model.gallery is None:
        gallery = SpooledGallery(store, compute.progress)
        model = model.centre_on(gallery.vectors, compute=compute)
    return write_gallery(store, model, gallery, compute, force)


def write_gallery(
    store: Store,
    model: OffsetModel,
    gallery: SpooledGallery | ShardedStore | None,
    compute: Compute,
    force: bool = False,
    labelled: LabelledQueries | None = None,
) -> Applied:
    """Does as `write`, with a gallery that was just read.

    Args:
        store, model: the store and the model.
        gallery: what was read of the store, where it was; workers write, where it has some.
        compute: device, memory and progress.
        force, labelled: `Writing.forced` and `Writing.labelled`.
    """

    def once(closing: bool) -> Counts:
        """One pass: read, compare, write. A gallery that was just read is not read again but to close."""
        label, counts = "closing" if closing else "writing offsets", Counts()
        if isinstance(gallery, ShardedStore):
            return gallery.write(writing.share(), compute, label)
        was_read = (
            gallery is not None
            and store.shared
            and writing.found == "nothing"
            and not closing
        )
        batches = (
            gallery.batches() if gallery is not None and was_read else writing.scan()
        )
        vectors = None if gallery is None else gallery.vectors
        write_wrong(
            writing, compare(store, model, batches, counts, compute, label, vectors)
        )
        return counts

    half = f"{store.url}: offsets were being written; searches are as before, and the same command goes on"
    whole = f"{store.url}: searches use the old correction or the new one, whole; the same command finishes"
    with telling(half), store.begin(model, compute.progress) as writing:
        writing.forced, writing.labelled = force, labelled
        first = once(closing=False)
        for _ in range(
            CLOSING_PASSES if store.shared and writing.found != "active" else 0
        ):
            later = once(closing=True)
            if not later.missing + later.stale:
                break
        writing.wrong = first.missing + first.stale
        logger.info("%s: %d offsets written, activating", store.url, writing.wrong)
        with telling(whole):
            writing.activate()
    logger.info("%s: active is %s", store.url, model)
    with telling(f"{store.url}: the correction is active"):
        return first.as_applied(store, model, notes=store.notes())


def preview(store: Store, model: OffsetModel, compute: Compute) -> Applied:
    """`model` compared with what `store` has, under `compute`, and nothing written."""
    counts = Counts()
    for _ in compare(store, model, store.scan(), counts, compute, "comparing offsets"):
        pass
    return counts.as_applied(store, model, written=False)


def require_match(model: OffsetModel, store: Store) -> None:
    """Raises InputError if `model` cannot give offsets to the vectors of `store`, or it has a map of queries that the
    store would leave out."""
    if model.query_map is not None and not store.maps_queries:
        raise refuse_query_map(store.url)
    if model.dim != store.dim:
        raise InputError(
            f"the model has {model.dim} dimensions, {store.url} has {store.dim}; fit one on its vectors"
        )
    if not store.takes_metric(model.metric):
        raise InputError(
            f"the model is for {model.metric.value}, {store.url} ranks by {store.metric.value}; fit with ",
            Parameter("metric", store.metric.value),
        )
