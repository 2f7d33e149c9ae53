"""Indexes of two stages: candidates from one index, ranked by another; RaBitQ and others without room for an offset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin.metric import normalise
from hubplugin_faiss.encoding.codecs import ExtraDimensions, UpgradeSpec, evenly
from hubplugin_faiss.encoding.layout import (
    Assemble,
    codes_of,
    codes_of_blocks,
    codes_of_list,
    erase_removed,
    in_memory,
    list_ids,
    remove_codes,
)
from hubplugin_faiss.handlers.base import (
    IndexHandler,
    base_index_handler,
    block_rows,
    copied,
    handed_over,
    name_of,
)
from hubplugin_faiss.handlers.lists import (
    READ,
    list_ranks,
    mapped_anew,
    queries_for_ranks,
    ranked_quantizer,
    replace_quantizer,
    unranked_quantizer,
)

FAST = faiss.IndexFastScan, faiss.IndexIVFFastScan

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
    def k_factor(self) -> int:
        """How many candidates the second stage ranks for each result."""
        return K_FACTOR

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
        for vectors in self._held_by_second(spec, block_rows(d)):
            stage.add(vectors)
        # The first transform changes nothing; it marks a second stage that an upgrade has made.
        same = faiss.RemapDimensionsTransform(d, d, False)
        second = base_index_handler(stage).upgraded_behind([same], offsets, replace(spec, assemble=in_memory))
        new = faiss.IndexRefine(base := self.ranked(offsets, spec), second)
        new.own_fields, new.own_refine_index, new.k_factor = handed_over(base), handed_over(second), self.k_factor
        return new

    def downgraded(self, assemble: Assemble) -> faiss.Index:
        return unranked(self.index)

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        for first in range(start, self.count, size):
            yield self.index.reconstruct_n(first, min(size, self.count - first)), None

    def lengths_and_bias(
        self, vectors: np.ndarray, nearness: float | None
    ) -> tuple[np.ndarray | float, np.ndarray | float]:
        return 1.0, 0.0  # the second stage does the ranking

    def require_takes(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        pass

    def append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        with self._unranked():
            if isinstance(self.index, FAST):
                in_lists = isinstance(self.index, faiss.IndexIVF)
                lists = self.index.quantizer.search(vectors, 1)[1] if in_lists else np.empty(0, np.int64)
                erase_removed(self.index, np.unique(lists))
            self.index.add(vectors)

    def remove(self, ids: np.ndarray) -> None:
        if isinstance(self.index, FAST):
            with mapped_anew(self.index) if isinstance(self.index, faiss.IndexIVF) else nullcontext():
                remove_codes(self.index, ids)
        else:
            super().remove(ids)

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

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return []

    def ranked(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        """A copy of the index; a search ranks its lists, if it has any, by the offsets of their entries."""
        new = copied(self.index)
        if isinstance(new, faiss.IndexIVF):
            replace_quantizer(new, ranked_quantizer(new.quantizer, self._ranks(offsets, spec), spec))
        return new

    def _ranks(self, offsets: np.ndarray, spec: UpgradeSpec) -> np.ndarray:
        """`list_ranks` for `offsets` [n] of all entries, by the vectors that the second stage holds."""
        index, numbers, size = self.index, np.empty(self.count, np.int64), min(block_rows(self.index.d), READ)
        for number in range(index.nlist):
            numbers[list_ids(index.invlists, number)] = number

        def entries() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
            first = 0
            for vectors in self._held_by_second(spec, size):
                rows = slice(first, first + len(vectors))
                yield vectors, offsets[rows], numbers[rows]
                first = rows.stop

        def of_index(count: int) -> tuple[np.ndarray, np.ndarray]:
            vectors = next(self._held_by_second(spec, size))
            return evenly(vectors, count), evenly(numbers[: len(vectors)], count)

        asked = queries_for_ranks(spec, index.nlist, of_index)
        return list_ranks(entries(), index.quantizer.reconstruct_n(0, index.nlist), asked, self.euclidean)

    def _held_by_second(self, spec: UpgradeSpec, size: int) -> Iterator[np.ndarray]:
        """Blocks [b, d] of what the second stage holds, b <= size, before it is rounded."""
        given = (vectors for vectors, _ in self.scan(0, size)) if spec.vectors is None else spec.vectors.blocks(size)
        for vectors in given:
            yield normalise(vectors, "index") if spec.unit else vectors


def unranked(index: faiss.Index) -> faiss.Index:
    """A copy of a two-stage index; a search ranks its lists by their centroids alone again."""
    new = copied(index)
    if isinstance(new, faiss.IndexIVF):
        replace_quantizer(new, unranked_quantizer(new.quantizer))
    return new


K_FACTOR_OF_MANY_BITS = 8
"""With 8 bits the raw index finds 0.995 of its 10 best, so that what four candidates for each result leave out shows:
0.012 of recall among 3,700 code vectors, 0.018 with lists. With eight it is as much as the raw index finds."""


class RaBitQHandler(TwoStageHandler):
    """Two stages, of which the second holds what all bits of the codes stand for."""

    names = ("IndexRaBitQ", "IndexRaBitQFastScan", "IndexIVFRaBitQ", "IndexIVFRaBitQFastScan")

    @property
    def k_factor(self) -> int:
        return super().k_factor if self.index.rabitq.nb_bits == 1 else K_FACTOR_OF_MANY_BITS

    def check(self) -> None:
        super().check()
        if self.count:
            codes, lists = self._codes(TRIED)
            self._decoder.check(codes, self._centres(lists))

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        codes, lists = self._codes(self.count)
        for first in range(start, self.count, size):
            own = None if lists is None else lists[first : first + size]
            yield self._decoder.decoded(codes[first : first + size], self._centres(own)), None

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        vectors = np.ascontiguousarray(vectors, np.float32)
        if not isinstance(self.index, faiss.IndexIVF):
            return self._decoder.decoded(self.index.sa_encode(vectors), self._centres(None))
        codes = np.empty((len(vectors), self.index.code_size), np.uint8)
        with self._unranked():
            lists = np.ascontiguousarray(self.index.quantizer.search(vectors, 1)[1].ravel())
            self.index.encode_vectors(len(vectors), *map(faiss.swig_ptr, (vectors, lists, codes)), False)
        return self._decoder.decoded(codes, self._centres(lists))

    @property
    def _decoder(self) -> RaBitQDecoder:
        return RaBitQDecoder(self.index.rabitq, int(self.index.d))

    def _centres(self, lists: np.ndarray | None) -> np.ndarray:
        """The vectors about which the entries of `lists` [b] are coded: float32 [b, d], or [d] without lists."""
        if lists is None:
            return np.asarray(faiss.vector_to_array(self.index.center))
        numbers, places = np.unique(lists, return_inverse=True)
        own = [self.index.quantizer.reconstruct(int(number)) for number in numbers]
        return np.stack(own)[places] if own else np.empty((0, self.index.d), np.float32)

    def _codes(self, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The codes of the first `count` entries, uint8 [count, code_size], and their lists, int64 [count], if any."""
        index, count = self.index, min(count, self.count)
        if not isinstance(index, faiss.IndexIVF):
            of_rows = codes_of_blocks(index, 0, count) if isinstance(index, faiss.IndexFastScan) else codes_of(index)
            return of_rows[:count], None
        codes, lists = np.empty((count, index.code_size), np.uint8), np.empty(count, np.int64)
        for number in range(index.nlist):
            ids = list_ids(index.invlists, number)
            wanted = ids < count
            if wanted.any():
                codes[ids[wanted]] = self._codes_of_list(number)[wanted]
                lists[ids[wanted]] = number
        return codes, lists

    def _codes_of_list(self, number: int) -> np.ndarray:
        """uint8 [b, code_size]."""
        lists = self.index.invlists
        size = int(lists.list_size(number))
        if isinstance(self.index, faiss.IndexIVFFastScan):
            return codes_of_list(self.index, number, 0, size)
        memory: np.ndarray = faiss.rev_swig_ptr(lists.get_codes(number), size * lists.code_size)
        return memory.reshape(size, lists.code_size)


TRIED, AGREES = 16, 1e-3
"""So many codes are decoded and compared with the scores that Faiss gives them, to within this share of these."""


@dataclass(frozen=True)
class RaBitQDecoder:
    """Decodes codes of `quantizer`, the RaBitQuantizer of an index of d dimensions.

    A code holds the sign of each component of the residual r = t - c, about the centre c, and with b > 1 bits another
    b - 1 of its size: a number u in 0 ... 2^b - 1 for each component. The residual is read off as f (u - 2^(b-1) + 1/2)
    with the factor f of the code, so that its product with r is |r|^2. It is therefore longer than r, by some 25 % with
    one bit. Under L2 that would push targets away from every query, the more the further they lie from their centre.
    There codes hold |r|^2 as well, and the residual gets its length back; under inner product they do not.
    """

    quantizer: faiss.RaBitQuantizer
    d: int

    def decoded(self, codes: np.ndarray, centres: np.ndarray) -> np.ndarray:
        """The vectors that `codes` [n, code_size] stand for, about `centres` [n, d] or [d]: float32 [n, d]."""
        residuals, squares = self._residuals(codes)
        if squares is not None:
            lengths = np.sqrt(np.maximum(squares, 0)) / np.maximum(np.linalg.norm(residuals, axis=1), 1e-30)
            residuals = residuals * lengths[:, None].astype(np.float32)
        return np.asarray(residuals + centres, np.float32)

    def check(self, codes: np.ndarray, centres: np.ndarray) -> None:
        """Raises StoreError if the scores that Faiss computes from `codes` [n, code_size] are others than those of the
        residuals that are read off them: then another version of Faiss made them."""
        codes, centres = codes[:TRIED], np.ascontiguousarray(np.broadcast_to(centres, (len(codes), self.d))[:TRIED])
        residuals = self._residuals(codes)[0].astype(np.float64)
        rng = np.random.default_rng(0)
        for code, centre, residual in zip(codes, centres, residuals, strict=True):
            computer = self.quantizer.get_distance_computer(0, faiss.swig_ptr(centre), False)
            away = 4 * np.linalg.norm(residual) * rng.normal(size=(2, self.d)) / np.sqrt(self.d)
            queries, scores = np.ascontiguousarray(centre + away, np.float32), []
            for query in queries:
                computer.set_query(faiss.swig_ptr(query))
                score = computer.distance_to_code(faiss.swig_ptr(code))
                euclidean = self.quantizer.metric_type == faiss.METRIC_L2
                scores.append((((query - centre) ** 2).sum() - score) / 2 if euclidean else score - query @ centre)
            of_residual = (queries - centre) @ residual
            scale = np.abs(of_residual).max() + np.linalg.norm(residual) ** 2 + 1e-30
            if abs(np.diff(scores)[0] - np.diff(of_residual)[0]) > AGREES * scale:
                raise StoreError(
                    "this version of Faiss lays out the codes of RaBitQ in another way than is known, so they cannot "
                    "be decoded; use faiss-cpu 1.15, or another type of index"
                )

    def _residuals(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Residuals [n, d], float32, and where the codes hold them the squared lengths [n] that they should have."""
        more, euclidean = int(self.quantizer.nb_bits) - 1, self.quantizer.metric_type == faiss.METRIC_L2
        size = (self.d + 7) // 8
        signs = _unpacked(codes[:, :size], 1, self.d)
        if more == 0:  # signs, |r|^2 under L2, factor
            factors = _floats(codes[:, size : size + 8])
            residuals = (signs - np.float32(0.5)) * (factors[:, 1:] * np.float32(2 / np.sqrt(self.d)))
        else:  # signs, three floats of the one bit, the other bits, |r|^2 under L2, factor
            first = size + 12
            last = first + (self.d * more + 7) // 8
            factors = _floats(codes[:, last : last + 8])
            levels = signs * 2**more + _unpacked(codes[:, first:last], more, self.d)
            scale = factors[:, 1:] / np.float32(-2 if euclidean else 1)
            residuals = (levels - np.float32(2**more - 0.5)) * scale
        return residuals, factors[:, 0] if euclidean else None


def _unpacked(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """The first `count` numbers of `width` bits in each row of `packed`, the lowest bit first: float32 [n, count]."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")[:, : width * count].reshape(len(packed), count, width)
    numbers = np.zeros((len(packed), count), np.float32)
    for place in range(width):
        numbers += bits[:, :, place] * np.float32(2**place)
    return numbers


def _floats(memory: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(memory).view(np.float32)
