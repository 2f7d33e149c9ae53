"""What an index loses by its correction, found by searching it with queries of the bank, and when that is too much; and
the search settings that make up for it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import faiss
import numpy as np

from hubplugin.errors import CorrectionRefused, InputError, Parameter, StoreError
from hubplugin.metric import Metric, augment_queries, augment_targets, unit_or_zero
from hubplugin.model import OffsetModel
from hubplugin.store import Answered
from hubplugin_faiss.encoding.codecs import bank_queries, evenly
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import IndexScale, block_rows, name_of, reason

QUERIES, K = 400, 10
"""Bank queries that are tried, and how many results of each."""

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

WIDTHS = 1.25, 1.5, 1.75, 2, 2.5, 3, 4
"""How many times as wide a search is tried to make up for a loss."""

ANSWERED = 2000
"""The most bank queries with known answers that are tried: a change of R@1 by half a point is then beyond chance."""

ENOUGH = 0.002
"""Within this of the recall of the raw index a wider search makes up for a loss, where none does better."""


class Recall(NamedTuple):
    """recall@10 of the raw index against the raw ranking (`before`) and of the upgraded one against the corrected
    ranking (`after`), the standard error of their difference, and the seconds of the processor that the latter took."""

    before: float
    after: float
    error: float
    seconds: float

    @property
    def fell(self) -> bool:
        """Whether the loss is larger than `TOLERATED` and than two standard errors."""
        return self.before - self.after > max(TOLERATED, 2 * self.error)

    @property
    def regained(self) -> bool:
        """Whether it is above the raw index's by two standard errors, or half of the way to 1. A search that barely
        suffices for the queries tried did not suffice for others (benchmarks/faiss_found.py)."""
        return self.after - self.before >= min(2 * self.error, (1 - self.before) / 2)

    def exceeds(self, promised: float) -> bool:
        """Whether the loss is larger than `promised`, by more than two standard errors."""
        return self.before - self.after > promised + 2 * self.error

    def __str__(self) -> str:
        return f"from {self.before:.3f} to {self.after:.3f} ({self.before - self.after:.3f} +- {self.error:.3f} less)"


@dataclass(frozen=True)
class Trial:
    """Queries of a bank [m, d], the ids of their k best targets by the exact corrected ranking [m, k], and the recall
    of the raw index against the exact raw one [m]."""

    queries: np.ndarray
    corrected: np.ndarray
    before: np.ndarray

    def recall(self, upgraded: faiss.Index) -> Recall:
        """Searches `upgraded`, as it is set to search."""
        start = time.process_time()
        after = _recall(upgraded, self.queries, self.corrected)
        seconds, error = time.process_time() - start, (self.before - after).std() / np.sqrt(len(after))
        return Recall(float(self.before.mean()), float(after.mean()), float(error), seconds)


def trial_of(
    index: faiss.Index,
    upgraded: faiss.Index,
    model: OffsetModel,
    scale: IndexScale,
) -> Trial | None:
    """Searches `index`, as it is set to search, with queries of the bank of `model`, and ranks all targets exactly, by
    what the index itself reconstructs: what its codes lose of a vector counts in neither ranking.

    Args:
        index: the raw index.
        upgraded: the same with the offsets of `model`, on `scale`.
        model: None is returned if its bank is too small to try, or an exhaustive index too large.
    """
    count = tried_at_most(index, upgraded)
    queries = None if count < QUERIES / 10 else bank_queries(model, count)
    if queries is None or upgraded.ntotal < 10 * K:
        return None
    targets = _reconstructed(upgraded, scale)
    raw, corrected = exact_rankings(upgraded, targets, queries, model.queries(queries))
    return Trial(queries, corrected, _recall(index, queries, raw))


def tried_at_most(index: faiss.Index, upgraded: faiss.Index, most: int = QUERIES) -> int:
    """How many queries `index` and `upgraded` are tried with, of `most`."""
    if handler_for(index).exhaustive:  # each query reads all codes, and no list can be missed
        return min(most // 4, int(READ / (2 * code_bytes(upgraded))))
    return int(np.clip(WORK / (upgraded.ntotal * upgraded.d), QUERIES / 10, most))


def search_that_suffices(upgraded: faiss.Index, enough: Callable[[], bool]) -> str:
    """The call of `tune`, as text, that widens the search of `upgraded` by the least with which there is `enough`; ""
    if none up to four times as wide does. Each setting is tried alone, then all together; `upgraded` is left as it was.
    """
    now = {name: value for part in parts(upgraded) for name, value in settings(part).items()}
    ways = [[name] for name in now] + ([list(now)] if len(now) > 1 else [])
    try:
        for factor in WIDTHS:
            for names in ways:
                wanted = {name: max(int(now[name] * factor), int(now[name]) + 1) for name in names}
                _set(upgraded, wanted)
                if enough():
                    return f"hubplugin_faiss.tune(index, {', '.join(f'{name}={to}' for name, to in wanted.items())})"
                _set(upgraded, now)
    finally:
        _set(upgraded, now)
    return ""


def code_bytes(index: faiss.Index) -> int:
    """About how many bytes of codes `index` holds."""
    sizes = [int(part.code_size) for part in parts(index) if hasattr(part, "code_size")]
    return int(index.ntotal) * max(sizes, default=4 * int(index.d))


def is_exact(index: faiss.Index) -> bool:
    """Whether a search of `index` finds the very best of what it holds, so that there is nothing to try."""
    handler = handler_for(index)
    return handler.exhaustive and not handler.lossy


def promised_loss(index: faiss.Index) -> float:
    """The largest loss of recall@10 with which an upgrade of `index` is not refused."""
    found = [PROMISED["graph"]] if holds_graph(index) else [PROMISED["codes"]]
    return max(found + [PROMISED["lists"] for part in parts(index) if isinstance(part, faiss.IndexIVF)])


def require_recall(trial: Trial, recall: Recall, index: faiss.Index, upgraded: faiss.Index, force: bool) -> None:
    """Raises CorrectionRefused if `upgraded` loses more `recall` in the `trial` than is promised for the type of
    `index`, or than `TOLERATED` where no wider search makes up for it, unless `force` says to take it all the same.
    Warns of a smaller loss. Both say which search makes up for it, and at what cost."""
    if not recall.fell:
        return
    found: list[Recall] = []

    def tried() -> Recall:
        found.append(trial.recall(upgraded))
        return found[-1]

    call = search_that_suffices(upgraded, lambda: tried().regained)
    call = call or search_that_suffices(upgraded, lambda: tried().after >= recall.before - ENOUGH)
    cost = f"in {found[-1].seconds / recall.seconds:.1f} times the time of a search" if call else ""
    promised = promised_loss(index) if call else TOLERATED
    if recall.exceeds(promised) and not force:
        most = "for its type" if call else "where no search up to four times as wide makes up for it"
        advice = f"the upgraded one finds as much {cost} by {call}; " if call else ""
        twice = ", ".join(f"{name}={2 * to:g}" for part in parts(index) for name, to in settings(part).items())
        advice += f"search it more widely first, hubplugin_faiss.tune(index, {twice}), or " if twice else ""
        raise CorrectionRefused(
            f"an upgrade of this {name_of(index)} would take recall@10 of bank queries {recall}, and {promised} is the "
            f"most {most}; nothing was changed; {advice}",
            Parameter("force", True),
            " upgrades it all the same",
        )
    advice = f"; this brings it back, {cost}: {call}" if call else ""
    warnings.warn(
        f"recall@10 of bank queries is {recall.after:.3f} against the exact corrected ranking, {recall.before:.3f} "
        f"against the raw one before ({recall.before - recall.after:.3f} +- {recall.error:.3f} less){advice}",
        stacklevel=5,
    )


@dataclass(frozen=True)
class Asked:
    """What an upgraded index file is tried with before it takes its place. answered: as of a `Writing`. force: it does
    so whatever it finds."""

    answered: Answered | None = None
    force: bool = False

    def require_found(
        self,
        index: faiss.Index,
        upgraded: faiss.Index,
        model: OffsetModel,
        scale: IndexScale,
    ) -> None:
        """Raises CorrectionRefused if `upgraded` is going to find fewer answers first than the raw `index`, by more
        than `LOST` and two standard errors. Warns of a loss beyond `LOST` that may be chance, or is forced.

        Offsets serve the queries that they were fitted on better than others. So of these counts only what the index
        loses beside the exact rankings; what the rankings gain is taken from queries that were held out.
        """
        known = self.answered
        if known is None:
            return
        some = evenly(np.arange(len(known.queries)), tried_at_most(index, upgraded, ANSWERED))
        if len(some) < QUERIES / 10:
            return
        names, asked = handler_for(index).labels()[known.rows[some]], np.ascontiguousarray(known.queries[some])
        before: np.ndarray = index.search(asked, 1)[1][:, 0] == names
        gained, spread, exact = 0.0, 0.0, np.zeros(len(some))
        if known.held_out is not None:
            gained, spread = known.held_out
            targets = _reconstructed(upgraded, scale)
            raw, corrected = exact_rankings(upgraded, targets, asked, model.queries(asked), 1)
            exact = (corrected[:, 0] == names).astype(np.float64) - (raw[:, 0] == names)

        def gains() -> np.ndarray:
            after: np.ndarray = upgraded.search(asked, 1)[1][:, 0] == names
            return np.asarray(after.astype(np.float64) - before - exact)

        own = gains()
        gain, error = gained + float(own.mean()), float(np.hypot(spread, own.std() / np.sqrt(len(some))))
        if gain >= -LOST or own.mean() >= 0:  # else it is not the index that loses
            return
        call = search_that_suffices(upgraded, lambda: gained + float(gains().mean()) >= -LOST)
        text = f"R@1 of {len(some)} bank queries with known answers from {100 * before.mean():.1f} to "
        text += f"{100 * (before.mean() + gain):.1f} ({-100 * gain:.1f} +- {100 * error:.1f} points less"
        text += ")" if known.held_out is None else f", where held-out ones gain {100 * gained:.1f} by an exact ranking)"
        if gain < -LOST - 2 * error and not self.force:
            advice = f"the upgraded one finds as many by {call}; " if call else ""
            raise CorrectionRefused(
                f"an upgrade of this {name_of(index)} would take {text}; nothing was changed; {advice}",
                Parameter("force", True),
                " writes it all the same",
            )
        warnings.warn(f"the upgrade took {text}" + (f"; this brings it back: {call}" if call else ""), stacklevel=6)


def _reconstructed(upgraded: faiss.Index, scale: IndexScale) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Vectors [b, d] as the index reconstructs them, offsets [b], which it holds on `scale`, and ids [b] of all
    entries. Where a model takes all vectors for unit vectors, they are brought back to unit length if codes changed it.
    """
    handler, row, unit = handler_for(upgraded), 0, scale.nearness is not None
    for vectors, offsets in handler.scan(0, block_rows(upgraded.d)):
        assert offsets is not None
        labels = handler.labels(row, row + len(vectors))
        offsets = scale.of_model(offsets, vectors).astype(np.float32)
        yield unit_or_zero(handler.with_zeros(vectors)) if unit and handler.lossy else vectors, offsets, labels
        row += len(vectors)


def exact_rankings(
    upgraded: faiss.Index,
    targets: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
    queries: np.ndarray,
    mapped: np.ndarray,
    k: int = K,
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the k best `targets` of each of `queries` [m, d] without their offsets, and with them, where it is
    `mapped` [m, d]: int64 [m, k] each."""
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
            (best[1], extended, augment_queries(mapped, metric)),
        ):
            scores, rows = faiss.knn(asked, targets, min(k, len(targets)), metric=upgraded.metric_type)
            found.append((-scores if handler.euclidean else scores, labels[rows]))
    rankings = []
    for found in best:
        scores, names = (np.concatenate(part, axis=1) for part in zip(*found, strict=True))
        rankings.append(np.take_along_axis(names, np.argsort(-scores, axis=1, kind="stable")[:, :k], axis=1))
    return rankings[0], rankings[1]


def _recall(index: faiss.Index, queries: np.ndarray, truth: np.ndarray) -> np.ndarray:
    found = []
    try:
        for query in np.ascontiguousarray(queries, np.float32):
            found.append(index.search(query[None], K)[1][0])
    except RuntimeError as error:
        raise StoreError(f"Faiss cannot search this {name_of(index)}: {reason(error)}") from None
    return np.array([len(np.intersect1d(a, b)) / K for a, b in zip(found, truth, strict=True)])


def tune(
    index: faiss.Index, *, nprobe: int | None = None, ef_search: int | None = None, k_factor: float | None = None
) -> None:
    """Sets how wide a search looks, wherever in `index`, upgraded or not, the setting lies.

    Args:
        index: a faiss.Index; an upgraded one is an IndexPreTransform, which has no `nprobe` or `hnsw` of its own.
        nprobe: inverted lists that a search visits.
        ef_search: candidates that a search of an HNSW graph keeps (`hnsw.efSearch`).
        k_factor: candidates for each result that an IndexRefine ranks again.

    Raises:
        InputError: nothing in `index` has one of the settings that were given; none is set then.
    """
    given = {"nprobe": nprobe, "ef_search": ef_search, "k_factor": k_factor}
    wanted = {name: value for name, value in given.items() if value is not None}
    places = {name: part for part in parts(index) for name in settings(part)}
    for name in wanted:
        if name not in places:
            known = ", ".join(sorted(places)) or "none"
            raise InputError(f"nothing in this {name_of(index)} has the setting {name}; it has: {known}")
    _set(index, wanted)


def _set(index: faiss.Index, wanted: Mapping[str, float]) -> None:
    """Settings that are in `index`, to the values `wanted`."""
    places = {name: part for part in parts(index) for name in settings(part)}
    for name, value in wanted.items():
        if name == "ef_search":
            places[name].hnsw.efSearch = value
        else:
            setattr(places[name], name, value)


def settings(part: faiss.Index) -> dict[str, float]:
    """The settings that `part` itself has, and their values."""
    if isinstance(part, faiss.IndexIVF):
        return {"nprobe": part.nprobe}
    if isinstance(part, faiss.IndexHNSW):
        return {"ef_search": part.hnsw.efSearch}
    return {"k_factor": part.k_factor} if isinstance(part, faiss.IndexRefine) else {}


def parts(index: faiss.Index) -> Iterator[faiss.Index]:
    """`index` and those inside it that find its candidates."""
    index = faiss.downcast_index(index)
    yield index
    for inner in ("index", "base_index"):
        if hasattr(index, inner):
            yield from parts(getattr(index, inner))


LENGTHS_KEPT = {
    faiss.ScalarQuantizer.QT_8bit: 0.03,
    faiss.ScalarQuantizer.QT_6bit: 0.03,
    faiss.ScalarQuantizer.QT_4bit: 0.12,
}
"""How far apart codes of each component bring the lengths of unit vectors, at most, from the 5 % quantile to that of
95 %. Seen were 0.005, 0.021 and 0.089, of 16 to 512 dimensions (benchmarks/faiss_lengths.py)."""


SPREAD, SPREAD_REDUCED = 0.45, 0.65
"""The same of other codes, over the median; and where a transform has left out dimensions (same benchmark)."""


def spread_of_unit(index: faiss.Index) -> tuple[float, bool]:
    """How far apart `index` may bring the lengths of unit vectors, over the median; and whether its codes tell small
    differences of lengths."""
    if any(part.d < index.d for part in parts(index)):
        return SPREAD_REDUCED, False
    held = [faiss.downcast_index(part.storage) if hasattr(part, "storage") else part for part in parts(index)]
    kept = next((LENGTHS_KEPT.get(part.sq.qtype) for part in held if hasattr(part, "sq")), None)
    return (SPREAD, False) if kept is None else (kept, True)


def holds_graph(index: faiss.Index) -> bool:
    return any(isinstance(part, faiss.IndexHNSW) for part in parts(index))
