"""A gallery in shards, which the workers of any `concurrent.futures.Executor` read.

Workers look at all of it once: each query's nearest target, and a sample. The sample is what a correction is tried and
fitted on, in the process that asks; offsets are then a map over the shards, `model.offsets`, by the same workers.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from hubplugin.compute import (
    SMALLEST_LOG,
    Answers,
    Compute,
    Similarities,
    TopK,
    nearest_targets,
    search,
)
from hubplugin.errors import (
    ClusterError,
    EmptyInput,
    HubpluginError,
    InputError,
    Parameter,
)
from hubplugin.methods import SPACINGS, FitInput, Method, Whole
from hubplugin.metric import Metric
from hubplugin.vectors import (
    Directed,
    Sliceable,
    VectorLike,
    Vectors,
    as_vectors,
    one_line,
)

logger = logging.getLogger(__name__)

SHARD_ROWS = 250_000
"""Rows of a shard, where they can be chosen: at 384 dimensions 384 MB, some seconds of work a pass."""

SAMPLE = 200_000
"""Targets that a correction is fitted on, as many as Sinkhorn takes of a large gallery: docs/speed.md has the error."""

Result = TypeVar("Result")


class Shard(ABC):
    """Some targets of a gallery: where they are, not what. A small value that travels to whoever reads it.

    name: what errors call it. rows: how many there are, of which a sample is drawn.
    """

    name: str
    rows: int

    @abstractmethod
    def vectors(self) -> Vectors | None:
        """Its vectors as whoever calls this can read them, again and again; None if it has none."""


@runtime_checkable
class Sharded(Protocol):
    """A store that other machines can read in parts."""

    def count(self) -> int: ...

    def shards(self, count: int | None) -> Sequence[Shard]:
        """About `count` parts; by default as many as have `SHARD_ROWS` targets each."""


GalleryLike: TypeAlias = (
    VectorLike | Sharded | Sequence["Shard | str | os.PathLike[str]"]
)
"""What can be read as vectors, and a gallery in parts: a list of files, or a pattern of their names."""


@dataclass(frozen=True)
class FileShard(Shard):
    """The rows of a file from `start` on."""

    name: str
    path: str
    start: int
    rows: int

    def vectors(self) -> Vectors | None:
        whole = as_vectors(self.path, self.name)
        if whole.rows < self.start + self.rows:
            raise InputError(
                f"{self.name}: the file has {whole.rows} rows; it changed after the shards were planned"
            )
        whole.name = self.name
        if self.rows == whole.rows or not isinstance(whole, Sliceable):
            return whole
        rows = slice(self.start, self.start + self.rows)
        return Sliceable(
            self.name, whole.take(rows), (self.rows, whole.dim), np.asarray
        )


def shards_of(source: GalleryLike, count: int | None = None) -> list[Shard]:
    """Divides a gallery into shards.

    Args:
        source: a list of shards or of files (.npy, .npz, .safetensors, .parquet); a pattern of file names, as in
            "parts/*.parquet"; one .npy or .safetensors file, whose rows are divided; or a store that other machines can
            read (`hubplugin.open_store`).
        count: how many shards a file or a store becomes; by default each has some `SHARD_ROWS`.

    Raises:
        InputError: workers cannot read the source, such as an array in the memory of this process.
    """
    if count is not None and count < 1:
        raise InputError(Parameter("shards", count), ": expected 1 or more")
    if isinstance(source, Sharded):
        return list(source.shards(count))
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if not glob.has_magic(path):
            return _divide(path, count)
        source = sorted(glob.glob(path))
        if not source:
            raise InputError(f"targets: no file matches {path!r}")
    if isinstance(source, (list, tuple)) and source:
        if all(isinstance(item, Shard) for item in source):
            return list(source)
        if all(isinstance(item, (str, os.PathLike)) for item in source):
            return [
                shard
                for number, path in enumerate(source)
                for shard in _whole_file(os.fspath(path), number)
            ]
    raise InputError(
        f"targets: workers cannot read {type(source).__name__} from the memory of this process; with ",
        Parameter("executor"),
        " pass files, as in 'parts/*.npy', or a store",
    )


def _whole_file(path: str, number: int) -> list[Shard]:
    """The file as one shard; none if it is empty."""
    path, name = os.path.abspath(path), f"targets, shard {number}"
    with suppress(EmptyInput):
        return [
            FileShard(
                f"{name} ({os.path.basename(path)})",
                path,
                0,
                as_vectors(path, name).rows,
            )
        ]
    return []


def _divide(path: str, count: int | None) -> list[Shard]:
    whole, path, file = (
        as_vectors(path, "targets"),
        os.path.abspath(path),
        os.path.basename(path),
    )
    if not isinstance(whole, Sliceable) or path.endswith(".npz"):
        return [FileShard(f"targets ({file})", path, 0, whole.rows)]
    return [
        FileShard(
            f"targets, shard {number} ({file} from row {start} on)",
            path,
            start,
            stop - start,
        )
        for number, (start, stop) in enumerate(even_ranges(whole.rows, count))
    ]


def even_ranges(rows: int, count: int | None) -> list[tuple[int, int]]:
    """First and last of `rows` rows in each of `count` shards, none of them empty; by default of as many as have
    `SHARD_ROWS`."""
    ends = (
        np.linspace(0, rows, min(count or -(-rows // SHARD_ROWS), rows) + 1)
        .astype(int)
        .tolist()
    )
    return list(itertools.pairwise(ends))


def map_shards(
    executor: Executor,
    task: Callable[[int, Shard], Result],
    shards: Sequence[Shard],
    compute: Compute,
    label: str,
) -> list[Result]:
    """Calls a task with the number of each shard and the shard. What still runs is cancelled where one fails, or by
    Ctrl-C.

    Args:
        executor: its workers do the task.
        task: must be picklable.
        shards: the shards.
        compute: its progress is told.
        label: the name of the work, for progress and errors.

    Returns:
        What the calls give, in the order of the shards.

    Raises:
        ClusterError: workers are lost for good: an engine that starts a task of a lost worker anew, as Dask and Ray do,
            has tried so before.
    """
    if not hasattr(executor, "submit"):
        raise InputError(
            Parameter("executor", executor),
            " is none; pass a concurrent.futures.Executor",
        )
    results, futures = list[Result](), list[Future[Result]]()
    try:
        for number, shard in enumerate(shards):
            futures.append(
                _call(partial(executor.submit, task, number, shard), shard, label)
            )
        for shard, future in zip(shards, futures, strict=True):
            results.append(_call(future.result, shard, label))
            compute.report(f"{label}, {len(shards)} shards", len(results), len(shards))
    finally:
        for future in futures:
            future.cancel()
    return results


def _call(function: Callable[[], Result], shard: Shard, label: str) -> Result:
    """What `function` returns; an error of an engine is one line."""
    try:
        return function()
    except BrokenExecutor as error:
        raise ClusterError(
            f"the executor has lost its workers ({one_line(error)}); start a new one and run it again: what was "
            "written to a store is not written again"
        ) from None
    except Exception as error:
        cause = getattr(error, "cause", error)  # Ray wraps an error in pages of its own
        if isinstance(cause, HubpluginError):
            raise cause from None
        raise ClusterError(
            f"{shard.name}: {label} failed with {type(error).__name__}: {one_line(error)}"
        ) from None


Input = TypeVar("Input", bound=FitInput)


def read_by_workers(
    fit_input: Input,
    source: GalleryLike,
    shards: Sequence[Shard],
    method: Method,
    executor: Executor,
) -> Input:
    """Reads a gallery by workers.

    Args:
        fit_input: its banks are kept.
        source: what the shards are of.
        shards: the shards.
        method: says whether answers are looked for.
        executor: its workers read.

    Returns:
        `fit_input` against a sample of the gallery, drawn with a fixed seed, and what workers found in the whole of it.
        The sample is all targets, where they are at most `SAMPLE`.
    """
    total = (
        source.count()
        if isinstance(source, Sharded)
        else sum(shard.rows for shard in shards)
    )
    share, quiet = SAMPLE / max(total, SAMPLE), fit_input.compute.without_progress
    read = _ReadShard(
        fit_input.query_bank,
        fit_input.surveyed,
        fit_input.metric,
        quiet,
        share,
        method.answers != "kept",
    )
    summaries = map_shards(
        executor, read, shards, fit_input.compute, "reading the gallery"
    )
    parts = [summary for summary in summaries if summary.count]
    name = shards[0].name.partition(", shard")[0] if shards else "targets"
    if not parts:
        raise EmptyInput(
            f"{name} is empty: no shard has a vector with a direction; at least one is needed"
        )
    sample = as_vectors(np.concatenate([part.sample for part in parts]), name)
    ends = np.cumsum([part.count for part in parts])
    rows = np.concatenate(
        [part.rows + end - part.count for part, end in zip(parts, ends, strict=True)],
        axis=1,
    )
    scores = np.concatenate([part.scores for part in parts], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, : SPACINGS + 1]
    scores, nearest = (
        np.take_along_axis(scores, order, axis=1),
        np.take_along_axis(rows, order[:, :1], axis=1)[:, 0],
    )
    count = int(ends[-1])
    answers = _find_answers(fit_input, parts) if read.finds_answers else None
    whole = Whole(
        count, sum(summary.zeros for summary in summaries), scores, nearest, answers
    )
    if sample.rows < count:
        logger.warning(
            "the correction is fitted on a sample of %d of %d targets",
            sample.rows,
            count,
        )
    return replace(fit_input, targets=sample, whole=whole)


@dataclass(frozen=True)
class _Summary:
    """What a worker saw in one shard.

    count, zeros: vectors with a direction, and without. sample: some of them, [s, d]. scores, rows: the largest
    similarities of some bank queries, and their rows, [q, <= SPACINGS + 1]. similarity, nearest: of every bank query's
    nearest target, and its row; empty where answers are not looked for."""

    count: int
    zeros: int
    sample: np.ndarray
    scores: np.ndarray
    rows: np.ndarray
    similarity: np.ndarray
    nearest: np.ndarray


@dataclass(frozen=True)
class _ReadShard:
    """What a worker does with a shard in a fit. share: of the rows, for the sample."""

    bank: np.ndarray
    surveyed: np.ndarray
    metric: Metric
    compute: Compute
    share: float
    finds_answers: bool

    def __call__(self, number: int, shard: Shard) -> _Summary:
        dim, none = self.bank.shape[1], np.empty(0)
        whole = vectors = None
        try:
            whole = shard.vectors()
            vectors = None if whole is None else Directed.of(whole, self.metric)
        except EmptyInput:
            pass
        except OSError as error:
            raise InputError(
                f"{shard.name} cannot be read: {error.strerror or error}"
            ) from None
        if vectors is None:
            zeros = 0 if whole is None else whole.rows
            return _Summary(
                0, zeros, np.empty((0, dim), np.float32), none, none, none, none
            )
        if vectors.dim != dim:
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, the bank has {dim}; embed both with one model"
            )
        drawn = np.flatnonzero(
            np.random.default_rng([0, number]).random(vectors.rows) < self.share
        )
        top, nearest = TopK(SPACINGS + 1), (none, none)
        search(self.surveyed, vectors, self.metric, self.compute, top)
        if self.finds_answers:
            nearest = nearest_targets(
                Similarities(self.bank, self.metric, self.compute), [vectors]
            )
        zeros = vectors.left_out if isinstance(vectors, Directed) else 0
        return _Summary(
            vectors.rows,
            zeros,
            vectors.select(drawn),
            top.scores[0],
            top.rows[0],
            *nearest,
        )


def _find_answers(fit_input: FitInput, parts: Sequence[_Summary]) -> Answers | None:
    """Of the nearest targets of all shards, and of the target bank."""
    if min(len(fit_input.query_bank), sum(part.count for part in parts)) < SMALLEST_LOG:
        return None
    similarities = Similarities(
        fit_input.query_bank, fit_input.metric, fit_input.compute
    )
    nearest_of, first = (
        [(part.similarity, part.nearest, part.count) for part in parts],
        0,
    )
    if fit_input.target_bank is not None:
        similarity, nearest = nearest_targets(
            similarities, [fit_input.target_bank_vectors]
        )
        nearest_of.append((similarity, nearest, len(fit_input.target_bank)))
    levels, rows = np.full(similarities.m, -np.inf), np.zeros(similarities.m, np.int64)
    for similarity, nearest, count in nearest_of:
        rows = np.where(similarities.lower(similarity) > levels, nearest + first, rows)
        levels, first = np.maximum(levels, similarity), first + count
    return Answers.of(levels, rows)
