"""The public functions on an index in memory."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np

from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.jobs.unjudged import UNIT, Unjudged, offsets_of_all
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, warn_if_swapped
from hubplugin.vectors import Progress, VectorLike, Vectors, as_vectors
from hubplugin_faiss.calibration import TOLERATED, loss_of_recall
from hubplugin_faiss.encoding.layout import Fill, Plan
from hubplugin_faiss.handlers import wrappers  # noqa: F401 (importing it registers its rules)
from hubplugin_faiss.handlers.base import Favour, Rule, block_rows, name_of, rule_for
from hubplugin_faiss.handlers.inverted_lists import in_memory
from hubplugin_faiss.search_settings import holds_graph, wider

ABOUT = 0.3, 1.7
"""Between these lies the median length that codes leave of unit vectors: PQ makes them shorter, down to a half."""


class Gallery(Vectors):
    """The vectors in an index, as the index itself reconstructs them, upgraded or not: `rows` x `dim`."""

    def __init__(self, index: Any, name: str = "index", *, unit: bool = False):
        self._rule, self._unit, self._first = rule_for(index), unit, 0
        super().__init__(name, self._rule.count, int(index.d))

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        row = 0
        for vectors, _ in self._rule.scan(0, size):
            if self._unit and not self._rule.lossy:
                require_unit(vectors, self.name, row)
            elif self._unit and row == 0 and not self._rule.coarse:  # whose second stage is made of unit vectors
                require_about_unit(vectors, self.name)
            yield vectors
            row += len(vectors)


def require_unit(vectors: np.ndarray, name: str, first_row: int = 0) -> None:
    """Raises InputError at the first row of `vectors` [b, d] that is not of unit length."""
    lengths = np.linalg.norm(vectors, axis=1)
    bad = np.flatnonzero(np.abs(lengths - 1) > UNIT)
    if bad.size:
        raise InputError(
            f"{name}: the model is for cosine, but row {first_row + int(bad[0])} has length {lengths[bad[0]]:.4g} and "
            "Faiss does not normalise; add unit vectors (faiss.normalize_L2), or fit with ",
            Parameter("metric", "dot"),
            " or 'euclidean'",
        )


def require_about_unit(vectors: np.ndarray, name: str) -> None:
    """Raises InputError if `vectors` [b, d], as codes have left them, cannot have been of unit length."""
    length = float(np.median(np.linalg.norm(vectors, axis=1)))
    if not ABOUT[0] < length < ABOUT[1]:
        raise InputError(
            f"{name}: the model is for cosine, but its codes stand for vectors of about length {length:.3g} and Faiss "
            "does not normalise; build it of unit vectors (faiss.normalize_L2), or fit with ",
            Parameter("metric", "dot"),
            " or 'euclidean'",
        )


def upgrade(
    index: Any,
    model_or_offsets: OffsetModel | VectorLike,
    *,
    vectors: VectorLike | None = None,
    rebuild: bool | None = None,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> Any:
    """A stock Faiss index of the same d that ranks by similarity + offset. `index` itself is not changed.

    index: a trained, filled faiss.Index with inner product or L2. model_or_offsets: an `OffsetModel` for the
    metric of the index (cosine if its vectors are of unit length), or offsets [ntotal] in the order of the ids
    0, 1, 2, ... that a search returns, for `IndexIDMap` in the order in which they were added. Offsets of a model
    that was fitted without targets are centred on the index.

    Search, reconstruct, write_index and all else work as before. Inner product scores are s + offset; L2 distances
    are |q - t|^2 + 2 (M - offset), with M a little above the largest offset. A vector that is added through plain
    Faiss is neutral under inner product and has the largest offset under L2: use `add`.

    vectors: the originals [ntotal, d] in the order of the ids. Types whose codes have no room for an offset hold them
    in the second stage that they get, instead of what their codes decode to. rebuild: build graphs anew
    (True) or keep their links (False). By default, and with a model, a graph whose kept links lose more than 0.01 of
    recall is built anew, if that finds more: it takes about as long as the graph took at first. With a model, an
    approximate index is searched with queries of its bank, and a warning says by how much recall fell, if it did by
    more than 0.01. It is measured over what the index reconstructs, so that a loss in the codes themselves shows only
    where `vectors` are given.

    Raises StoreError for an index that is untrained, empty, already upgraded or of a type that cannot carry offsets,
    InputError for offsets or a model that do not suit it.
    """
    options: dict[str, Any] = {"device": device, "memory": memory, "progress": progress}
    return _upgraded(index, model_or_offsets, vectors=vectors, rebuild=rebuild, tolerant=False, **options)


def _upgraded(
    index: Any,
    model_or_offsets: OffsetModel | VectorLike,
    *,
    vectors: VectorLike | None,
    tolerant: bool,
    device: str,
    memory: int | str,
    progress: Progress | None,
    rebuild: bool | None = None,
) -> Any:
    """`upgrade`; tolerant: entries that the model cannot judge are no error."""
    rule = rule_for(index)
    require_upgradable(rule)
    originals = checked_originals(vectors, rule)
    options: dict[str, Any] = {"rebuild": bool(rebuild), "vectors": originals}
    if not isinstance(model_or_offsets, OffsetModel):
        offsets = checked_offsets(model_or_offsets, rule.count, "the index")[rule.order()]
        return rule.upgraded(offsets, plan_for(offsets, None, **options))
    model = model_or_offsets
    gallery = Gallery(index, unit=model.metric is Metric.COSINE)
    offsets = offsets_by(model, index, gallery, originals, device, memory, progress, tolerant=tolerant)
    return upgraded_by(index, offsets, model, originals, rebuild)


def upgraded_by(
    index: Any, offsets: np.ndarray, model: OffsetModel, originals: Vectors | None, rebuild: bool | None
) -> Any:
    """`index` with the `offsets` [n] of `model` in scan order. A graph is built anew where its links lose too much."""
    rule = rule_for(index)

    def made(rebuild: bool) -> Any:
        return rule.upgraded(offsets, plan_for(offsets, model, rebuild=rebuild, vectors=originals))

    upgraded = made(bool(rebuild))
    if originals is None and rule.exhaustive:
        return upgraded
    loss = loss_of_recall(index, upgraded, model, originals=originals)
    if rebuild is None and is_loss(loss) and holds_graph(index):
        anew = made(True)
        of_anew = loss_of_recall(index, anew, model, originals=originals)
        if loss and of_anew and of_anew[1] > loss[1]:
            upgraded, loss = anew, of_anew
    warn_of_loss(loss, upgraded)
    return upgraded


def downgrade(index: Any) -> Any:
    """The index as it was before `upgrade`, with what has been added since. `index` itself is not changed.

    Raises StoreError if `index` is not upgraded.
    """
    rule = rule_for(index)
    require_upgraded(rule)
    return rule.downgraded(in_memory)


def add(
    index: Any,
    vectors: VectorLike,
    model_or_offsets: OffsetModel | VectorLike,
    ids: np.ndarray | None = None,
    *,
    device: str = "auto",
    memory: int | str = "1GiB",
) -> None:
    """Adds `vectors` [n, d] to an upgraded index, each with its offset.

    model_or_offsets: the model that the index was upgraded with, or offsets [n]. ids: int64 [n], for an index that
    has ids of its own.

    Raises StoreError if the index is not upgraded, InputError if something does not suit it; nothing is added then.
    """
    rule = rule_for(index)
    require_upgraded(rule)
    given, unit = as_vectors(vectors, "vectors"), False
    if given.dim != index.d:
        raise InputError(f"{given.name} have {given.dim} dimensions, the index has {index.d}")
    block = given.array()
    if isinstance(model_or_offsets, OffsetModel):
        model = model_or_offsets
        require_suits(model, index)
        if model.gallery is None:
            raise InputError(
                "the model is not centred on the index: use model = model.centred_on(targets), then refresh"
            )
        if not (carries_mark_of(rule, "") or carries_mark_of(rule, model.fingerprint)):
            raise StoreError(
                "the offsets in this index are those of another model; add with that one, or take this one for all: "
                "index = refresh(index, model)"
            )
        unit = model.metric is Metric.COSINE
        if unit:
            require_unit(block, given.name)
        coded = rule.coded(block)
        offsets = model.offsets(coded, device=device, memory=memory)
        offsets = (offsets - Favour(rule, unit)(coded)).astype(np.float32)
    else:
        offsets = checked_offsets(model_or_offsets, len(block), "the batch")
    if ids is not None:
        ids = np.ascontiguousarray(ids, np.int64)
        if ids.shape != (len(block),):
            raise InputError(f"{len(block)} vectors, but ids of shape {ids.shape}: expected one for each")
    require_room(rule, offsets)
    rule.append(block, offsets, ids, unit)


def remove_ids(index: Any, ids: np.ndarray) -> int:
    """Removes the entries with `ids` (int64 [n], those that a search returns; others are passed over) from an
    upgraded index, and returns how many they were.

    As the index's own remove_ids, and for second stages, whose type has none: the ids of what stays close up there, as
    they do in a Flat index.

    Raises StoreError if the index is not upgraded, or is of a type that removes nothing.
    """
    rule = rule_for(index)
    require_upgraded(rule)
    before = rule.count
    known = np.intersect1d(np.asarray(ids, np.int64), rule.labels())
    if known.size:
        rule.remove(known)
    return before - rule.count


def refresh(
    index: Any,
    model_or_offsets: OffsetModel | VectorLike,
    *,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> Any:
    """An upgraded index with all its offsets replaced, as by `upgrade(downgrade(index), model)`. What the second stage
    of an `upgrade` holds stays in it.

    Entries that a model cannot judge, such as vectors that plain Faiss added and that a model of cosine finds to be of
    another length than 1, get the smallest offset of the model, and a warning names them; if they are more than half of
    all, it raises InputError.
    """
    held = Gallery(index) if rule_for(index).coarse else None
    raw = downgrade(index)
    options: dict[str, Any] = {"device": device, "memory": memory, "progress": progress}
    return _upgraded(raw, model_or_offsets, vectors=held, tolerant=True, **options)


def offsets_by(
    model: OffsetModel,
    index: Any,
    gallery: Vectors,
    originals: Vectors | None,
    device: str,
    memory: int | str,
    progress: Progress | None,
    into: np.ndarray | None = None,
    tolerant: bool = False,
) -> np.ndarray:
    """The offsets of `index` by `model` in scan order, less what the index favours: float32 [n], centred if the model
    is not. They are those of what the index holds, its `gallery`, or where a second stage is to hold the `originals`,
    of these. `into` [n] is where they are written. tolerant: what the model cannot judge gets its smallest offset."""
    require_suits(model, index)
    warn_if_swapped(model, gallery.rows)
    offsets = np.empty(gallery.rows, np.float32) if into is None else into
    rule = rule_for(index)
    source = originals if originals is not None and rule.coarse else gallery
    favour, row, unjudged = Favour(rule, model.metric is Metric.COSINE), 0, Unjudged()
    tolerant &= source is gallery
    for vectors in (part for part, _ in rule.scan(0, block_rows(index.d))) if tolerant else source.blocks():
        if tolerant:
            unit = model.metric is Metric.COSINE and not rule.lossy
            ids = rule.labels(row, row + len(vectors)).tolist()
            values = offsets_of_all(model, vectors, ids, unjudged, unit=unit, device=device, memory=memory)
        else:
            values = model.offsets(vectors, device=device, memory=memory)
        offsets[row : row + len(vectors)] = values - favour(vectors)
        row += len(vectors)
        if progress is not None:
            progress("offsets", row, gallery.rows)
    if unjudged.count > gallery.rows / 2:
        raise InputError(f"the model does not suit this {name_of(index)}: of {gallery.rows} entries {unjudged}")
    if unjudged.count:
        warnings.warn(f"of {gallery.rows} entries {unjudged}", stacklevel=4)
    if source is originals:
        offsets[:] = offsets[rule.order()]
    if model.gallery is None:
        offsets -= offsets.mean(dtype=np.float64)
    return offsets


def plan_for(offsets: np.ndarray, model: OffsetModel | None, fill: Fill = in_memory, **options: Any) -> Plan:
    """Room for `offsets` [n], for those of the model's gallery, and for half their range more on either side, since
    targets that come later may lie beyond."""
    low, high = float(offsets.min()), float(offsets.max())
    if model is not None and model.gallery is not None:
        low, high = min(low, model.gallery.smallest), max(high, model.gallery.largest)
    room = (high - low) / 2
    fingerprint, unit = ("", False) if model is None else (model.fingerprint, model.metric is Metric.COSINE)
    return Plan(min(low - room, 0), max(high + room, 0), fingerprint, fill, unit, **options)


def is_loss(loss: tuple[float, float, float] | None) -> bool:
    """Whether recall before and after, with the standard error of the difference, tells of one worth a word."""
    return loss is not None and loss[0] - loss[1] > max(TOLERATED, 2 * loss[2])


def warn_of_loss(loss: tuple[float, float, float] | None, upgraded: Any) -> None:
    """Warns if an approximate index finds less of the corrected ranking than it found of the raw one."""
    if loss is None or not is_loss(loss):
        return
    before, after, error = loss
    warnings.warn(
        f"recall@10 of bank queries is {after:.3f} against the exact corrected ranking, {before:.3f} against the "
        f"raw one before ({before - after:.3f} +- {error:.3f} less); to search twice as wide: {wider(upgraded)}",
        stacklevel=4,
    )


def require_upgradable(rule: Rule) -> None:
    if rule.is_upgraded():
        raise StoreError(
            f"this {name_of(rule.index)} is already upgraded: refresh(index, model) replaces its offsets, "
            "downgrade(index) takes them out"
        )
    rule.check()
    if rule.count == 0:
        raise StoreError(f"{name_of(rule.index)} is empty; add vectors, then upgrade it")


def require_upgraded(rule: Rule) -> None:
    if not rule.is_upgraded():
        raise StoreError(f"this {name_of(rule.index)} is not upgraded; upgrade(index, model) puts offsets into it")


def checked_originals(vectors: VectorLike | None, rule: Rule) -> Vectors | None:
    """`vectors` as the originals of what `rule` holds; raises InputError if they are not as many, or of another d."""
    originals = None if vectors is None else as_vectors(vectors, "vectors")
    if originals is not None and (originals.rows, originals.dim) != (rule.count, rule.index.d):
        raise InputError(
            f"{originals.name} have shape {[originals.rows, originals.dim]}, "
            f"the index holds {[rule.count, int(rule.index.d)]}"
        )
    return originals


def require_suits(model: OffsetModel, index: Any) -> None:
    """Raises InputError if the offsets of `model` do not belong to the similarity of `index`."""
    if model.dim != index.d:
        raise InputError(f"the model has {model.dim} dimensions, the index has {index.d}; fit one on its vectors")
    euclidean = index.metric_type == faiss.METRIC_L2
    if model.metric is (Metric.DOT if euclidean else Metric.EUCLIDEAN):
        raise InputError(
            f"the model is for {model.metric.value}, the index ranks by {'L2' if euclidean else 'inner product'}; "
            f"fit with metric={'euclidean' if euclidean else 'dot'!r}, or 'cosine' if its vectors are of unit length"
        )


def require_room(rule: Rule, offsets: np.ndarray) -> None:
    """Raises StoreError if codes of an upgraded index cannot express `offsets` [n] to within a quarter of the largest
    that there is, of these and those that it holds. Rounding stays far below."""
    held = [own for _, own in itertools.islice(rule.scan(0, 65_536), 1) if own is not None]
    largest = max(float(np.abs(part).max()) for part in (*held, offsets) if len(part))
    lost = rule.rounding(offsets) if len(offsets) else 0.0
    if lost > max(largest / 4, 1e-6):
        raise StoreError(
            f"offsets from {offsets.min():.4g} to {offsets.max():.4g} find no room in the codes of this "
            f"{name_of(rule.index)}, which were made for others: replace all, index = refresh(index, model)"
        )


def carries_mark_of(rule: Rule, fingerprint: str) -> bool:
    """Whether the offsets in an upgraded index are those of the model called `fingerprint`, "" for none."""
    return all(tail.carries(fingerprint) for tail in rule.tails())


def checked_offsets(values: VectorLike, count: int, name: str) -> np.ndarray:
    try:
        offsets = np.asarray([] if values is None else values, dtype=np.float32)
    except (TypeError, ValueError):
        raise InputError(f"expected an OffsetModel or offsets [{count}], got {type(values).__name__}") from None
    if offsets.shape != (count,):
        raise InputError(
            f"offsets have shape {list(offsets.shape)}, {name} holds {count}: expected an OffsetModel, or one for each"
        )
    if not np.isfinite(offsets).all():
        bad = int(np.argmin(np.isfinite(offsets)))
        raise InputError(f"offsets: entry {bad} is NaN, infinite or too large for float32")
    return offsets
