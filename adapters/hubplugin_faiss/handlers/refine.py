"""Refined indexes: candidates of a first stage, ranked by a second, and the first one's share of the offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TypeAlias

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import ExtraDimensions, UpgradeSpec, evenly
from hubplugin_faiss.encoding.layout import Assemble
from hubplugin_faiss.handlers.base import (
    IndexHandler,
    IndexScale,
    block_rows,
    copy_fields,
    handed_over,
    handler_for,
    name_of,
)
from hubplugin_faiss.handlers.lists import READ, similarities
from hubplugin_faiss.handlers.wrappers import close_up

SHRUNK, RUNS = 512, 16
"""From how many entries the slope of codes is taken, in how many runs. On six settings 256 to 2,048 give the same slope
to 0.01."""

SHARED, NEAREST = 100, 40
"""How many queries of the bank, and how many of the best targets of each, say which share of the offsets the first
stage gets. Farther targets say less of what is found: by the 400 best it would be 0 across languages."""

Scanned: TypeAlias = tuple[np.ndarray, np.ndarray | None]
"""Vectors [b, d], and their offsets [b] if the index is upgraded."""


class RefineHandler(IndexHandler):
    """Candidates from a base index, ranked by a second stage. Entries are in the order of the latter, that of ids."""

    names = ("IndexRefine", "IndexRefineFlat")

    def check(self) -> None:
        super().check()
        self._base.check()
        self._second.check()

    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        second = self._second.upgraded(offsets, spec)
        labels = self._base.labels()
        first, of_second = self._scales(spec.nearness)
        of_model = of_entries(self._second, of_second.of_model, offsets)
        share = self._slope_of_codes if spec.queries is None else self._share(first, offsets, of_model, spec.queries)
        of_base = of_entries(self._base, first.unbiased, share * of_model[labels])
        return self._of(self._base.upgraded(of_base, spec.covering(of_base)), second)

    def downgraded(self, assemble: Assemble) -> faiss.Index:
        return self._of(self._base.downgraded(assemble), self._second.downgraded(assemble))

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        return self._second.scan(start, size)

    def require_takes(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        if ids is not None:
            raise StoreError(f"{name_of(self.index)} numbers its entries itself; add without ids")
        self._second.require_takes(vectors, offsets, None, nearness)
        self._base.require_takes(vectors, self._offsets_of_base(vectors, offsets, nearness), None, nearness)

    def append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, nearness: float | None = None
    ) -> None:
        of_base = self._offsets_of_base(vectors, offsets, nearness)
        self._second.append(vectors, offsets, None, nearness)
        self._base.append(vectors, of_base, None, nearness)
        self.index.ntotal = self.index.refine_index.ntotal

    def _offsets_of_base(self, vectors: np.ndarray, offsets: np.ndarray, nearness: float | None) -> np.ndarray:
        """The offsets [n] in the base index, where the second stage holds `offsets` [n] with `vectors` [n, d]."""
        first, second = self._scales(nearness)
        share, rest = self._share_held(first, second)
        shrunk = share * second.of_model(offsets, self._second.coded(vectors)) + rest
        return first.unbiased(shrunk, self._base.coded(vectors))

    def _scales(self, nearness: float | None) -> tuple[IndexScale, IndexScale]:
        """Of both stages. That of the first takes the norm bias off alone: lengths are part of its share of offsets."""
        return IndexScale(self._base, nearness), IndexScale(self._second, nearness)

    def remove(self, ids: np.ndarray) -> None:
        """Removes entries and closes up the ids of the others, since the second stage finds entries by their row."""
        self._base.remove(ids)
        self._second.remove(ids)
        close_up(self._base, np.unique(ids))
        self.index.ntotal = self.index.refine_index.ntotal

    def coded(self, vectors: np.ndarray) -> np.ndarray:
        return self._second.coded(vectors)

    def lengths_and_bias(
        self, vectors: np.ndarray, nearness: float | None
    ) -> tuple[np.ndarray | float, np.ndarray | float]:
        return self._second.lengths_and_bias(vectors, nearness)

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._second.labels(start, stop)

    def order(self) -> np.ndarray | slice:
        return self._second.order()

    def rounded(
        self, offsets: np.ndarray, rows: np.ndarray | None = None, vectors: np.ndarray | None = None
    ) -> np.ndarray:
        return self._second.rounded(offsets, rows, vectors)

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return self._base.extra_dimensions() + self._second.extra_dimensions()

    def files(self) -> list[str]:
        return self._base.files()

    @cached_property
    def _base(self) -> IndexHandler:
        return handler_for(self.index.base_index)

    @cached_property
    def _slope_of_codes(self) -> float:
        """The slope of what the first stage decodes on what the second holds, each less its mean: by so much codes
        shrink similarities, and offsets that are not shrunk as well push right answers out of the candidates."""
        coded, held = ([vectors for vectors, _ in stage] for stage in zip(*self._pairs(), strict=True))
        true, decoded = (np.concatenate(part) if part else np.zeros((1, 1)) for part in (held, coded))
        true, decoded = true - true.mean(axis=0), decoded - decoded.mean(axis=0)
        spread = float((true**2).sum())
        return float((true * decoded).sum()) / spread if spread else 1.0

    def _share_held(self, first: IndexScale, second: IndexScale) -> tuple[float, float]:
        """The share of the second stage's offsets that the first stage of an upgraded index has, and what they have
        beside it: the means of the norm bias are those of the upgrade, not of today's entries."""
        of_first, of_second = [], []
        for (coded, shrunk), (held, offsets) in self._pairs():
            assert shrunk is not None
            assert offsets is not None
            of_first.append(shrunk - first.unbiased(np.zeros(len(shrunk)), coded))
            of_second.append(second.of_model(offsets, held))
        x, y = (np.concatenate(part) if part else np.zeros(1) for part in (of_second, of_first))
        spread = float(((x - x.mean()) ** 2).sum())
        share = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread else 1.0
        return share, float(y.mean() - share * x.mean())

    def _pairs(self) -> Iterator[tuple[Scanned, Scanned]]:
        """What both stages hold of the same entries, in some runs."""
        length = min(self._base.count, SHRUNK // RUNS)
        for start in sorted({*map(int, np.linspace(0, self._base.count - length, RUNS))}) if length else ():
            coded, offsets = next(iter(self._base.scan(start, length)))
            labels = self._base.labels(start, start + len(coded[:length]))
            held = [next(iter(self._second.scan(int(label), 1))) for label in labels]
            vectors = np.concatenate([vector for vector, _ in held])
            own = [offset for _, offset in held if offset is not None]
            yield (
                (coded[:length], None if offsets is None else offsets[:length]),
                (vectors, np.concatenate(own) if own else None),
            )

    def _share(self, first: IndexScale, stored: np.ndarray, offsets: np.ndarray, queries: np.ndarray) -> float:
        """The share of `offsets` [n] that the first stage gets, 0 to 1, both in the order of ids; the second has
        `stored` [n] of them.

        Among the best targets of each of `queries` [m, d], the score that the second stage gives is predicted by the
        decoded similarity and the offset, by least squares. Codes shrink what sets a right answer apart, by far more
        where vectors lie close together: a share of 0.5 is best for text to code, of 0.1 to 0.3 across languages.
        """
        queries, euclidean = evenly(queries, SHARED), self.euclidean
        scores: np.ndarray = np.empty((len(queries), 0), np.float32)
        best: np.ndarray = np.empty((len(queries), 0), np.int64)
        row, size, known = 0, block_rows(self.index.d), {}
        for vectors, _ in self._second.scan(0, min(size, READ)):
            rows = np.arange(row, row + len(vectors))
            scores = np.concatenate([scores, similarities(queries, vectors, euclidean) + stored[rows]], axis=1)
            best = np.concatenate([best, np.broadcast_to(rows, (len(queries), len(rows)))], axis=1)
            kept = np.argpartition(-scores, min(NEAREST, scores.shape[1]) - 1, axis=1)[:, :NEAREST]
            scores, best = (np.take_along_axis(each, kept, axis=1) for each in (scores, best))
            row += len(rows)
        wanted, start = np.unique(best), 0
        for vectors, _ in self._base.scan(0, size):
            labels = self._base.labels(start, start + len(vectors))
            for place in np.flatnonzero(np.isin(labels, wanted)):
                known[int(labels[place])] = vectors[place]
            start += len(labels)
        decoded = np.stack([known[int(label)] for label in wanted])
        of_codes = similarities(queries, decoded, euclidean) + first.unbiased(np.zeros(len(wanted)), decoded)
        of_codes = np.take_along_axis(of_codes, np.searchsorted(wanted, best), axis=1)
        sides = [each - each.mean(axis=1, keepdims=True) for each in (of_codes, offsets[best], scores)]
        codes, own, goal = (each.ravel().astype(np.float64) for each in sides)
        (by_codes, by_offset), *_ = np.linalg.lstsq(np.stack([codes, own], axis=1), goal, rcond=None)
        return float(np.clip(by_offset / by_codes, 0, 1)) if by_codes > 0 else self._slope_of_codes

    @property
    def lossy(self) -> bool:
        return self._second.lossy

    @property
    def lossy_inside(self) -> bool:
        return self.lossy or self._base.lossy_inside

    @property
    def exhaustive(self) -> bool:
        return False

    @cached_property
    def _second(self) -> IndexHandler:
        return handler_for(self.index.refine_index)

    def _of(self, base: faiss.Index, second: faiss.Index) -> faiss.Index:
        new = faiss.IndexRefine(base, second)
        new.own_fields, new.own_refine_index = handed_over(base), handed_over(second)
        copy_fields(new, self.index, "k_factor")
        return new


def of_entries(
    handler: IndexHandler, how: Callable[[np.ndarray, np.ndarray], np.ndarray], offsets: np.ndarray
) -> np.ndarray:
    """What `how`, a method of an `IndexScale`, gives for `offsets` [n] of all entries in scan order: float32 [n]."""
    values, row = np.empty(handler.count, np.float32), 0
    for vectors, _ in handler.scan(0, block_rows(handler.index.d)):
        rows = slice(row, row + len(vectors))
        values[rows] = how(offsets[rows], vectors)
        row = rows.stop
    return values
