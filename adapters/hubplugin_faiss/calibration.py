"""What an approximate index loses by its correction, found by searching it with queries of the bank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import faiss
import numpy as np

from hubplugin.metric import Metric, augment_queries, augment_targets, normalise
from hubplugin.model import OffsetModel
from hubplugin.vectors import Vectors
from hubplugin_faiss.faiss_objects import block_rows
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.norm_bias import NormBias
from hubplugin_faiss.search_settings import wider

QUERIES, K = 400, 10
"""Bank queries that are tried, and how many results of each."""

WORK = 4e11
"""Fewer queries are tried, down to a tenth, where all would take more products than this with the gallery: some ten
seconds of one core."""

TOLERATED = 0.01
"""Warnings do not mention a smaller loss of recall."""


class Recall(NamedTuple):
    """recall@10 of the raw index against the raw ranking (`before`) and of the upgraded one against the corrected
    ranking (`after`), and the standard error of their difference."""

    before: float
    after: float
    error: float

    @property
    def fell(self) -> bool:
        """Whether the loss is larger than `TOLERATED` and than two standard errors."""
        return self.before - self.after > max(TOLERATED, 2 * self.error)


def loss_of_recall(
    index: faiss.Index,
    upgraded: faiss.Index,
    model: OffsetModel,
    between: Callable[[], None] = lambda: None,
    originals: Vectors | None = None,
) -> Recall | None:
    """Searches `index` and `upgraded`, as they are set to search, with queries of the bank of `model`.

    Args:
        index: the raw index.
        upgraded: the same with the offsets of `model`.
        model: None is returned if its bank is too small to try.
        between: called between pieces of the work.
        originals: the exact rankings are over these vectors [n, d], in the order of the ids; by default over what the
            index itself reconstructs, so that what its codes lose of a vector counts in neither ranking.
    """
    bank = model.terms[0].bank
    if len(bank) < 2 * K or upgraded.ntotal < 10 * K:
        return None
    count = min(len(bank), int(np.clip(WORK / (upgraded.ntotal * upgraded.d), QUERIES / 10, QUERIES)))
    queries = bank[np.linspace(0, len(bank) - 1, count).astype(np.int64)]
    if model.metric is Metric.COSINE:
        queries = normalise(queries, "query bank")
    unit = model.metric is Metric.COSINE
    targets = _reconstructed(upgraded, unit) if originals is None else _given(upgraded, originals, model)
    raw, corrected = exact_rankings(upgraded, targets, queries, between)
    before, after = _recall(index, queries, raw, between), _recall(upgraded, queries, corrected, between)
    return Recall(float(before.mean()), float(after.mean()), float((before - after).std() / np.sqrt(len(queries))))


def warn_of_loss(recall: Recall | None, upgraded: faiss.Index) -> None:
    """Warns if an approximate index finds less of the corrected ranking than it found of the raw one."""
    if recall is None or not recall.fell:
        return
    before, after, error = recall
    warnings.warn(
        f"recall@10 of bank queries is {after:.3f} against the exact corrected ranking, {before:.3f} against the "
        f"raw one before ({before - after:.3f} +- {error:.3f} less); to search twice as wide: {wider(upgraded)}",
        stacklevel=4,
    )


def _reconstructed(upgraded: faiss.Index, unit: bool) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Vectors [b, d] as the index reconstructs them, offsets [b] and ids [b] of all entries.

    unit: the model takes all vectors for unit vectors; they are brought back to unit length where codes changed it.
    """
    handler, row = handler_for(upgraded), 0
    norm_bias = NormBias(handler, unit)
    for vectors, offsets in handler.scan(0, block_rows(upgraded.d)):
        assert offsets is not None
        yield (
            normalise(vectors, "index") if unit and handler.lossy else vectors,
            (offsets + norm_bias(vectors)).astype(np.float32),
            handler.labels(row, row + len(vectors)),
        )
        row += len(vectors)


def _given(
    upgraded: faiss.Index, originals: Vectors, model: OffsetModel
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Original vectors [b, d], offsets [b] and ids [b] of all entries."""
    handler, row = handler_for(upgraded), 0
    labels = np.empty(handler.count, np.int64)
    labels[handler.order()] = handler.labels()
    for vectors in originals.blocks():
        yield vectors, model.members.offsets(vectors), labels[row : row + len(vectors)]
        row += len(vectors)


def exact_rankings(
    upgraded: faiss.Index,
    targets: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
    queries: np.ndarray,
    between: Callable[[], None],
    k: int = K,
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the k best `targets` of each query [m, d] without and with their offsets: int64 [m, k] each."""
    handler = handler_for(upgraded)
    metric = Metric.EUCLIDEAN if handler.euclidean else Metric.DOT
    best: list[list[tuple[np.ndarray, np.ndarray]]] = [[], []]
    highest = 0.0
    if handler.euclidean:
        highest = float(max(extra.offsets(extra.query[None]).max() for extra in handler.extra_dimensions()))
    for vectors, offsets, labels in targets:
        extended = augment_targets(vectors, offsets, metric, max_offset=highest)
        for found, targets, asked in (
            (best[0], vectors, queries),
            (best[1], extended, augment_queries(queries, metric)),
        ):
            scores, rows = faiss.knn(asked, targets, min(k, len(targets)), metric=upgraded.metric_type)
            found.append((-scores if handler.euclidean else scores, labels[rows]))
        between()
    rankings = []
    for found in best:
        scores, names = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
        rankings.append(np.take_along_axis(names, np.argsort(-scores, axis=1, kind="stable")[:, :k], axis=1))
    return rankings[0], rankings[1]


def _recall(index: faiss.Index, queries: np.ndarray, truth: np.ndarray, between: Callable[[], None]) -> np.ndarray:
    found = []
    for query in np.ascontiguousarray(queries, np.float32):
        found.append(index.search(query[None], K)[1][0])
        between()
    return np.array([len(np.intersect1d(a, b)) / K for a, b in zip(found, truth, strict=True)])
