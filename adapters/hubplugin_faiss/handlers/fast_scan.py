"""PQ indexes whose codes lie in the blocks that Faiss scans fast, with and without inverted lists."""

from __future__ import annotations

from functools import cached_property

import faiss
import numpy as np

from hubplugin_faiss.encoding.assemble import list_ids, runs
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.fast_scan_codes import pack, unpacked
from hubplugin_faiss.faiss_objects import copy_fields, handed_over
from hubplugin_faiss.handlers.flat import FlatCodesHandler
from hubplugin_faiss.handlers.inverted_lists import InvertedListsHandler, mapped_anew


class FastScanHandler(FlatCodesHandler):
    """Codes of 4 bits in the order in which Faiss scans them fast, unpacked as they are read."""

    names = ("IndexPQFastScan",)

    def _codes(self, start: int, stop: int) -> np.ndarray:
        return unpacked(self.index.get_CodePacker(), self.index.codes.data(), start, stop, self.index.pq.code_size)

    def _empty(self, d: int) -> faiss.Index:
        old = self.index
        new = faiss.IndexPQFastScan(d, d // old.pq.dsub, 4, old.metric_type, old.bbs)
        copy_fields(new, old, "implem", "skip", "qbs")
        return new


class FastScanListsHandler(InvertedListsHandler):
    """Codes of 4 bits in inverted lists, in the order in which Faiss scans them fast."""

    names = ("IndexIVFPQFastScan",)

    def append_extended(
        self, d: int, extra: ExtraDimensions, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        ids = self._ids_to_add(ids, len(vectors))
        nearest, extended = self._placed(d, extra, vectors, offsets)
        order = np.argsort(nearest, kind="stable")
        codes = self._encode(extended, nearest)[order]
        with mapped_anew(self.index):
            for run in runs(nearest[order], ids[order], codes):
                self._extend(*run)
            self.index.ntotal += len(vectors)

    def _extend(self, number: int, ids: np.ndarray, codes: np.ndarray) -> None:
        lists = faiss.downcast_InvertedLists(self.index.invlists)
        old = lists.list_size(number)
        lists.resize(number, old + len(ids))
        list_ids(lists, number)[old:] = ids
        pack(lists.packer, codes, lists.get_codes(number), old, old + len(ids))

    def _codes(self, number: int, start: int, stop: int) -> np.ndarray:
        lists = faiss.downcast_InvertedLists(self.index.invlists)
        return unpacked(lists.packer, lists.get_codes(number), start, stop, self.index.pq.code_size)

    def _decode(self, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        vectors = self.index.pq.decode(codes)
        if self.index.by_residual:
            vectors += self._centres[numbers]
        return np.asarray(vectors)

    @cached_property
    def _centres(self) -> np.ndarray:
        return np.asarray(self.index.quantizer.reconstruct_n(0, self.index.nlist))

    def _empty(self, d: int, quantizer: faiss.Index) -> faiss.Index:
        old = self.index
        new = faiss.IndexIVFPQFastScan(quantizer, d, old.nlist, d // old.pq.dsub, 4, old.metric_type, old.bbs)
        new.own_fields = handed_over(quantizer)
        copy_fields(new, old, "nprobe", "max_codes", "parallel_mode", "by_residual", "quantizer_trains_alone")
        copy_fields(new, old, "implem", "skip", "qbs", "qbs2")
        return new
