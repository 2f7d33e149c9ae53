"""Corrected search over an index that is not changed.

It fetches more candidates than requested, reranks them, and certifies exact results.
"""

from __future__ import annotations

from dataclasses import dataclass

import faiss
import numpy as np

from hubplugin.errors import InputError
from hubplugin.model import OffsetModel, refuse_query_map
from hubplugin.vectors import OffsetsLike, VectorLike, as_vectors
from hubplugin_faiss.index import require_offsets
from hubplugin_faiss.objects import normalises_queries, parts

GROWTH = 4
"""The factor by which the number of candidates grows until results are certain."""


@dataclass(frozen=True)
class Certified:
    """The results of `CorrectedSearch.search_certified`.

    scores, ids: The results in Faiss's format, [m, k].
    certified: True for a query whose results are certain to be the k best of the
        corrected ranking, [m].
    fetched: The number of candidates fetched for each query, [m].
    """

    scores: np.ndarray
    ids: np.ndarray
    certified: np.ndarray
    fetched: np.ndarray


class CorrectedSearch:
    """Searches an index by corrected scores without changing it.

    If s_L is the similarity of the last of the L best candidates, no other target can
    score more than s_L + M, where M is the largest offset. If the model maps queries,
    the index is searched with the mapped query, and s_L is a similarity to it. Results
    are certified once the k-th corrected score reaches that bound. Until then, four
    times as many candidates are fetched each time. The certificate holds for an
    exact index. An approximate index may miss the same targets as in its raw search.

    Codes without room for an offset (RaBitQ, LSH, additive quantisers) have errors much
    larger than the offsets. With `vectors`, such an index only finds candidates, which
    are then ranked by their true similarities.

    Args:
        index: A faiss.Index with inner product or L2, on a CPU or a GPU, whose ids are
            0 ... n - 1.
        correction: The offsets [n], or an `OffsetModel`.
        targets: The gallery [n, d] for which a model computes offsets. By default
            `vectors`.
        vectors: The original vectors of the entries, [n, d]. Candidates are ranked by
            them instead of by the index's scores. They are required for LSH, which
            scores by the number of different bits and not by similarities.
        limit: The maximum number of candidates fetched for a query.

    Raises:
        InputError: Offsets, targets or vectors do not fit each other or the index.
    """

    def __init__(
        self,
        index: faiss.Index,
        correction: OffsetsLike | OffsetModel,
        *,
        targets: VectorLike | None = None,
        vectors: VectorLike | None = None,
        limit: int = 4096,
    ):
        self._index = index
        self._limit = limit
        metric = index.metric_type
        if metric not in (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2):
            raise InputError(
                f"the index has metric {metric}, neither inner product nor L2: it "
                "cannot include an offset"
            )
        self._euclidean = metric == faiss.METRIC_L2
        self._vectors = None if vectors is None else as_vectors(vectors, "vectors")
        self._map: OffsetModel | None = None
        if isinstance(correction, OffsetModel) and correction.query_map is not None:
            self._map = correction
        self._scores_bits = any(isinstance(p, faiss.IndexLSH) for p in parts(index))
        self._refuse_unrankable(faiss.downcast_index(index))
        self._count = int(index.ntotal)
        if self._vectors is not None:
            shape = [self._vectors.rows, self._vectors.dim]
            expected = [self._count, index.d]
            if shape != expected:
                raise InputError(f"vectors have shape {shape}: expected {expected}")
        if targets is None:
            targets = self._vectors
        self._offsets = self._read_offsets(correction, targets)

    def _refuse_unrankable(self, index: faiss.Index) -> None:
        """Raise InputError if the results of `index` cannot be reranked."""
        if self._map is not None and normalises_queries(index):
            raise refuse_query_map("an index that normalises queries (L2norm)")
        if isinstance(index, faiss.IndexIDMap):
            raise InputError(
                f"the ids of this {type(index).__name__} are not its rows: search the "
                "inner index, faiss.downcast_index(index.index), and translate its ids: "
                "faiss.vector_to_array(index.id_map)[ids]"
            )
        if self._scores_bits and self._vectors is None:
            raise InputError(
                "an index of bits (LSH) has no similarities to rank by: pass the "
                "original vectors, vectors="
            )

    def _read_offsets(
        self, correction: OffsetsLike | OffsetModel, targets: VectorLike | None
    ) -> np.ndarray:
        """Return the offset of each target: float32 [n]."""
        if not isinstance(correction, OffsetModel):
            offsets = require_offsets(correction, self._count, "the index")
            return offsets.copy()  # the caller may change the array
        if targets is None:
            raise InputError(
                "an OffsetModel needs the gallery: pass targets= or vectors="
            )
        gallery = as_vectors(targets, "targets")
        if gallery.rows != self._count:
            raise InputError(
                f"{gallery.rows} targets were given, the index holds {self._count}"
            )
        return correction.offsets(gallery)

    def search(self, x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Search by the corrected ranking.

        Args:
            x: The queries, [m, d].
            k: The number of results for each query.

        Returns:
            The corrected scores and the ids in Faiss's format, [m, k]: inner products
            plus the offset, largest first, or squared distances minus twice the offset,
            smallest first.

        Raises:
            InputError: The queries cannot be used, or the index has changed.
        """
        answers = self.search_certified(x, k)
        return answers.scores, answers.ids

    def search_certified(self, x: np.ndarray, k: int) -> Certified:
        """Search by the corrected ranking and certify the results.

        Args:
            x: The queries, [m, d].
            k: The number of results for each query.

        Returns:
            The results, with a certificate for each query.
        """
        queries = self._as_queries(x, k)
        scores = np.full((len(queries), k), -np.inf)
        ids = np.full((len(queries), k), -1, np.int64)
        certified = np.zeros(len(queries), bool)
        fetched = np.zeros(len(queries), np.int64)
        largest_count = min(max(self._limit, k), self._count)
        count = min(GROWTH * k, largest_count)
        pending = np.arange(len(queries))
        while len(pending):
            answers = self._index.search(queries[pending], count)
            fetched[pending] = count
            uncertain = []
            for query, raw, found in zip(pending, *answers, strict=True):
                rows = found[found >= 0]  # Faiss fills missing results with -1
                best_scores, best_rows, bound = self._rank(
                    queries[query], raw[: len(rows)], rows
                )
                scores[query, : len(best_scores)] = best_scores[:k]
                ids[query, : len(best_scores)] = best_rows[:k]
                if len(rows) < count:
                    continue  # the index found no more, and would not next time
                # If all targets were fetched, there may be fewer than k results.
                has_all = count == self._count
                certified[query] = has_all or best_scores[k - 1] >= bound
                if not certified[query]:
                    uncertain.append(query)
            if count == largest_count:
                break
            pending = np.array(uncertain, np.int64)
            count = min(GROWTH * count, largest_count)
        if self._euclidean:
            scores *= -2  # squared distances, less twice the offsets
        return Certified(scores.astype(np.float32), ids, certified, fetched)

    def _as_queries(self, x: np.ndarray, k: int) -> np.ndarray:
        """Return the queries for the search of the index: checked and mapped.

        Raises InputError if they or `k` cannot be used, or if the index has changed.
        """
        queries = np.ascontiguousarray(x, np.float32)
        fits = queries.ndim == 2 and queries.shape[1] == self._index.d and k >= 1
        if not fits or not np.isfinite(queries).all():
            raise InputError(
                f"expected finite queries [m, {self._index.d}] and k >= 1, got shape "
                f"{queries.shape}, k = {k}"
            )
        if self._index.ntotal != self._count:
            raise InputError(
                f"the index holds {self._index.ntotal} vectors now, and held "
                f"{self._count} when this search was made: make a new one"
            )
        if self._map is None:
            return queries
        return self._map.queries(queries)

    def _rank(
        self, query: np.ndarray, raw: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Rerank the candidates for a query.

        Args:
            query: The query, [d].
            raw, rows: The candidates' scores and rows from the index, [b].

        Returns:
            The corrected scores and the rows, best first, and an upper bound for the
            scores of all other targets.
        """
        if not len(rows):
            return raw, rows, np.inf
        if rows.max() >= self._count:
            raise InputError(
                f"the index returned id {rows.max()}, but {self._count} targets were "
                "given: its ids must be 0, 1, 2, ..."
            )
        similarities = raw.astype(np.float64)
        if self._euclidean:
            similarities /= -2
        # Scores by bits are no similarities, so they bound nothing.
        last = np.inf if self._scores_bits else similarities[-1]
        if self._vectors is not None:
            similarities = self._true_similarities(query, rows)
            # Of equal corrected scores, the one with the larger similarity comes first.
            order = np.argsort(-similarities, kind="stable")
            similarities = similarities[order]
            rows = rows[order]
        scores = similarities + self._offsets[rows]
        order = np.argsort(-scores, kind="stable")
        bound = last + float(self._offsets.max())
        return scores[order], rows[order], bound

    def _true_similarities(self, query: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the similarities of `query` [d] to the vectors `rows` [b]: float64."""
        assert self._vectors is not None
        ascending, places = np.unique(rows, return_inverse=True)
        vectors = self._vectors.select(ascending)[places].astype(np.float64)
        if self._euclidean:
            return -((vectors - query) ** 2).sum(axis=1) / 2
        return vectors @ query.astype(np.float64)
