"""A gallery in shards, read by the workers of any `concurrent.futures.Executor`.

Workers read the whole gallery once, to find each query's nearest target and to draw a
sample. The calling process tests and fits a correction on the sample. The same workers
then compute the offsets, with `model.offsets` for each shard.
"""

from __future__ import annotations

import glob
import itertools
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from hubplugin.bank import SPACINGS, PreparedBank, Survey, WholeGallery
from hubplugin.compute import (
    SMALLEST_LOG,
    Answers,
    Compute,
    nearest_targets,
)
from hubplugin.errors import (
    ClusterError,
    EmptyInput,
    HubpluginError,
    InputError,
    Parameter,
)
from hubplugin.methods import Method
from hubplugin.vectors import Sliceable, VectorLike, Vectors, as_vectors, one_line

logger = logging.getLogger(__name__)

SHARD_ROWS = 250_000
"""The default rows of a shard: 384 MB at 384 dimensions, read in a few seconds."""

SAMPLE = 200_000
"""The maximum number of targets in the sample on which a correction is fitted.

Sinkhorn takes as many from a large gallery; docs/speed.md gives the error."""

Result = TypeVar("Result")


class Shard(ABC):
    """A part of a gallery: a small picklable value that says where its targets are.

    name: The name used in error messages.
    rows: The number of targets, which decides how many are sampled.
    """

    name: str
    rows: int

    @abstractmethod
    def vectors(self) -> Vectors | None:
        """Return the vectors, which the caller reads, or None if there are none."""


@runtime_checkable
class Sharded(Protocol):
    """A store that other machines can read in parts."""

    def count(self) -> int: ...

    def shards(self, count: int | None) -> Sequence[Shard]:
        """Return about `count` shards; by default, each has `SHARD_ROWS` targets."""


GalleryLike: TypeAlias = (
    VectorLike | Sharded | Sequence["Shard | str | os.PathLike[str]"]
)
"""Vectors, or a gallery in parts: a store, a list of files, or a file name pattern."""


@dataclass(frozen=True)
class FileShard(Shard):
    """A part of a file: `rows` rows, from row `start` on."""

    name: str
    path: str
    start: int
    rows: int

    def vectors(self) -> Vectors | None:
        whole = as_vectors(self.path, self.name)
        stop = self.start + self.rows
        if whole.rows < stop:
            raise InputError(
                f"{self.name}: the file has {whole.rows} rows; it changed after the "
                "shards were planned"
            )
        whole.name = self.name
        # A file that cannot be sliced is one shard, see `_divide_file`.
        if self.rows == whole.rows or not isinstance(whole, Sliceable):
            return whole
        return as_vectors(whole.take(slice(self.start, stop)), self.name)


def shards_of(source: GalleryLike | None, count: int | None = None) -> list[Shard]:
    """Divide a gallery into shards.

    Args:
        source: A list of shards or of files (.npy, .parquet); a pattern of file names,
            such as "parts/*.parquet"; one .npy file, whose rows are divided; or a store
            that other machines can read (`hubplugin.open_store`).
        count: The number of shards for a file or a store. By default, each shard has
            about `SHARD_ROWS` rows.

    Raises:
        InputError: Workers cannot read the source: it is an array in this process.
    """
    if count is not None and count < 1:
        raise InputError(Parameter("shards", count), ": expected 1 or more")
    if isinstance(source, Sharded):
        return list(source.shards(count))
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if not glob.has_magic(path):
            return _divide_file(path, count)
        source = sorted(glob.glob(path))
        if not source:
            raise InputError(f"targets: no file matches {path!r}")
    if isinstance(source, (list, tuple)) and source:
        if all(isinstance(item, Shard) for item in source):
            return list(source)
        if all(isinstance(item, (str, os.PathLike)) for item in source):
            shards = list[Shard]()
            for path in source:
                with suppress(EmptyInput):  # an empty file has no shard
                    shards += _divide_file(os.fspath(path), 1)
            return shards
    raise InputError(
        f"targets: workers cannot read {type(source).__name__} from the memory of this "
        "process; with ",
        Parameter("executor"),
        " pass files, such as 'parts/*.npy', or a store",
    )


def _divide_file(path: str, count: int | None) -> list[Shard]:
    """Divide the rows of a file into `count` shards. No shard is empty.

    A file that cannot be read in parts becomes one shard.
    """
    vectors = as_vectors(path, "targets")
    path = os.path.abspath(path)
    file = os.path.basename(path)
    if not isinstance(vectors, Sliceable):
        count = 1
    parts = min(count or math.ceil(vectors.rows / SHARD_ROWS), vectors.rows)
    bounds = np.linspace(0, vectors.rows, parts + 1).astype(int).tolist()
    shards = list[Shard]()
    for start, stop in itertools.pairwise(bounds):
        name = f"targets ({file}, rows {start} to {stop - 1})"
        shards.append(FileShard(name, path, start, stop - start))
    return shards


def map_shards(
    executor: Executor,
    task: Callable[[int, Shard], Result],
    shards: Sequence[Shard],
    compute: Compute,
    label: str,
) -> list[Result]:
    """Call a task for each shard, with the number of the shard and the shard.

    If a call fails, or on Ctrl-C, the other calls are cancelled as far as possible.

    Args:
        executor: The executor whose workers run the task.
        task: The function to call; it must be picklable.
        shards: The shards.
        compute: The settings whose progress callback is called.
        label: The name of the work, for progress and errors.

    Returns:
        The results of the calls, in the order of the shards.

    Raises:
        ClusterError: A task failed, or workers are lost for good. Dask, Ray and other
            engines restart the tasks of a lost worker before they give up.
    """
    if not hasattr(executor, "submit"):
        raise InputError(
            Parameter("executor", executor),
            " is not an executor; pass a concurrent.futures.Executor",
        )
    results = list[Result]()
    futures = list[Future[Result]]()
    try:
        for number, shard in enumerate(shards):
            submit = partial(executor.submit, task, number, shard)
            futures.append(_call(submit, shard, label))
        for shard, future in zip(shards, futures, strict=True):
            results.append(_call(future.result, shard, label))
            compute.report(f"{label}, {len(shards)} shards", len(results), len(shards))
    finally:
        for future in futures:
            future.cancel()  # does nothing to a call that has ended
    return results


def _call(function: Callable[[], Result], shard: Shard, label: str) -> Result:
    """Return the result of `function`.

    Raises a HubpluginError as it is, and any other error as a ClusterError of one line.
    """
    try:
        return function()
    except BrokenExecutor as error:
        raise ClusterError(
            f"the executor has lost its workers ({one_line(error)}); start a new one "
            "and run the job again: what was written to a store is kept"
        ) from None
    except Exception as error:
        cause = getattr(error, "cause", error)  # the worker's error, if Ray wraps it
        if isinstance(cause, HubpluginError):
            raise cause from None
        raise ClusterError(
            f"{shard.name}: {label} failed with {type(error).__name__}: {one_line(error)}"
        ) from None


def read_by_workers(
    bank: PreparedBank,
    source: GalleryLike | None,
    shards: Sequence[Shard],
    method: Method,
    executor: Executor,
) -> PreparedBank:
    """Let workers read a gallery and draw a sample from it.

    Args:
        bank: The bank.
        source: The gallery.
        shards: The shards of the gallery.
        method: The method; unless it keeps answers, workers find each query's answer.
        executor: The executor whose workers read.

    Returns:
        `bank` with a sample of the gallery as its targets, drawn with a fixed seed, and
        with the workers' results for the whole gallery. The sample contains all targets
        if there are at most `SAMPLE`.
    """
    if isinstance(source, Sharded):
        total = source.count()
    else:
        total = sum(shard.rows for shard in shards)
    queries = PreparedBank(bank.query_bank, bank.metric, bank.compute.without_progress)
    share = SAMPLE / max(total, SAMPLE)
    finds_answers = method.answers != "kept"
    read = partial(_read_shard, queries, share, finds_answers)
    results = map_shards(executor, read, shards, bank.compute, "reading the gallery")
    parts = [part for part, _ in results if part is not None]
    if not parts:
        raise EmptyInput(
            "targets are empty: no shard has a nonzero vector; at least one is needed"
        )
    count = sum(part.count for part in parts)
    answers = None
    if finds_answers and min(len(bank.query_bank), count) >= SMALLEST_LOG:
        answers = _join_answers(bank, parts)
    whole = WholeGallery(count, _join_surveys(parts), answers)
    sample = as_vectors(np.concatenate([part.sample for part in parts]), "targets")
    sample.left_out = sum(left_out for _, left_out in results)
    if sample.rows < count:
        logger.warning(
            "the correction is fitted on a sample of %d of %d targets",
            sample.rows,
            count,
        )
    return replace(bank, targets=sample, whole=whole)


@dataclass(frozen=True)
class _Summary:
    """A worker's summary of one shard.

    count: The number of vectors that have a direction.
    sample: A sample of these vectors [s, d].
    survey: The survey of the shard, as in `PreparedBank`.
    nearest: The similarity and the row of each query's nearest vector in the shard, see
        `nearest_targets`; empty if the method keeps answers.
    """

    count: int
    sample: np.ndarray
    survey: Survey
    nearest: tuple[np.ndarray, ...]


def _read_shard(
    queries: PreparedBank, share: float, finds_answers: bool, number: int, shard: Shard
) -> tuple[_Summary | None, int]:
    """Return the summary of a shard, and the number of its zero vectors.

    The summary is None if no vector has a direction.

    Args:
        queries: The bank, without a gallery.
        share: The fraction of the shard's vectors to sample.
        finds_answers: True to find each query's nearest vector.
        number: The number of the shard, the seed of its sample.
        shard: The shard.
    """
    vectors = None
    try:
        vectors = shard.vectors()
        if vectors is None:
            return None, 0
        bank = queries.against(vectors)
    except EmptyInput:  # the shard is empty, or has zero vectors only
        zeros = 0 if vectors is None else vectors.rows
        return None, zeros
    targets = bank.require_targets()
    is_drawn = np.random.default_rng([0, number]).random(targets.rows) < share
    sample = targets.select(np.flatnonzero(is_drawn))
    nearest: tuple[np.ndarray, ...] = ()
    if finds_answers:
        nearest = nearest_targets(bank.similarities, [targets])
    return _Summary(targets.rows, sample, bank.survey, nearest), targets.left_out


def _first_rows(parts: Sequence[_Summary]) -> list[int]:
    """Return the row of each part's first target, then the number of all rows.

    Rows are counted across the parts, in their order.
    """
    return [0, *itertools.accumulate(part.count for part in parts)]


def _join_surveys(parts: Sequence[_Summary]) -> Survey:
    """Join the surveys of all shards."""
    surveys = [part.survey for part in parts]
    firsts = _first_rows(parts)
    # Rows of the whole gallery, [shards, q]: `np.c_` makes a column of the first rows.
    nearest = np.stack([survey.nearest for survey in surveys]) + np.c_[firsts[:-1]]
    # The shard that has each query's nearest target, [q].
    best_shard = np.stack([survey.largest[:, 0] for survey in surveys]).argmax(axis=0)
    largest = np.concatenate([survey.largest for survey in surveys], axis=1)
    largest = -np.sort(-largest, axis=1)[:, : SPACINGS + 1]  # in descending order
    return Survey(largest, nearest[best_shard, np.arange(len(best_shard))])


def _join_answers(bank: PreparedBank, parts: Sequence[_Summary]) -> Answers:
    """Find each query's answer: the nearest of its nearest targets in all places.

    The places are the shards and, if there is one, the target bank, whose rows are
    counted after those of the gallery.
    """
    similarities = bank.similarities
    places = [part.nearest for part in parts]
    if bank.target_bank is not None:
        places.append(nearest_targets(similarities, [bank.answer_vectors]))
    largest = np.full(similarities.m, -np.inf)
    rows = np.zeros(similarities.m, np.int64)
    # The last of the first rows, the number of gallery rows, is for the target bank.
    for (similarity, nearest), first in zip(places, _first_rows(parts), strict=False):
        # Among targets that are equally near, up to rounding, the first one is kept.
        is_nearer = similarities.lower(similarity) > largest
        rows = np.where(is_nearer, nearest + first, rows)
        largest = np.maximum(largest, similarity)
    return Answers.by_nearest(largest, rows)
