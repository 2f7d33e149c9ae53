"""Corrected search over an index that stays as it is: fetch more, rank again, and know when the result is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import faiss
import numpy as np

from hubplugin.errors import InputError
from hubplugin.model import OffsetModel, refuse_query_map
from hubplugin.rerank import (
    DualDynamic,
    DualSoftmax,
    Dynamic,
    GloballyCorrected,
    Reranker,
    Rule,
)
from hubplugin.vectors import OffsetsLike, VectorLike, as_vectors
from hubplugin_faiss.index import normalises_queries, require_offsets

GROWTH = 4


class Searchable(Protocol):
    """Anything with Faiss's search: scores [m, k] and ids [m, k], best first, -1 where there are no more."""

    def search(
        self, x: np.ndarray, k: int, **options: object
    ) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class Certified:
    """Scores and ids [m, k] as Faiss gives them, and for each query whether they are certain to be the k best of the
    corrected ranking (`certified` [m]) and how many candidates that took (`fetched` [m])."""

    scores: np.ndarray
    ids: np.ndarray
    certified: np.ndarray
    fetched: np.ndarray


def _scores_by_bits(index: Searchable) -> bool:
    """Whether the scores of `index` count bits that differ."""
    if not isinstance(index, faiss.Index):
        return False
    index = faiss.downcast_index(index)
    return isinstance(index, faiss.IndexLSH) or (
        hasattr(index, "index") and _scores_by_bits(index.index)
    )


class CorrectedSearch:
    """`search(x, k)` by corrected scores over an index that stays as it is.

    If the L best candidates end at similarity s_L, no other target can score more than s_L + M, M the largest offset.
    Of a model that maps queries, these are similarities to the mapped query, which the index is searched with.
    Answers are certified once their k-th corrected score reaches that bound. Until then more candidates are fetched,
    four times as many each time. The certificate holds for an exact index; an approximate one may miss what its raw
    search misses.

    Codes without room for an offset (RaBitQ, LSH, additive quantisers) score so roughly that offsets drown in their
    errors. With `vectors`, they find candidates, and these are ranked by their true similarities.

    Args:
        index: anything with Faiss's `search` whose scores are inner products, or squared L2 distances if its
            `metric_type` says so.
        correction: offsets [n], an `OffsetModel`, or a fitted `hubplugin.rerank.Rule` for the corrections
            that depend on the query (dis, dualdis, dsl, gc).
        targets: the gallery [n, d] that a model or a rule needs; by default `vectors`.
        vectors: the originals of the entries [n, d], row i that of id `ids[i]`. Candidates are ranked by these instead
            of the index's own scores. LSH needs them: it scores by bits that differ, which are no similarities.
        ids: int64 [n], the id of each row; 0 ... n - 1 by default.
        limit: the most candidates fetched for a query.

    Raises:
        InputError: offsets, targets, vectors or ids do not fit each other or the index.
    """

    def __init__(
        self,
        index: Searchable,
        correction: OffsetsLike | OffsetModel | Rule,
        *,
        targets: VectorLike | None = None,
        vectors: VectorLike | None = None,
        ids: np.ndarray | None = None,
        limit: int = 4096,
    ):
        self._index, self._limit = index, limit
        metric = getattr(index, "metric_type", faiss.METRIC_INNER_PRODUCT)
        if metric not in (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2):
            raise InputError(
                f"the index has metric {metric}, neither inner product nor L2: an offset is no part of it"
            )
        self._euclidean = metric == faiss.METRIC_L2
        self._rule: Rule | None = None
        model = correction.fitted if isinstance(correction, Dynamic) else correction
        self._mapping = (
            model
            if isinstance(model, OffsetModel) and model.query_map is not None
            else None
        )
        if (
            self._mapping is not None
            and isinstance(index, faiss.Index)
            and normalises_queries(index)
        ):
            raise refuse_query_map("an index that normalises queries (L2norm)")
        self._bits = _scores_by_bits(index)
        if self._bits and vectors is None:
            raise InputError(
                "an index of bits (LSH) has no similarities to rank by: pass the originals, vectors="
            )
        self._vectors = None if vectors is None else as_vectors(vectors, "vectors")
        targets = self._vectors if targets is None else targets
        count = getattr(index, "ntotal", None)
        if isinstance(correction, OffsetModel | Rule):
            if targets is None:
                raise InputError(
                    f"{type(correction).__name__} needs to know the gallery: pass targets="
                )
            gallery = as_vectors(targets, "targets")
        if isinstance(correction, Rule):
            self._rule, self._corrections = correction, correction.keep(gallery)
        else:
            offsets = np.array(
                correction.offsets(gallery)
                if isinstance(correction, OffsetModel)
                else correction
            )
            self._corrections = require_offsets(
                offsets, offsets.size if count is None else count, "the index"
            )
        if count not in (None, len(self._corrections)):
            raise InputError(
                f"{len(self._corrections)} targets were given, the index holds {count}"
            )
        expected = (
            len(self._corrections),
            getattr(index, "d", None if self._vectors is None else self._vectors.dim),
        )
        if (
            self._vectors is not None
            and (self._vectors.rows, self._vectors.dim) != expected
        ):
            raise InputError(
                f"vectors have shape {[self._vectors.rows, self._vectors.dim]}: expected {list(expected)}"
            )
        names = None if ids is None else np.asarray(ids)
        count = len(self._corrections)
        if names is not None and (
            names.shape != (count,) or names.dtype.kind not in "iu" or (names < 0).any()
        ):
            raise InputError(
                f"ids have shape {list(names.shape)} of {names.dtype}: expected {count} whole numbers from 0 on, one "
                "for each target"
            )
        self._order = None if names is None else np.argsort(names, kind="stable")
        self._ids = None if names is None else names.astype(np.int64)[self._order]

    def search(
        self, x: np.ndarray, k: int, **options: object
    ) -> tuple[np.ndarray, np.ndarray]:
        """Searches by the corrected ranking.

        Args:
            x: Queries [m, d].
            k: How many results of each.
            options: Go to the index, such as params=.

        Returns:
            Corrected scores and ids [m, k], as Faiss gives them: inner products, larger first, or squared distances,
            smaller first, with 2 * offset taken off.

        Raises:
            InputError: For queries that cannot be used, or an index that was changed meanwhile.
        """
        answers = self.search_certified(x, k, **options)
        return answers.scores, answers.ids

    def search_certified(self, x: np.ndarray, k: int, **options: object) -> Certified:
        """Searches as `search` does.

        Args:
            x: Queries [q, d].
            k: How many results each has.
            **options: As of `search`.

        Returns:
            The results, and a certificate for each query.
        """
        queries = np.ascontiguousarray(x, np.float32)
        d, count = getattr(self._index, "d", None), getattr(self._index, "ntotal", None)
        if (
            queries.ndim != 2
            or k < 1
            or d not in (None, queries.shape[1])
            or not np.isfinite(queries).all()
        ):
            raise InputError(
                f"expected finite queries [m, {d or 'd'}] and k >= 1, got shape {queries.shape}, k = {k}"
            )
        queries = queries if self._mapping is None else self._mapping.queries(queries)
        if count not in (None, len(self._corrections)):
            raise InputError(
                f"the index holds {count} now, and {len(self._corrections)} when this was made: make it anew"
            )
        scores, ids = (
            np.full((len(queries), k), -np.inf),
            np.full((len(queries), k), -1, np.int64),
        )
        certified, done, fetched = (
            *np.zeros((2, len(queries)), bool),
            np.zeros(len(queries), np.int64),
        )
        open_, fetch = np.arange(len(queries)), GROWTH * k
        while len(open_):
            fetch = min(fetch, max(self._limit, k), len(self._corrections))
            raw, found = self._index.search(queries[open_], fetch, **options)
            raw = raw.astype(np.float64) * (-0.5 if self._euclidean else 1.0)
            for query, similarities, candidates in zip(open_, raw, found, strict=True):
                valid = candidates >= 0
                best, names, bound = self._rank(
                    queries[query], similarities[valid], candidates[valid]
                )
                scores[query, : len(best[:k])], ids[query, : len(best[:k])] = (
                    best[:k],
                    names[:k],
                )
                # Without more to give a search has seen all that a selector lets it see; else it probes too little.
                ended = not valid.all()
                everything = (ended and bool(options)) or valid.sum() == len(
                    self._corrections
                )
                certified[query] = everything or (
                    not ended and len(best) >= k and best[k - 1] >= bound
                )
                fetched[query], done[query] = fetch, certified[query] or ended
            if fetch == min(max(self._limit, k), len(self._corrections)):
                break
            open_, fetch = open_[~done[open_]], GROWTH * fetch
        return Certified(
            (-2 * scores if self._euclidean else scores).astype(np.float32),
            ids,
            certified,
            fetched,
        )

    def _rank(
        self, query: np.ndarray, similarities: np.ndarray, candidates: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Corrected scores and ids of `candidates`, best first, and an upper bound for all other targets."""
        if not len(candidates):
            return similarities, candidates, np.inf
        last, rows = (
            np.inf if self._bits else float(similarities[-1]),
            self._rows(candidates),
        )
        if self._vectors is not None:
            similarities = self._true_similarities(query, rows)
            order = np.argsort(-similarities, kind="stable")
            similarities, candidates, rows = (
                similarities[order],
                candidates[order],
                rows[order],
            )
        corrections = self._corrections[rows]
        if self._rule is None:
            corrected = similarities + corrections
            order = np.argsort(-corrected, kind="stable")
            return (
                corrected[order],
                candidates[order],
                float(last + self._corrections.max()),
            )
        order, scores = Reranker(self._rule, lambda _: corrections).rerank(
            query, candidates.tolist(), similarities.tolist()
        )
        return scores, candidates[order], self._upper_bound(last, corrections)

    def _true_similarities(self, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The similarities of `query` [d] and the vectors `rows` [b]: float64 [b]."""
        assert self._vectors is not None
        distinct, places = np.unique(rows, return_inverse=True)
        vectors = self._vectors.select(distinct).astype(np.float64)[places]
        return (
            -((vectors - query) ** 2).sum(axis=1) / 2
            if self._euclidean
            else vectors @ query.astype(np.float64)
        )

    def _upper_bound(self, last: float, corrections: np.ndarray) -> float:
        """The largest corrected score of a target whose similarity is at most `last`."""
        match self._rule:
            case (
                Dynamic() | DualDynamic()
            ):  # whether the best candidate is active decides, and then the largest offset
                most = corrections[0].copy()
                most[::2] = self._corrections[:, ::2].max(axis=0)
                return float(self._rule.rescore(np.array([[last]]), most[None])[0, 0])
            case DualSoftmax():
                return max(last, 0.0)
            case GloballyCorrected():
                return last
        return np.inf

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        if self._ids is None or self._order is None:
            return ids
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        if (self._ids[places] != ids).any():
            unknown = int(ids[self._ids[places] != ids][0])
            raise InputError(
                f"the index returned id {unknown}, which is not among the ids that were given"
            )
        return np.asarray(self._order[places])
