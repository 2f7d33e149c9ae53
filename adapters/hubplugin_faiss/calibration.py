"""What an index loses by its correction, found by searching it.

Queries of the bank tell. A loss is warned of, or refused where it is too much.
"""

from __future__ import annotations

import warnings

import faiss
import numpy as np

from hubplugin.errors import CorrectionRefused, Parameter, StoreError
from hubplugin.metric import Metric, augment_queries, augment_targets, unit_or_zero
from hubplugin.model import OffsetModel
from hubplugin_faiss.encoding.offsets import bank_queries
from hubplugin_faiss.handlers.base import IndexHandler
from hubplugin_faiss.objects import name_of, parts, reason
from hubplugin_faiss.scale import IndexScale

QUERIES = 400
"""Bank queries that are tried."""

K = 10
"""Results of each."""

WORK = 4e11
"""Fewer queries are tried, down to a tenth, where all would take more products than
this with the gallery: some ten seconds of one core. An exhaustive index for which a
tenth is too much is not tried."""

TOLERATED = 0.01
"""The largest loss of recall@10 without a warning; codes in a row lose no more."""

PROMISED = 0.05
"""The largest loss that is not refused where inverted lists or a graph find targets."""


def require_recall(
    raw: IndexHandler,
    upgraded: IndexHandler,
    model: OffsetModel,
    scale: IndexScale,
    force: bool = False,
) -> None:
    """Compare the recall@10 of both indexes, as they are set to search.

    All targets are ranked exactly, by the vectors that the index itself reconstructs:
    what its codes lose of a vector counts in neither ranking. A bank that is too small
    says nothing, and an exhaustive index that is too large is not tried. A loss that is
    not refused is a warning.

    Args:
        raw, upgraded: Handlers of the index without offsets and with them.
        model: Has the bank and the offsets.
        scale: The scale on which `upgraded` holds the offsets.
        force: Only warn.

    Raises:
        CorrectionRefused: `upgraded` loses more than is promised for the type of `raw`.
    """
    most = min(WORK / (raw.count * raw.index.d), QUERIES)
    least = QUERIES / 10
    if raw.exhaustive:  # it reads all its codes for each query
        most = min(most, QUERIES / 4)
        if most < least:
            return
    queries = bank_queries(model, int(max(most, least)))
    if queries is None or upgraded.count < 10 * K:
        return
    raw_truth, truth = exact_rankings(raw, upgraded, model, scale, queries)
    before = measure_recall(raw.owner, queries, raw_truth)
    after = measure_recall(upgraded.owner, queries, truth)
    lost = float((before - after).mean())
    error = float((before - after).std() / np.sqrt(len(queries)))
    if lost <= max(TOLERATED, 2 * error):
        return
    promised = TOLERATED
    advice = ""
    wide = faiss.IndexIVF | faiss.IndexHNSW
    if any(isinstance(part, wide) for part in parts(raw.index)):
        promised = PROMISED
        advice = "; a larger nprobe, efSearch or k_factor finds more"
    found = (
        f"recall@10 of bank queries from {before.mean():.3f} to {after.mean():.3f} "
        f"({lost:.3f} +- {error:.3f} less)"
    )
    if lost > promised + 2 * error and not force:
        raise CorrectionRefused(
            f"an upgrade of this {name_of(raw.index)} would take {found}, and {promised} is "
            f"the most for its type; nothing was changed{advice}; ",
            Parameter("force", True),
            " upgrades it all the same",
        )
    warnings.warn(f"the upgrade took {found}{advice}", stacklevel=4)


def measure_recall(
    index: faiss.Index, queries: np.ndarray, truth: np.ndarray
) -> np.ndarray:
    """Return the share of `truth` [m, k] that the index finds for each query: [m].

    Args:
        index: The index as users search it.
        queries: [m, d], asked one at a time as users ask.
        truth: The ids that an exact search finds.
    """
    shares = []
    try:
        for query, best in zip(queries, truth, strict=True):
            found = index.search(query[None], K)[1][0]
            shares.append(len(np.intersect1d(found, best)) / K)
    except RuntimeError as error:
        raise StoreError(
            f"Faiss cannot search this {name_of(index)}: {reason(error)}"
        ) from None
    return np.array(shares)


def exact_rankings(
    raw: IndexHandler,
    upgraded: IndexHandler,
    model: OffsetModel,
    scale: IndexScale,
    queries: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Rank all targets exactly, without offsets and with them.

    Args:
        raw: Knows what its codes make of a zero vector.
        upgraded: Reconstructs the targets and their offsets.
        model, scale: The model, and the scale on which `upgraded` holds its offsets.
        queries: [m, d], as users ask them.

    Returns:
        Two rankings, of ids: int64 [m, K] each.
    """
    metric = upgraded.metric
    augmented = augment_queries(model.queries(queries), metric)
    highest = max(
        float(extra.offsets(extra.query[None]).max()) for extra in upgraded.extras
    )
    keep_max = not upgraded.euclidean
    plain = faiss.ResultHeap(len(queries), K, keep_max=keep_max)
    corrected = faiss.ResultHeap(len(queries), K, keep_max=keep_max)
    for batch in upgraded.scan():
        labels = np.array(batch.ids)
        vectors = batch.vectors
        offsets = batch.offsets
        if model.metric is Metric.COSINE and upgraded.lossy:
            vectors = raw.with_zeros(vectors)
            offsets = scale.to_model(offsets, vectors)
            vectors = unit_or_zero(vectors)
        extended = augment_targets(vectors, offsets, metric, max_offset=highest)
        sides = (plain, queries, vectors), (corrected, augmented, extended)
        for best, asked, targets in sides:
            k = min(K, len(targets))
            scores, rows = faiss.knn(asked, targets, k, upgraded.index.metric_type)
            best.add_result(scores, labels[rows])
    plain.finalize()
    corrected.finalize()
    return plain.I, corrected.I
