"""Indexes around others: ids of the user, transforms, and a second stage that ranks candidates again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codecs import ExtraDimensions, UpgradeSpec
from hubplugin_faiss.handlers.base import (
    RUNS,
    IndexHandler,
    block_rows,
    copy_fields,
    hand_over,
    handler_for,
    is_mapped,
    name_of,
    nearness_of,
    pretransform,
)
from hubplugin_faiss.handlers.codes import (
    BaseIndexHandler,
    base_index_handler,
    with_query,
)


class WrapperHandler(IndexHandler):
    """An index around one other. Its handler passes on to that of the inner index what it does not do itself."""

    def __init__(self, index: faiss.Index, inner: IndexHandler | None = None):
        super().__init__(index)
        if inner is None and is_mapped(index.index):
            raise StoreError(
                f"a query map stands within this {name_of(index)}, where it would be lost; put it around "
                "index = hubplugin_faiss.downgrade(index), and upgrade that"
            )
        self._inner = handler_for(index.index) if inner is None else inner
        self.exhaustive, self.lossy = self._inner.exhaustive, self._inner.lossy

    def check(self) -> None:
        super().check()
        self._inner.check()

    def scan(
        self, start: int, size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        return self._inner.scan(start, size)

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._inner.labels(start, stop)

    def order(self) -> np.ndarray | slice:
        return self._inner.order()

    def round_offsets(
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray | None = None
    ) -> np.ndarray:
        return self._inner.round_offsets(offsets, vectors, rows)

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return self._inner.extra_dimensions()

    def quantise(
        self, vectors: np.ndarray, *, by_plain_faiss: bool = False
    ) -> np.ndarray:
        return self._inner.quantise(vectors, by_plain_faiss=by_plain_faiss)

    def require_removes(self, *, renumbered: bool = False) -> None:
        self._inner.require_removes(renumbered=renumbered)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        self._inner.remove(ids, renumbered=renumbered)
        self.index.ntotal = self.index.index.ntotal


class IdMapHandler(WrapperHandler):
    """Ids of the user over an index that numbers its entries itself."""

    names = ("IndexIDMap", "IndexIDMap2")

    def check(self) -> None:
        super().check()
        self.labels()

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        return id_map_like(self.index, self._inner.upgrade(offsets, spec))

    def downgrade(self) -> faiss.Index:
        return id_map_like(self.index, self._inner.downgrade())

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        if ids is None:
            raise StoreError(
                f"{name_of(self.index)} has ids of its own: pass ids= with the vectors"
            )
        append, all_ids = (
            self._inner.plan_append(vectors, offsets, None),
            np.concatenate([self._ids, ids]),
        )

        def append_with_ids() -> None:
            append()
            set_ids(self.index, all_ids)

        return append_with_ids

    def require_removes(self, *, renumbered: bool = False) -> None:
        self._inner.require_removes(renumbered=True)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        all_ids = self._ids
        is_removed = np.isin(all_ids, ids)
        self._inner.remove(np.flatnonzero(is_removed), renumbered=True)
        set_ids(self.index, all_ids[~is_removed])

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        rows, ids = self._inner.labels(start, stop), self._ids
        if len(rows) and rows.max() >= len(ids):
            raise StoreError(
                f"this {name_of(self.index)} has lost which entry has which id, as Faiss's own remove_ids over "
                "inverted lists does; build it anew, and use hubplugin_faiss.remove_ids"
            )
        return np.asarray(ids[rows])

    @property
    def _ids(self) -> np.ndarray:
        return np.asarray(faiss.vector_to_array(self.index.id_map))


def set_ids(index: faiss.IndexIDMap, ids: np.ndarray) -> None:
    """What lies in `index` has entries with these `ids` now."""
    faiss.copy_array_to_vector(ids, index.id_map)
    index.ntotal = index.index.ntotal
    if isinstance(index, faiss.IndexIDMap2):
        index.construct_rev_map()


def id_map_like(index: faiss.IndexIDMap, part: faiss.Index) -> faiss.Index:
    """An index like `index`, with the same ids, over `part`, which it takes over."""
    part.ntotal = 0  # Faiss puts ids only over what looks empty
    new = type(index)(part)
    new.own_fields = hand_over(part)
    part.ntotal = index.ntotal
    copy_fields(new, index)
    set_ids(new, faiss.vector_to_array(index.id_map))
    return new


class ExtendedHandler(WrapperHandler):
    """An upgraded base index, behind the transforms that append its extra dimensions."""

    _inner: BaseIndexHandler

    def __init__(self, index: faiss.IndexPreTransform, extra: ExtraDimensions):
        super().__init__(index, base_index_handler(index.index))
        self._extra = extra

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        return handler_for(self.downgrade()).upgrade(offsets, spec)

    def downgrade(self) -> faiss.Index:
        return self._inner.narrow(
            int(self.index.index.d) - self._extra.width, self._extra
        )

    def scan(
        self, start: int, size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        for extended in self._inner.decode(start, size):
            vectors, components = np.split(extended, [-self._extra.width], axis=1)
            yield vectors, self._extra.offsets(components)

    def quantise(
        self, vectors: np.ndarray, *, by_plain_faiss: bool = False
    ) -> np.ndarray:
        extended = with_query(vectors, self._extra.query)
        quantised = self._inner.quantise(
            extended, by_plain_faiss=by_plain_faiss, extra=self._extra
        )
        return quantised[:, : vectors.shape[1]]

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        """As of every index, for `vectors`, `offsets` [n] and `ids`, as far as codes do not lose too much of the
        offsets."""
        self._inner.require_takes(vectors, ids)
        if (
            len(offsets)
            and np.abs(self.round_offsets(offsets, vectors) - offsets).max()
            > self.most_lost()
        ):
            raise StoreError(
                f"offsets from {offsets.min():.4g} to {offsets.max():.4g} find no room in the codes of this "
                f"{name_of(self._inner.index)}, which were made for others: replace all, index = upgrade(index, model)"
            )
        return lambda: self._inner.append(self._extra, vectors, offsets, ids)

    def round_offsets(
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray | None = None
    ) -> np.ndarray:
        bases = self._inner.bases(self._extra, vectors, rows)
        return self._extra.offsets(
            self._inner.coder(self._extra).components_for(offsets, bases)
        )

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return [self._extra]


class PreTransformHandler(WrapperHandler):
    """Transforms before an inner index. Those that append extra dimensions to a base index are left to its
    `ExtendedHandler`.

    Under inner product transforms x -> A x + b, such as a PCA, rank by (A q + b).(A t + b), so that the raw index adds
    b.(A t + b) to the similarity of each target, up to a constant. No model knows of this norm bias, which is about 0
    in the mean. It may outweigh all offsets, so that an index holds those of a model less their norm bias.
    """

    names = ("IndexPreTransform",)
    AFFINE = (
        faiss.LinearTransform,
        faiss.RemapDimensionsTransform,
        faiss.CenteringTransform,
    )

    def __init__(self, index: faiss.IndexPreTransform):
        links = [
            faiss.downcast_VectorTransform(index.chain.at(number))
            for number in range(index.chain.size())
        ]
        if links and appends_by_linear(links[-1]):
            raise StoreError(
                "this copy was made for a GPU, for searches alone; use the index that for_gpu was given"
            )
        extra = extra_dimensions_of(links, index.metric_type == faiss.METRIC_L2)
        super().__init__(
            index, None if extra is None else ExtendedHandler(index, extra)
        )
        self._links = links if extra is None else links[:-2]
        self._width = int(self._links[-1].d_out if self._links else index.d)
        self.lossy |= any(link.d_out < link.d_in for link in self._links)

    def check(self) -> None:
        self._reverse(np.zeros((1, self._width), np.float32))
        super().check()

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        if spec.queries is not None:
            spec = replace(spec, queries=self._transform(spec.queries))
        if spec.fingerprint and self._shift is not None:
            bias = [
                self._norm_bias(inner)
                for inner, _ in self._inner.scan(0, block_rows(self.index.d))
            ]
            offsets = (offsets - np.concatenate(bias)).astype(np.float32)
            spec = spec.cover(offsets)
        return pretransform(
            copy_chain(self.index),
            self._inner.upgrade(offsets, spec),
            one=isinstance(self._inner, BaseIndexHandler),
        )

    def downgrade(self) -> faiss.Index:
        chain, inner = (
            copy_chain(self.index)[: len(self._links)],
            self._inner.downgrade(),
        )
        return (
            pretransform(chain, inner)
            if chain or not isinstance(self._inner, ExtendedHandler)
            else inner
        )

    def scan(
        self, start: int, size: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        for inner, offsets in self._inner.scan(start, size):
            yield (
                self._reverse(inner),
                None
                if offsets is None
                else np.float32(offsets + self._norm_bias(inner)),
            )

    def quantise(
        self, vectors: np.ndarray, *, by_plain_faiss: bool = False
    ) -> np.ndarray:
        return self._reverse(
            self._inner.quantise(
                self._transform(vectors), by_plain_faiss=by_plain_faiss
            )
        )

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        inner = self._transform(vectors)
        append = self._inner.plan_append(
            inner, offsets - self._norm_bias(self._inner.quantise(inner)), ids
        )

        def append_and_count() -> None:
            append()
            self.index.ntotal = self.index.index.ntotal

        return append_and_count

    def round_offsets(
        self, offsets: np.ndarray, vectors: np.ndarray, rows: np.ndarray | None = None
    ) -> np.ndarray:
        inner = self._transform(vectors)
        bias = self._norm_bias(self._inner.quantise(inner) if rows is None else inner)
        return self._inner.round_offsets(offsets - bias, inner, rows) + bias

    @cached_property
    def _shift(self) -> np.ndarray | None:
        """The b of transforms x -> A x + b under inner product: float64; None where there is none."""
        affine = itertools.dropwhile(
            lambda link: isinstance(link, faiss.NormalizationTransform), self._links
        )
        if self.euclidean or not all(isinstance(link, self.AFFINE) for link in affine):
            return None
        shift = self._transform(np.zeros((1, self.index.d)))[0].astype(np.float64)
        return shift if shift.any() else None

    def _norm_bias(self, inner: np.ndarray) -> np.ndarray | float:
        """That of transformed vectors `inner` [b, d]: [b]. Offsets that were given as numbers stay as they are."""
        return (
            0.0
            if self._shift is None or self.holds_offsets_of("")
            else np.asarray(inner @ self._shift)
        )

    def _transform(self, vectors: np.ndarray) -> np.ndarray:
        """`vectors` [b, d] behind all transforms but those that append extra dimensions."""
        for link in self._links:
            vectors = link.apply(np.ascontiguousarray(vectors, np.float32))
        return vectors

    def _reverse(self, inner: np.ndarray) -> np.ndarray:
        """The vectors [b, d] that the transforms map to about `inner`."""
        vectors = np.ascontiguousarray(inner, np.float32)
        for link in reversed(self._links):
            try:
                vectors = link.reverse_transform(vectors)
            except RuntimeError:
                raise StoreError(
                    f"the {type(link).__name__} before this {name_of(self.index.index)} cannot be turned back, so "
                    "that its vectors cannot be read; it cannot be upgraded"
                ) from None
        return vectors


def copy_chain(index: faiss.IndexPreTransform) -> list[faiss.VectorTransform]:
    """Copies of the transforms of `index`, made through Faiss's writer: its cloner knows few of them."""
    chain = []
    for number in range(index.chain.size()):
        writer, reader = faiss.VectorIOWriter(), faiss.VectorIOReader()
        faiss.write_VectorTransform(index.chain.at(number), writer)
        faiss.copy_array_to_vector(faiss.vector_to_array(writer.data), reader.data)
        chain.append(faiss.read_VectorTransform(reader))
    return chain


SOME = 512
"""From how many entries the share is taken. On six settings 256 to 2,048 give the same to 0.01."""


class RefineHandler(WrapperHandler):
    """Candidates from a base index, ranked by a second stage, the inner index. Entries are in the order of the latter,
    that of ids.

    Codes of the first stage shrink similarities, by `slope`, and change lengths. So for a target with the offset o,
    which it decodes as t and the second stage as u, it holds

        share o - nearness (|t| - slope |u|), and by L2 (|t|^2 - slope |u|^2) / 2 more,

    with the square of the slope as share: what sets a right answer apart is shrunk by more than the slope. On six
    settings (text to code twice, packages, commands, languages, images) that is within 0.2 points of R@1 of the share
    by which decoded similarity and offset predict the scores of the second stage best. Offsets as they are cost a
    coarse first stage up to 3 points of R@10.
    """

    names = ("IndexRefine", "IndexRefineFlat")

    def __init__(self, index: faiss.IndexRefine):
        super().__init__(index, handler_for(index.refine_index))
        self._base, self.exhaustive = handler_for(index.base_index), False

    def check(self) -> None:
        super().check()
        self._base.check()

    def upgrade(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        blocks = self._inner.scan(0, block_rows(self.index.d))
        of_second = np.concatenate(
            [np.linalg.norm(vectors, axis=1) for vectors, _ in blocks]
        )
        first, second, *_ = self._sample_stages()
        shrunk = slope(second, first)
        nearness = (
            0.0
            if spec.queries is None
            else nearness_of(spec.queries, first, len(offsets))
        )
        labels, of_base, row = (
            self._base.labels(),
            np.empty(len(offsets), np.float32),
            0,
        )
        for vectors, _ in self._base.scan(0, block_rows(self.index.d)):
            ids = labels[row : row + len(vectors)]
            longer, bias = self._lengths(
                np.linalg.norm(vectors, axis=1), of_second[ids], shrunk
            )
            of_base[row : row + len(ids)] = (
                shrunk**2 * offsets[ids] - nearness * longer + bias
            )
            row += len(ids)
        # Less the same for all: codes of few bits would spend theirs on it.
        of_base -= np.float32(of_base.mean(dtype=np.float64)) if len(of_base) else 0
        second_stage = self._inner.upgrade(offsets, spec)
        return self._of(self._base.upgrade(of_base, spec.cover(of_base)), second_stage)

    def downgrade(self) -> faiss.Index:
        return self._of(self._base.downgrade(), self._inner.downgrade())

    def plan_append(
        self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> Callable[[], None]:
        if ids is not None:
            raise StoreError(
                f"{name_of(self.index)} numbers its entries itself; add without ids"
            )
        second = self._inner.plan_append(vectors, offsets, None)
        first = self._base.plan_append(
            vectors, self._offsets_of_base(vectors, offsets), None
        )

        def append() -> None:
            second()
            first()
            self.index.ntotal = self.index.refine_index.ntotal

        return append

    def require_removes(self, *, renumbered: bool = False) -> None:
        for stage in (self._base, self._inner):
            stage.require_removes(renumbered=True)

    def remove(self, ids: np.ndarray, *, renumbered: bool = False) -> None:
        """Removes `ids` and closes up the others, `renumbered` or not, since the second stage finds entries by their
        row."""
        for stage in (self._base, self._inner):
            stage.remove(ids, renumbered=True)
        self.index.ntotal = self.index.refine_index.ntotal

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return self._base.extra_dimensions() + self._inner.extra_dimensions()

    def _offsets_of_base(self, vectors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The offsets [n] in the base index of `vectors` [n, d] with `offsets` [n]: as those of its entries go by
        theirs and by lengths, which the upgrade has settled, whatever is added."""
        first, second, of_first, of_second = self._sample_stages()
        if not len(first):
            return offsets
        shrunk = slope(second, first)

        def lengths(
            first: np.ndarray, second: np.ndarray
        ) -> tuple[np.ndarray, np.ndarray | float]:
            return self._lengths(
                np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1), shrunk
            )

        longer, bias = lengths(first, second)
        columns = np.stack([of_second, longer, np.ones(len(first))], axis=1)
        shares = np.linalg.lstsq(columns, of_first - bias, rcond=1e-6)[0]
        longer, bias = lengths(
            self._base.quantise(vectors), self._inner.quantise(vectors)
        )
        return np.asarray(
            np.stack([offsets, longer, np.ones(len(vectors))], axis=1) @ shares + bias,
            np.float32,
        )

    def _lengths(
        self, of_first: np.ndarray, of_second: np.ndarray, shrunk: float
    ) -> tuple[np.ndarray, np.ndarray | float]:
        """By how much what the first stage decodes is longer [n] than it is taken for, and what that costs by L2."""
        return of_first - shrunk * of_second, (
            of_first**2 - shrunk * of_second**2
        ) / 2 if self.euclidean else 0.0

    def _sample_stages(self) -> tuple[np.ndarray, ...]:
        """What the first and the second stage decode of some entries [n, d], in runs that begin evenly, and their
        offsets [n] in each, NaN where there are none."""
        length = min(self._base.count, SOME // RUNS)
        starts = (
            np.unique(
                np.linspace(0, self._base.count - length, RUNS).astype(np.int64)
            ).tolist()
            if length
            else []
        )
        labels = [
            label
            for start in starts
            for label in self._base.labels(start, start + length).tolist()
        ]
        of_first = [next(self._base.scan(start, length)) for start in starts]
        parts = []
        for blocks in (
            of_first,
            [next(self._inner.scan(label, 1)) for label in labels],
        ):
            parts.append(
                np.concatenate(
                    [
                        np.empty((0, int(self.index.d))),
                        *(vectors for vectors, _ in blocks),
                    ]
                )
            )
            nan = [
                np.full(len(vectors), np.nan) if offsets is None else offsets
                for vectors, offsets in blocks
            ]
            parts.append(np.concatenate([np.empty(0), *nan]))
        finite = np.isfinite(parts[0]).all(axis=1) & np.isfinite(parts[2]).all(axis=1)
        first, of_first, second, of_second = (part[finite] for part in parts)
        return first, second, of_first, of_second

    def _of(self, base: faiss.Index, second: faiss.Index) -> faiss.Index:
        new = faiss.IndexRefine(base, second)
        new.own_fields, new.own_refine_index = hand_over(base), hand_over(second)
        copy_fields(new, self.index, "k_factor")
        return new


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """The slope of `y` on `x`, both [n, d], each less its mean; 1 where `x` does not vary."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    spread = float((x**2).sum())
    return float((x * y).sum()) / spread if spread else 1.0


def extra_dimensions_of(
    links: list[faiss.VectorTransform], euclidean: bool
) -> ExtraDimensions | None:
    """The extra dimensions that a chain of `links` appends, of an index that is `euclidean` or not; None if it does not
    end in the two transforms that do so."""
    remap, centring = links[-2:] if len(links) > 1 else (None, None)
    if not isinstance(remap, faiss.RemapDimensionsTransform) or not isinstance(
        centring, faiss.CenteringTransform
    ):
        return None
    d, mapped, mean = (
        remap.d_in,
        faiss.vector_to_array(remap.map),
        faiss.vector_to_array(centring.mean),
    )
    if (
        remap.d_out <= d
        or (mapped[:d] != np.arange(d)).any()
        or (mapped[d:] >= 0).any()
        or mean[:d].any()
    ):
        return None
    return ExtraDimensions(-mean[d:], euclidean)


def appends_by_linear(link: faiss.VectorTransform) -> bool:
    """Whether `link` appends constants to its input by a matrix, as that of `for_gpu` does."""
    if (
        not isinstance(link, faiss.LinearTransform)
        or not link.have_bias
        or link.d_out <= link.d_in
    ):
        return False
    matrix = faiss.vector_to_array(link.A).reshape(link.d_out, link.d_in)
    return bool((matrix == np.eye(link.d_out, link.d_in)).all())
