"""Measures how much recall an index loses through its correction.

The index is searched with queries from the bank. A loss leads to a warning, and a large
loss to an error.
"""

from __future__ import annotations

import warnings

import faiss
import numpy as np

from hubplugin.errors import CorrectionRefused, Parameter, StoreError
from hubplugin.metric import Metric, unit_or_zero
from hubplugin.model import OffsetModel
from hubplugin_faiss.encoding.offsets import READ, bank_queries, similarities
from hubplugin_faiss.handlers.base import IndexHandler
from hubplugin_faiss.objects import name_of, parts, reason
from hubplugin_faiss.scale import IndexScale

QUERIES = 400
"""The maximum number of bank queries to search with."""

K = 10
"""The number of results for each query."""

WORK = 4e11
"""The maximum number of products with the gallery, about ten seconds of one core.

The number of queries is reduced to stay below it, but to a tenth at most. An exhaustive
index for which a tenth of the queries is too much work is not searched.
"""

TOLERATED = 0.01
"""The largest loss of recall@10 without a warning. It is also the limit for contiguous
codes."""

PROMISED = 0.05
"""The largest loss of recall@10 without an error for inverted lists and graphs."""


def require_recall(
    raw: IndexHandler,
    upgraded: IndexHandler,
    model: OffsetModel,
    scale: IndexScale,
    force: bool = False,
) -> None:
    """Compare the recall@10 of both indexes, with their current search settings.

    The true results come from exact rankings of the reconstructed vectors, so the
    errors of codes count in neither ranking. Nothing is compared if the bank is too
    small or an exhaustive index is too large. A loss without an error gives a warning.

    Args:
        raw, upgraded: The handlers of the index without and with offsets.
        model: The model with the bank and the offsets.
        scale: The scale on which `upgraded` holds the offsets.
        force: True to only warn.

    Raises:
        CorrectionRefused: `upgraded` loses more recall than the type of `raw` may lose.
    """
    affordable = min(WORK / (raw.count * raw.index.d), QUERIES)
    fewest = QUERIES / 10
    if raw.exhaustive:  # each search reads all codes
        affordable = min(affordable, QUERIES / 4)
        if affordable < fewest:
            return
    queries = bank_queries(model, int(max(affordable, fewest)))
    if queries is None or upgraded.count < 10 * K:
        return
    raw_truth, truth = exact_rankings(raw, upgraded, model, scale, queries)
    raw_recalls = measure_recall(raw.owner, queries, raw_truth)
    recalls = measure_recall(upgraded.owner, queries, truth)
    loss = float((raw_recalls - recalls).mean())
    standard_error = float((raw_recalls - recalls).std() / np.sqrt(len(queries)))
    # A loss of two standard errors may be chance.
    if loss <= max(TOLERATED, 2 * standard_error):
        return
    allowed = TOLERATED
    advice = ""
    approximate = faiss.IndexIVF | faiss.IndexHNSW
    if any(isinstance(part, approximate) for part in parts(raw.index)):
        allowed = PROMISED
        advice = "; a larger nprobe, efSearch or k_factor finds more"
    summary = (
        f"recall@10 of bank queries from {raw_recalls.mean():.3f} to "
        f"{recalls.mean():.3f} ({loss:.3f} +- {standard_error:.3f} less)"
    )
    if loss > allowed + 2 * standard_error and not force:
        raise CorrectionRefused(
            f"an upgrade of this {name_of(raw.index)} would lower {summary}, and "
            f"{allowed} is the most that is allowed for its type; nothing was "
            f"changed{advice}; ",
            Parameter("force", True),
            " upgrades it all the same",
        )
    warnings.warn(f"the upgrade lowered {summary}{advice}", stacklevel=4)


def measure_recall(
    index: faiss.Index, queries: np.ndarray, truth: np.ndarray
) -> np.ndarray:
    """Return the share of the true results that the index finds for each query: [m].

    Args:
        index: The index that users search.
        queries: The queries, [m, d]. They are searched one at a time, as users do.
        truth: The ids found by an exact search, [m, K].
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
        raw: The handler of the raw index, which recognises coded zero vectors.
        upgraded: The handler that reconstructs the targets and their offsets.
        model: The model.
        scale: The scale on which `upgraded` holds the model's offsets.
        queries: The raw queries, [m, d].

    Returns:
        The ids of the best targets without offsets, and with them, int64 [m, K] each.
    """
    raw_heap = faiss.ResultHeap(len(queries), K, keep_max=True)
    corrected_heap = faiss.ResultHeap(len(queries), K, keep_max=True)
    mapped = model.queries(queries)
    for batch in upgraded.scan(READ):
        vectors = batch.vectors
        offsets = batch.offsets
        labels = np.tile(batch.ids, (len(queries), 1))
        raw_heap.add_result(similarities(queries, vectors, raw.euclidean), labels)
        if model.metric is Metric.COSINE and upgraded.lossy:
            # Codes change lengths: rank by cosine, with the offsets of the model.
            vectors = raw.with_zeros(vectors)
            offsets = scale.to_model(offsets, vectors)
            vectors = unit_or_zero(vectors)
        scores = similarities(mapped, vectors, raw.euclidean) + offsets
        corrected_heap.add_result(scores, labels)
    raw_heap.finalize()
    corrected_heap.finalize()
    return raw_heap.I, corrected_heap.I
