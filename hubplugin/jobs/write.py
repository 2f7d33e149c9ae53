"""Write a model's offsets to a store, in one process or by shards.

The steps are read, compare, write and activate. Each store decides how it keeps
offsets.
"""

from __future__ import annotations

import logging
import pickle
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
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
from hubplugin.model import OffsetModel, refuse_query_map
from hubplugin.results import NAMED
from hubplugin.store import (
    Batch,
    Id,
    Share,
    Store,
    StoreShard,
    Writing,
    for_job,
)
from hubplugin.vectors import Sliceable, cannot_keep, to_tempfile

UNIT = 1e-2
"""The largest deviation from 1 of the length of a normalised vector.

float16 keeps the length within 1e-3."""


def offsets_of_all(
    model: OffsetModel,
    batch: Batch,
    invalid_vectors: InvalidVectors,
    *,
    unit: bool,
    compute: Compute,
    fitted: np.ndarray | None = None,
) -> np.ndarray:
    """Return the offsets of all vectors in a batch, float32 [b].

    A model cannot judge a vector that is not finite. Under cosine, it cannot judge a
    vector of length 0, either. If the store does not normalise vectors, it cannot judge
    a vector whose length is not 1.

    Such a vector gets the smallest offset of the gallery, since the neutral offset 0
    would rank it above most others. Only a vector of length 0 gets the neutral offset
    under cosine: it is near to no query.

    Args:
        model: The model.
        batch: The targets.
        invalid_vectors: Counts and names the vectors that the model cannot judge.
        unit: True if the store does not normalise vectors itself.
        compute: Device, memory and progress.
        fitted: The offsets of these vectors, if the fit has computed them.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.linalg.norm(batch.vectors.astype(np.float64), axis=1)
    is_valid = np.isfinite(lengths)
    if model.metric is Metric.COSINE:
        is_valid &= (np.abs(lengths - 1) <= UNIT) if unit else (lengths > 0)
    rows = np.flatnonzero(is_valid)
    invalid_vectors.note(batch.ids, lengths, np.flatnonzero(~is_valid))
    smallest = 0.0 if model.gallery is None else model.gallery.smallest
    offsets = np.full(len(lengths), smallest, np.float32)
    if model.metric is Metric.COSINE:
        offsets[lengths == 0] = 0
    if fitted is not None:
        offsets[rows] = fitted[rows]
    elif len(rows):
        quiet = compute.without_progress
        offsets[rows] = model.offsets(batch.vectors[rows], compute=quiet)
    return offsets


ROUNDING = 1e-6
"""The share of the largest offset up to which two offsets count as equal.

A float32 offset is rounded up to some ten times on the way through a store and back.
The tolerance is relative because offsets, and with them the errors, grow with the
square of the vectors under Euclidean distance and dot product."""


@dataclass
class Counts:
    """The number of targets that were scanned, and of those with a wrong offset.

    missing: Targets without an offset.
    stale: Targets whose offset differs from the model's.
    foreign: Targets with something else in place of an offset.
    missing_ids, stale_ids: Some ids of missing and stale targets.
    """

    scanned: int = 0
    missing: int = 0
    stale: int = 0
    foreign: int = 0
    missing_ids: list[Id] = field(default_factory=list)
    stale_ids: list[Id] = field(default_factory=list)
    invalid_vectors: InvalidVectors = field(default_factory=InvalidVectors)

    def note(self, batch: Batch, missing: np.ndarray, stale: np.ndarray) -> None:
        """Count the targets of a batch, and those with a wrong offset.

        Args:
            batch: The targets.
            missing, stale: True for each target without an offset, and for each target
                whose offset differs from the model's, bool [b].
        """
        self.scanned += len(batch.ids)
        self.missing += int(missing.sum())
        self.stale += int(stale.sum())
        self.foreign += batch.foreign
        for ids, is_wrong in ((self.missing_ids, missing), (self.stale_ids, stale)):
            rows = np.flatnonzero(is_wrong)[: NAMED - len(ids)].tolist()
            ids += [batch.ids[row] for row in rows]

    def add(self, other: Counts) -> None:
        """Add the numbers of another part of the store; its ids are not needed."""
        self.scanned += other.scanned
        self.missing += other.missing
        self.stale += other.stale
        self.foreign += other.foreign
        self.invalid_vectors.count += other.invalid_vectors.count
        self.invalid_vectors.named |= other.invalid_vectors.named

    def as_applied(self, store: Store, model: OffsetModel, **fields: Any) -> Applied:
        """Return the result of a job; `fields` are further fields of `Applied`."""
        return Applied(
            store.url,
            model,
            self.scanned,
            self.missing,
            self.stale,
            invalid_vectors=self.invalid_vectors,
            **fields,
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
    """Compare the stored offsets with those of a model, batch by batch.

    Args:
        store: The store.
        model: The model.
        batches: All targets of the store.
        counts: The counts, to which each batch is added.
        compute: Device, memory and progress.
        label: The name of this step in progress reports.
        gallery: The gallery on which the model was just fitted, in the order of
            `batches`; the offsets of its targets are not computed again.

    Yields:
        The batch, the model's offsets for it, float32 [b], and True for each stored
        offset that is missing or differs, bool [b].
    """
    total = store.count()
    for batch in batches:
        rows = slice(counts.scanned, counts.scanned + len(batch.ids))
        fitted = None
        # The offsets of the fit hold only for the vectors of the fit, and another
        # program may have changed these.
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
        missing = np.isnan(batch.offsets)
        difference = np.abs(batch.offsets - offsets)  # NaN, thus not stale, if missing
        stale = difference > find_tolerance(store, model, batch, offsets)
        counts.note(batch, missing, stale)
        yield batch, offsets, missing | stale
        compute.report(label, min(counts.scanned, total), total)


def find_tolerance(
    store: Store, model: OffsetModel, batch: Batch, offsets: np.ndarray
) -> np.ndarray:
    """Return the largest error that a store may cause in each of the `offsets`: [b]."""
    largest = 0.0
    if model.gallery is not None:
        largest = max(abs(model.gallery.smallest), abs(model.gallery.largest))
    tolerance = store.precision + ROUNDING * np.maximum(largest, np.abs(offsets))
    if batch.rounding is not None:
        tolerance += batch.rounding(offsets)
    return np.asarray(tolerance)


def rewrite_differing(
    writing: Writing, compared: Iterable[tuple[Batch, np.ndarray, np.ndarray]]
) -> None:
    """Write the offsets that differ from the stored offsets, according to `compare`.

    A store that encodes all offsets anew takes every batch, even if nothing differs.
    """
    for batch, offsets, differs in compared:
        if writing.takes_all or differs.all():
            writing.write(batch, offsets)
        elif differs.any():
            writing.write(batch.take(np.flatnonzero(differs)), offsets[differs])


class SpooledGallery:
    """The vectors of a store in a temporary file, which a fit may read many times.

    If other programs share the store, the ids and places of the batches are also kept,
    so that offsets can be written without another scan.

    vectors: The vectors [n, d].
    rows: The row of each clicked id, see `places`.
    """

    def __init__(
        self,
        store: Store,
        compute: Compute,
        clicked: np.ndarray | None = None,
    ):
        self.rows: dict[int | str, int] = {}
        self._clicked = set() if clicked is None else set(clicked.tolist())
        # The place and ids of each batch, in order. The file closes with this object.
        self._batches = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._batches.close)
        total = store.count()
        batches = self._read(store, compute, total)
        self.vectors = to_tempfile(batches, store.url, total)

    def _read(self, store: Store, compute: Compute, total: int) -> Iterator[np.ndarray]:
        """Scan `store`, yield its vectors, and keep places, ids and clicked rows."""
        done = 0
        for batch in store.scan():
            if store.shared:
                try:
                    pickle.dump((batch.place, batch.ids), self._batches)
                    self._batches.flush()
                except OSError as error:
                    raise cannot_keep(store.url, error, 4 * store.dim * total) from None
            if self._clicked:
                self.rows.update(places(batch.ids, done, self._clicked))
            yield batch.vectors
            done += len(batch.vectors)
            compute.report("reading the gallery", min(done, total), total)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches in the order of the scan, with all offsets missing.

        This needs a store that other programs share.
        """
        self._batches.seek(0)
        first = 0
        while first < self.vectors.rows:
            place, ids = pickle.load(self._batches)
            vectors = self.vectors.take(slice(first, first + len(ids)))
            offsets = np.full(len(ids), np.nan, np.float32)
            yield Batch(ids, vectors, offsets, place=place)
            first += len(ids)


class ShardedStore:
    """The shards of `store`, to which workers write the offsets."""

    def __init__(self, store: Store, count: int | None, executor: Executor):
        if not isinstance(store, Sharded):
            raise StoreError(f"{store.url} cannot be read in parts by other machines")
        self.shards = store.shards(count)
        self.executor = executor

    def write(self, share: Share, compute: Compute, label: str) -> Counts:
        """Read all shards once, and write missing and stale offsets through `share`."""
        counts = Counts()
        work = _WriteShard(share, compute.without_progress, label)
        for part in map_shards(self.executor, work, self.shards, compute, label):
            counts.add(part)
        return counts


@dataclass(frozen=True)
class _WriteShard:
    """The work on one shard: compare the offsets, and write the wrong ones."""

    share: Share
    compute: Compute
    label: str

    def __call__(self, number: int, shard: Shard) -> Counts:
        store, writing, model = self.share.join(cast(StoreShard, shard))
        counts = Counts()
        with writing:
            batches = writing.scan()
            compared = compare(store, model, batches, counts, self.compute, self.label)
            rewrite_differing(writing, compared)
            writing.wait()
        return counts


logger = logging.getLogger(__name__)

CLOSING_PASSES = 3
"""The most passes over a shared store between the writing and the activation. Each pass
finds the targets that were added during the pass before, so several passes are needed
only if other programs write as fast as a pass reads."""


def refresh(
    store: Store, *, dry_run: bool = False, compute: Compute = Compute()
) -> Applied:
    """Write the offsets that are missing or stale under the active model, and no others.

    Args:
        store: A store with an active correction.
        dry_run: Only count the offsets.
        compute: Device, memory and progress.

    Raises:
        StoreError: The store has no active correction, or cannot be read or written.
    """
    store = for_job(store)
    correction = store.correction()
    if correction is None:
        raise StoreError(f"{store.url} has no correction; apply one first")
    if not correction.active:
        raise StoreError(
            f"{store.url} has a half-written correction; run apply again to finish it"
        )
    if dry_run:
        return preview(store, correction.model, compute, ())
    return write(store, correction.model, compute=compute)


def remove(
    store: Store, *, dry_run: bool = False, compute: Compute = Compute()
) -> Removed:
    """Remove the correction from `store`, as if it had never been there.

    Args:
        store: Any store; without a correction nothing happens.
        dry_run: Only report what would be removed.
        compute: Only its `progress` is used.

    Raises:
        StoreError: The store cannot be written.
    """
    store = for_job(store)
    try:
        correction = store.correction()
        written = correction is not None and not dry_run
        removed = Removed(store.url, written, correction)
    except HubpluginError:
        # A removal needs no model, so a damaged model is removed, too.
        if dry_run:
            raise
        removed = Removed(store.url, True)
    if not dry_run:
        with telling(
            f"{store.url}: the correction was being removed; the same command finishes"
        ):
            store.remove(compute.progress)
    return removed


def rollback(
    store: Store, *, compute: Compute = Compute(), dry_run: bool = False
) -> Applied:
    """Write the model that was active before, as `apply` writes a fitted model.

    Every target, including those added since, gets this model's offset. The model that
    was active until now becomes the previous one, so a second rollback returns to it.

    Args:
        store: A store with a correction.
        compute: Device, memory and progress.
        dry_run: Only count what would be written.

    Raises:
        StoreError: No model was active before, or the store cannot be read or written.
    """
    store = for_job(store)
    model = store.previous()
    if model is None:
        lacks = "has no correction"
        if store.correction() is not None:
            lacks = "keeps no model that was active before this one"
        raise StoreError(f"{store.url} {lacks}, so there is nothing to roll back to")
    # The model was active before, so it is not tried again.
    return write(store, model, compute=compute, force=True, dry_run=dry_run)


def write(
    store: Store,
    model: OffsetModel,
    *,
    compute: Compute = Compute(),
    force: bool = False,
    dry_run: bool = False,
) -> Applied:
    """Write the offsets of a fitted `model` for every target in `store`; activate them.

    Args:
        store: The store.
        model: The model.
        compute: Device, memory and progress.
        force: As in `Writing`.
        dry_run: Only count what would be written.
    """
    require_match(model, store)
    store.require_writable(dry_run=dry_run)
    if dry_run:
        return preview(store, model, compute, store.plan())
    gallery = None
    if model.gallery is None:
        gallery = SpooledGallery(store, compute)
        model = model.centre_on(gallery.vectors, compute=compute)
    return write_gallery(store, model, gallery, compute, force)


def write_gallery(
    store: Store,
    model: OffsetModel,
    gallery: SpooledGallery | ShardedStore | None,
    compute: Compute,
    force: bool = False,
) -> Applied:
    """Write offsets like `write`, reusing a gallery that was just read.

    Args:
        store: The store.
        model: The model.
        gallery: The gallery that was read from the store; None if none was read. For a
            `ShardedStore`, workers write the offsets.
        compute: Device, memory and progress.
        force: As in `Writing`.
    """

    def write_all(closing: bool) -> Counts:
        """Compare and write all targets, which are read again if `closing`."""
        label = "closing" if closing else "writing offsets"
        if isinstance(gallery, ShardedStore):
            return gallery.write(writing.share(), compute, label)
        counts = Counts()
        vectors = None if gallery is None else gallery.vectors
        # The spooled batches serve a shared store that has no offset of this model yet:
        # the closing passes then find what other programs have changed.
        if gallery is None or closing or not (store.shared and is_new):
            batches = writing.scan()
        else:
            batches = gallery.batches()
        compared = compare(store, model, batches, counts, compute, label, vectors)
        rewrite_differing(writing, compared)
        return counts

    while_writing = (
        f"{store.url}: offsets were being written; searches are as before, and the same "
        "command continues"
    )
    while_activating = (
        f"{store.url}: searches use either the old or the new correction, complete; the "
        "same command finishes"
    )
    with telling(while_writing), store.begin(model, compute.progress) as writing:
        writing.forced = force
        is_new = writing.found == "nothing"
        first = write_all(closing=False)
        if store.shared and writing.found != "active":
            for _ in range(CLOSING_PASSES):
                found = write_all(closing=True)
                if not found.missing + found.stale:
                    break
        writing.wrong = first.missing + first.stale
        logger.info("%s: %d offsets written, activating", store.url, writing.wrong)
        with telling(while_activating):
            writing.activate()
    logger.info("%s: active is %s", store.url, model)
    with telling(f"{store.url}: the correction is active"):
        search = store.how_to_search()
        return first.as_applied(store, model, notes=store.notes(), search=search)


def preview(
    store: Store, model: OffsetModel, compute: Compute, notes: Sequence[str]
) -> Applied:
    """Count the offsets that a job would write, which `notes` describe further."""
    counts = count_wrong(store, model, compute)
    return counts.as_applied(store, model, written=False, notes=notes)


def count_wrong(store: Store, model: OffsetModel, compute: Compute) -> Counts:
    """Count the offsets in `store` that differ from those of `model`."""
    counts = Counts()
    for _ in compare(store, model, store.scan(), counts, compute, "comparing offsets"):
        pass
    return counts


def require_match(model: OffsetModel, store: Store) -> None:
    """Raise InputError if `store` cannot rank by `model`.

    Either dimensions or metric differ, or the store cannot apply the model's query map.
    """
    if model.query_map is not None and not store.maps_queries:
        raise refuse_query_map(store.url)
    if model.dim != store.dim:
        raise InputError(
            f"the model has {model.dim} dimensions, {store.url} has {store.dim}; fit a "
            "model on its vectors"
        )
    if not store.takes_metric(model.metric):
        raise InputError(
            f"the model is for {model.metric.value}, {store.url} ranks by "
            f"{store.metric.value}; fit with ",
            Parameter("metric", store.metric.value),
        )
