"""Indexes whose codes have no room for an offset: it lies in a second stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.metric import normalise
from hubplugin_faiss.encoding.assemble import in_memory, list_ids
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.layout import Assemble, UpgradeSpec
from hubplugin_faiss.faiss_objects import block_rows, copied, handed_over, name_of
from hubplugin_faiss.handlers.base import IndexHandler
from hubplugin_faiss.handlers.base_index import base_index_handler
from hubplugin_faiss.handlers.coarse_quantizer import ranked_quantizer, replace_quantizer, unranked_quantizer
from hubplugin_faiss.handlers.list_ranking import list_ranks

K_FACTOR = 4
"""How many candidates a stage without offsets passes on for each result.

Of 20,000 code vectors the corrected 10 best were among the raw 40 best in 99.4 % of all cases. A factor of 16 adds at
most 0.002 to the recall of RaBitQ and of additive quantisers, and 0.01 to that of LSH, which exceeds the raw index's as
it is."""


class TwoStageHandler(IndexHandler):
    """Codes that have no room for one more component.

    They find candidates as before, in lists that are ranked by the offsets of their entries. A second stage ranks
    these: it holds what the codes decode to, at unit length for a model for cosine, and the offsets, in 16 bits a
    component. It numbers its entries 0, 1, 2, ..., so the first stage must return these ids.
    """

    names = (
        "IndexLSH",
        "IndexRaBitQ",
        "IndexRaBitQFastScan",
        "IndexIVFRaBitQ",
        "IndexIVFRaBitQFastScan",
        *(
            f"Index{form}Quantizer{fast}"
            for product in ("", "Product")
            for kind in ("Residual", "LocalSearch")
            for form, fast in ((product + kind, ""), (product + kind, "FastScan"), ("IVF" + product + kind, ""))
        ),
    )  # not those that are both IVF and fast-scan: Faiss ends the process when it decodes one that was read back

    @property
    def two_stage(self) -> bool:
        return True

    @property
    def exhaustive(self) -> bool:
        return False

    @property
    def lossy(self) -> bool:
        return True

    def check(self) -> None:
        super().check()
        if isinstance(self.index, faiss.IndexIVF):
            lists = self.index.invlists
            ids = np.concatenate([list_ids(lists, number) for number in range(self.index.nlist)])
            if (np.sort(ids) != np.arange(self.count)).any():
                raise StoreError(
                    f"the ids of this {name_of(self.index)} are not 0 ... {self.count - 1}, and its second stage finds "
                    "entries by no others; keep ids of your own in an IndexIDMap2 over it"
                )

    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        d, metric = self.index.d, self.index.metric_type
        stage = faiss.IndexScalarQuantizer(d, faiss.ScalarQuantizer.QT_fp16, metric)
        given = (
            (vectors for vectors, _ in self.scan(0, block_rows(d))) if spec.vectors is None else spec.vectors.blocks()
        )
        for vectors in given:
            stage.add(normalise(vectors, "index") if spec.unit else vectors)
        # The first transform changes nothing; it marks a second stage that an upgrade has made.
        same = faiss.RemapDimensionsTransform(d, d, False)
        second = base_index_handler(stage).upgraded_behind([same], offsets, replace(spec, assemble=in_memory))
        new = faiss.IndexRefine(base := self.ranked(offsets, spec), second)
        new.own_fields, new.own_refine_index, new.k_factor = handed_over(base), handed_over(second), K_FACTOR
        return new

    def downgraded(self, assemble: Assemble) -> faiss.Index:
        return unranked(self.index)

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        for first in range(start, self.count, size):
            yield self.index.reconstruct_n(first, min(size, self.count - first)), None

    def norm_bias(self, vectors: np.ndarray, unit: bool) -> np.ndarray | None:
        return None  # the second stage does the ranking

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, unit: bool = False) -> None:
        with self._unranked():
            self.index.add(vectors)

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        with self._unranked():
            return np.asarray(self.index.sa_decode(self.index.sa_encode(np.ascontiguousarray(vectors))))

    @contextmanager
    def _unranked(self) -> Iterator[None]:
        """While it is open, the offsets of lists do not decide to which list a vector is added, as in the raw index."""
        if not isinstance(self.index, faiss.IndexIVF):
            yield
            return
        ranked, raw = faiss.downcast_index(self.index.quantizer), unranked_quantizer(self.index.quantizer)
        self.index.quantizer = raw
        try:
            yield
        finally:
            self.index.quantizer = ranked
            raw.this.acquire()  # assigned, it had become the index's

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.arange(start, self.count if stop is None else stop)

    def order(self) -> np.ndarray | slice:
        return slice(None)

    def rounding(self, offsets: np.ndarray) -> float:
        return 0.0

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return []

    def ranked(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        """A copy of the index; a search ranks its lists, if it has any, by the offsets of their entries."""
        new = copied(self.index)
        if isinstance(new, faiss.IndexIVF):
            lists = [list_ids(new.invlists, number) for number in range(new.nlist)]
            starts, apart = np.cumsum([0, *map(len, lists)]), self._spreads(lists, spec) if self.euclidean else None
            ranks = list_ranks(offsets[np.concatenate(lists)], starts, apart)
            replace_quantizer(new, ranked_quantizer(new.quantizer, ranks, spec))
        return new

    def _spreads(self, lists: list[np.ndarray], spec: UpgradeSpec) -> np.ndarray:
        """The mean squared distance of the entries of each list from its centroid: float64 [nlist].

        lists: the ids in each list.
        """
        centres = self.index.quantizer.reconstruct_n(0, self.index.nlist)
        if spec.unit:  # 1 - |c|^2 about their mean, whatever codes make of their distances
            return np.asarray(1 - (centres.astype(np.float64) ** 2).sum(axis=1))
        sums, numbers, first = np.zeros(len(lists)), np.empty(self.count, np.int64), 0
        numbers[np.concatenate(lists)] = np.repeat(np.arange(len(lists)), [len(own) for own in lists])
        for vectors, _ in self.scan(0, block_rows(self.index.d)):
            own = numbers[first : first + len(vectors)]
            sums += np.bincount(own, ((vectors - centres[own]) ** 2).sum(axis=1), minlength=len(lists))
            first += len(vectors)
        return np.asarray(sums / np.maximum([len(own) for own in lists], 1))


def unranked(index: faiss.Index) -> faiss.Index:
    """A copy of a two-stage index; a search ranks its lists by their centroids alone again."""
    new = copied(index)
    if isinstance(new, faiss.IndexIVF):
        replace_quantizer(new, unranked_quantizer(new.quantizer))
    return new
