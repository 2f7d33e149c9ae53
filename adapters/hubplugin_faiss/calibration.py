"""What an approximate index loses by its correction, found by searching it with queries of the bank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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


WORK = 4e11
"""Fewer queries are tried, down to a tenth, where all would take more products than this with the gallery: some ten
seconds of one core."""


TOLERATED = 0.01
"""A loss of recall that is not worth a word."""


def loss_of_recall(
    index: Any,
    upgraded: Any,
    model: OffsetModel,
    between: Callable[[], None] = lambda: None,
    originals: Vectors | None = None,
) -> tuple[float, float, float] | None:
    """recall@10 of `index` against the raw ranking and of `upgraded` against the corrected one, and the standard
    error of their difference, both as they are set to search; None if `model` has no queries to try.

    The rankings are exact over `originals`, in the order of the ids, or else over what the index itself reconstructs:
    then what its codes lose of a vector counts in neither. `between` is called between pieces of the work.
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
    error = float((before - after).std() / np.sqrt(len(queries)))
    return float(before.mean()), float(after.mean()), error


def is_loss(loss: tuple[float, float, float] | None) -> bool:
    """Whether recall before and after, with the standard error of the difference, tells of one worth a word."""
    return loss is not None and loss[0] - loss[1] > max(TOLERATED, 2 * loss[2])


def warn_of_loss(loss: tuple[float, float, float] | None, upgraded: Any) -> None:
    """Warns if an approximate index finds less of the corrected ranking than it found of the raw one."""
    if loss is None or not is_loss(loss):
        return
    before, after, error = loss
    warnings.warn(
        f"recall@10 of bank queries is {after:.3f} against the exact corrected ranking, {before:.3f} against the "
        f"raw one before ({before - after:.3f} +- {error:.3f} less); to search twice as wide: {wider(upgraded)}",
        stacklevel=4,
    )


def _reconstructed(upgraded: Any, unit: bool) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Vectors [b, d], offsets [b] and labels [b] of all entries, as the index has them; unit vectors where the model
    takes them for such, whatever length codes have left them."""
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
    upgraded: Any, originals: Vectors, model: OffsetModel
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Vectors [b, d], offsets [b] and labels [b] of all entries, as they were before they were coded."""
    handler, row = handler_for(upgraded), 0
    labels = np.empty(handler.count, np.int64)
    labels[handler.order()] = handler.labels()
    for vectors in originals.blocks():
        yield vectors, model.offsets(vectors), labels[row : row + len(vectors)]
        row += len(vectors)


def exact_rankings(
    upgraded: Any,
    targets: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
    queries: np.ndarray,
    between: Callable[[], None],
    k: int = K,
) -> tuple[np.ndarray, np.ndarray]:
    """Labels of the k best `targets` of each query [m, d] without and with their offsets: [m, k] each."""
    handler = handler_for(upgraded)
    metric = Metric.EUCLIDEAN if handler.euclidean else Metric.DOT
    best: list[list[tuple[np.ndarray, np.ndarray]]] = [[], []]
    highest = (
        float(max(extra.offsets(extra.query[None]).max() for extra in handler.extra_dimensions()))
        if handler.euclidean
        else 0.0
    )
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


def _recall(index: Any, queries: np.ndarray, truth: np.ndarray, between: Callable[[], None]) -> np.ndarray:
    found = []
    for query in np.ascontiguousarray(queries, np.float32):
        found.append(index.search(query[None], K)[1][0])
        between()
    return np.array([len(np.intersect1d(a, b)) / K for a, b in zip(found, truth, strict=True)])
