"""What an index loses by its correction, found by searching it with queries of the bank, when that is too much, and by
which factor a wider search makes up for it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator

import faiss
import numpy as np

from hubplugin.errors import CorrectionRefused, Parameter, StoreError
from hubplugin.metric import Metric, augment_queries, augment_targets, unit_or_zero
from hubplugin.model import OffsetModel
from hubplugin.store import LabelledQueries
from hubplugin_faiss.encoding.codecs import bank_queries, evenly
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import IndexHandler, block_rows, name_of, reason
from hubplugin_faiss.scale import IndexScale

QUERIES, K = 400, 10
"""Bank queries that are tried, and how many results of each."""

ANSWERED = 2000
"""The most bank queries with known answers that are tried: a change of R@1 by half a point is then beyond chance."""

WORK = 4e11
"""Fewer queries are tried, down to a tenth, where all would take more products than this with the gallery: some ten
seconds of one core."""

READ = 64 << 30
"""An index that reads all its codes for each query is not tried where the fewest queries would read more bytes."""

TOLERATED = 0.01
"""Warnings do not mention a smaller loss of recall."""

LOST = 0.003
"""The largest loss of R@1 with which an index file is replaced without a word."""

PROMISED = {"codes": 0.01, "lists": 0.05, "graph": 0.05}
"""The largest loss of recall@10 with which an upgrade is not refused if a wider search makes up for it, by what finds
the targets: codes in a row; inverted lists; a graph. If none does it is `TOLERATED`."""

FACTORS = 1.25, 1.5, 1.75, 2, 2.5, 3, 4
"""How many times as wide a search is tried to make up for a loss."""

ENOUGH = 0.002
"""Within this of the recall of the raw index a wider search makes up for a loss, where none does better."""


def require_recall(
    raw: faiss.Index,
    upgraded: faiss.Index,
    model: OffsetModel,
    scale: IndexScale,
    force: bool = False,
) -> None:
    """Compares the recall@10 of both indexes, as they are set to search, with queries of the bank.

    All targets are ranked exactly, by the vectors that the index itself reconstructs: what its codes lose of a vector
    counts in neither ranking. A bank that is too small says nothing, and an exhaustive index that is too large is not
    tried. A smaller loss is a warning. It and the error say which search makes up for the loss, and at what cost.

    Args:
        raw, upgraded: the index without offsets and with them.
        model: has the bank and the offsets.
        scale: the scale on which `upgraded` holds the offsets.
        force: only warn.

    Raises:
        CorrectionRefused: `upgraded` loses more than is promised for the type of `raw`, or than `TOLERATED` where no
            wider search makes up for it.
    """
    count = affordable_queries(raw, upgraded)
    queries = None if count < QUERIES / 10 else bank_queries(model, count)
    if queries is None or upgraded.ntotal < 10 * K:
        return
    raw_truth, truth = exact_rankings(raw, upgraded, model, scale, queries)
    raw_recall, (recall, seconds) = (
        measure_recall(raw, queries, raw_truth)[0],
        measure_recall(upgraded, queries, truth),
    )
    lost, error = (
        float((raw_recall - recall).mean()),
        float((raw_recall - recall).std() / np.sqrt(len(recall))),
    )
    if lost <= max(TOLERATED, 2 * error):
        return
    # A search that barely suffices for the queries tried did not suffice for others (benchmarks/faiss_found.py).
    doubt = min(2 * error, (1 - float(raw_recall.mean())) / 2)
    times = [seconds]

    def lacks() -> float:
        wider, seconds = measure_recall(upgraded, queries, truth)
        times.append(seconds)
        return float((raw_recall - wider).mean()) + doubt

    call, number = wider_search(upgraded, lacks, ENOUGH + doubt)
    cost = f"in {times[number] / seconds:.1f} times the time of a search"
    limit = loss_limit(raw) if call else TOLERATED
    if lost > limit + 2 * error and not force:
        most = (
            "for its type"
            if call
            else "where no search up to four times as wide makes up for it"
        )
        advice = f"the upgraded one finds as much {cost} by {call}; " if call else ""
        if twice := call_of(
            {name: int(2 * value) for name, value in settings(raw).items()}
        ):
            advice += f"search it more widely first, {twice}, or "
        raise CorrectionRefused(
            f"an upgrade of this {name_of(raw)} would take recall@10 of bank queries from {raw_recall.mean():.3f} to "
            f"{recall.mean():.3f} ({lost:.3f} +- {error:.3f} less), and {limit} is the most {most}; nothing was "
            f"changed; {advice}",
            Parameter("force", True),
            " upgrades it all the same",
        )
    warnings.warn(
        f"recall@10 of bank queries is {recall.mean():.3f} against the exact corrected ranking, "
        f"{raw_recall.mean():.3f} against the raw one before ({lost:.3f} +- {error:.3f} less)"
        + (f"; this brings it back, {cost}: {call}" if call else ""),
        stacklevel=5,
    )


def measure_recall(
    index: faiss.Index, queries: np.ndarray, truth: np.ndarray
) -> tuple[np.ndarray, float]:
    """Searches with one query at a time, as users ask.

    Args:
        index: any index.
        queries: [m, d].
        truth: the ids that an exact search finds [m, k].

    Returns:
        The share of `truth` that the search finds [m], and the seconds of the processor that it took.
    """
    start = time.process_time()
    try:
        ids = [
            index.search(query[None], K)[1][0]
            for query in np.ascontiguousarray(queries, np.float32)
        ]
    except RuntimeError as error:
        raise StoreError(
            f"Faiss cannot search this {name_of(index)}: {reason(error)}"
        ) from None
    seconds = time.process_time() - start
    return np.array(
        [len(np.intersect1d(a, b)) / K for a, b in zip(ids, truth, strict=True)]
    ), seconds


def require_answers(
    raw: faiss.Index,
    upgraded: faiss.Index,
    model: OffsetModel,
    scale: IndexScale,
    labelled: LabelledQueries | None,
    force: bool = False,
) -> None:
    """Compares how many known answers both indexes find first.

    Offsets serve the queries that they were fitted on better than others. So of these counts only what the index loses
    beside the exact rankings; what the rankings gain is taken from queries that were held out. A loss beyond `LOST`
    that may be chance, or is forced, is a warning.

    Args:
        raw, upgraded: the index without offsets and with them.
        model, scale: the model, and the scale on which `upgraded` holds its offsets.
        labelled: queries with known answers; nothing is compared without them.
        force: only warn.

    Raises:
        CorrectionRefused: `upgraded` finds fewer answers first, by more than `LOST` and two standard errors.
    """
    if labelled is None:
        return
    sample = evenly(
        np.arange(len(labelled.queries)), affordable_queries(raw, upgraded, ANSWERED)
    )
    if len(sample) < QUERIES / 10:
        return
    answers, queries = (
        handler_for(raw).labels()[labelled.rows[sample]],
        np.ascontiguousarray(labelled.queries[sample]),
    )

    def first(ids: np.ndarray) -> np.ndarray:
        return np.asarray(ids[:, 0] == answers, np.float64)

    exact, (gained, spread) = np.zeros(()), labelled.held_out or (0.0, 0.0)
    if labelled.held_out is not None:
        raw_truth, truth = exact_rankings(raw, upgraded, model, scale, queries, 1)
        exact = first(truth) - first(raw_truth)
    raw_first = first(raw.search(queries, 1)[1])

    def gains() -> np.ndarray:
        return np.asarray(first(upgraded.search(queries, 1)[1]) - raw_first - exact)

    of_index = gains()
    gain = gained + float(of_index.mean())
    error = float(np.hypot(spread, of_index.std() / np.sqrt(len(sample))))
    if gain >= -LOST or of_index.mean() >= 0:  # else it is not the index that loses
        return
    call, _ = wider_search(upgraded, lambda: -LOST - gained - float(gains().mean()))
    text = f"R@1 of {len(sample)} bank queries with known answers from {100 * raw_first.mean():.1f} to "
    text += f"{100 * (raw_first.mean() + gain):.1f} ({-100 * gain:.1f} +- {100 * error:.1f} points less"
    text += (
        f", where held-out ones gain {100 * gained:.1f} by an exact ranking)"
        if labelled.held_out
        else ")"
    )
    if gain < -LOST - 2 * error and not force:
        advice = f"the upgraded one finds as many by {call}; " if call else ""
        raise CorrectionRefused(
            f"an upgrade of this {name_of(raw)} would take {text}; nothing was changed; {advice}",
            Parameter("force", True),
            " writes it all the same",
        )
    warnings.warn(
        f"the upgrade took {text}" + (f"; this brings it back: {call}" if call else ""),
        stacklevel=6,
    )


def exact_rankings(
    raw: faiss.Index,
    upgraded: faiss.Index,
    model: OffsetModel,
    scale: IndexScale,
    queries: np.ndarray,
    k: int = K,
) -> tuple[np.ndarray, np.ndarray]:
    """The best targets without offsets and with them, by cosine at unit length.

    Args:
        raw: reconstructs the targets.
        upgraded: holds the offsets.
        model, scale: the model, and the scale on which `upgraded` holds its offsets.
        queries: [m, d], as users ask them.
        k: how many targets of each query.

    Returns:
        Two rankings, of ids: int64 [m, k] each.
    """
    handler, holder, size = handler_for(raw), handler_for(upgraded), block_rows(raw.d)
    metric = Metric.EUCLIDEAN if handler.euclidean else Metric.DOT
    augmented, best, row = augment_queries(model.queries(queries), metric), ([], []), 0  # type: ignore[var-annotated]
    highest = max(
        float(extra.offsets(extra.query[None]).max())
        for extra in holder.extra_dimensions()
    )
    for (vectors, _), (_, offsets) in zip(
        handler.scan(0, size), holder.scan(0, size), strict=True
    ):
        assert offsets is not None
        labels = handler.labels(row, row + len(vectors))
        row += len(vectors)
        if model.metric is Metric.COSINE and handler.lossy:
            vectors = handler.with_zeros(vectors)
            offsets, vectors = scale.to_model(offsets, vectors), unit_or_zero(vectors)
        extended = augment_targets(vectors, offsets, metric, max_offset=highest)
        for blocks, targets, q in zip(
            best, (vectors, extended), (queries, augmented), strict=True
        ):
            scores, rows = faiss.knn(
                q, targets, min(k, len(targets)), metric=upgraded.metric_type
            )
            blocks.append((-scores if handler.euclidean else scores, labels[rows]))
    rankings = []
    for blocks in best:
        scores, ids = (
            np.concatenate(part, axis=1) for part in zip(*blocks, strict=True)
        )
        rankings.append(
            np.take_along_axis(
                ids, np.argsort(-scores, axis=1, kind="stable")[:, :k], axis=1
            )
        )
    return rankings[0], rankings[1]


def affordable_queries(
    raw: faiss.Index, upgraded: faiss.Index, most: int = QUERIES
) -> int:
    """How many queries, of `most`, an upgrade of `raw` to `upgraded` is tried with."""
    if not handler_for(raw).exhaustive:
        return int(np.clip(WORK / (upgraded.ntotal * upgraded.d), QUERIES / 10, most))
    sizes = [
        int(part.code_size) for part in parts(upgraded) if hasattr(part, "code_size")
    ]
    # Each query reads all codes, and no list can be missed.
    return min(
        most // 4,
        int(READ / (2 * upgraded.ntotal * max(sizes, default=4 * int(upgraded.d)))),
    )


def is_exact(handler: IndexHandler) -> bool:
    """Whether a search of an index finds the very best of what it holds, so that there is nothing to try."""
    return handler.exhaustive and not handler.lossy


def loss_limit(index: faiss.Index) -> float:
    """The largest loss of recall@10 with which an upgrade of `index` is not refused."""
    kinds = {"graph": faiss.IndexHNSW, "lists": faiss.IndexIVF, "codes": faiss.Index}
    return max(
        PROMISED[name]
        for part in parts(index)
        for name, kind in kinds.items()
        if isinstance(part, kind)
    )


def wider_search(
    index: faiss.Index, lacks: Callable[[], float], slack: float = 0.0
) -> tuple[str, int]:
    """Widens the search of `index`, all settings alike, until it finds enough; the index is left as it was.

    Args:
        index: the index, set as users search it.
        lacks: measures by how much the search falls short; 0 or less is enough.
        slack: how much it may fall short where no width is enough.

    Returns:
        The call of Faiss, as text, that widens the search by the smallest factor that is enough, and the number of that
        trial, from 1 on. "" if no search up to four times as wide is enough.
    """
    now, fallback = settings(index), ("", 0)
    try:
        for number, factor in enumerate(FACTORS if now else (), 1):
            wider = {
                name: max(int(value * factor), int(value) + 1)
                for name, value in now.items()
            }
            for name, wide in wider.items():
                faiss.ParameterSpace().set_index_parameter(index, name, wide)
            lacking = lacks()
            if lacking <= 0:
                return call_of(wider), number
            if lacking <= slack and not fallback[0]:
                fallback = call_of(wider), number
    finally:
        for name, value in now.items():
            faiss.ParameterSpace().set_index_parameter(index, name, value)
        for part in parts(index):
            if isinstance(
                part, faiss.IndexRefine
            ):  # whose factor need be no whole number
                part.k_factor = now["k_factor_rf"]
    return fallback


def call_of(values: dict[str, int]) -> str:
    """The call of Faiss, as text, that sets these search settings; "" for none."""
    text = ",".join(f"{name}={value}" for name, value in values.items())
    return (
        f'faiss.ParameterSpace().set_index_parameters(index, "{text}")'
        if values
        else ""
    )


def settings(index: faiss.Index) -> dict[str, float]:
    """How widely `index` is searched, by the names that `faiss.ParameterSpace` has for that."""
    values: dict[str, float] = {}
    for part in parts(index):
        if isinstance(part, faiss.IndexIVF):
            values["nprobe"] = part.nprobe
        elif isinstance(part, faiss.IndexHNSW):
            values["efSearch"] = part.hnsw.efSearch
        elif isinstance(part, faiss.IndexRefine):
            values["k_factor_rf"] = part.k_factor
    return values


def parts(index: faiss.Index) -> Iterator[faiss.Index]:
    """`index` and those inside it that find its candidates."""
    index = faiss.downcast_index(index)
    yield index
    for inner in ("index", "base_index"):
        if hasattr(index, inner):
            yield from parts(getattr(index, inner))
