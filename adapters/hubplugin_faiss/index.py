"""The public functions on an index in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.vectors import Progress, VectorLike, Vectors, as_vectors
from hubplugin_faiss.calibration import is_loss, loss_of_recall, warn_of_loss
from hubplugin_faiss.checks import (
    checked_offsets,
    checked_originals,
    has_fingerprint,
    require_room,
    require_suits,
    require_unit,
    require_upgradable,
    require_upgraded,
)
from hubplugin_faiss.encoding.assemble import in_memory
from hubplugin_faiss.gallery import Gallery
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.norm_bias import NormBias
from hubplugin_faiss.offsets import offsets_by, upgrade_spec
from hubplugin_faiss.search_settings import holds_graph


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
    handler = handler_for(index)
    require_upgradable(handler)
    originals = checked_originals(vectors, handler)
    options: dict[str, Any] = {"rebuild": bool(rebuild), "vectors": originals}
    if not isinstance(model_or_offsets, OffsetModel):
        offsets = checked_offsets(model_or_offsets, handler.count, "the index")[handler.order()]
        return handler.upgraded(offsets, upgrade_spec(offsets, None, **options))
    model = model_or_offsets
    gallery = Gallery(index, unit=model.metric is Metric.COSINE)
    offsets = offsets_by(model, index, gallery, originals, device, memory, progress, tolerant=tolerant)
    return upgraded_by(index, offsets, model, originals, rebuild)


def upgraded_by(
    index: Any, offsets: np.ndarray, model: OffsetModel, originals: Vectors | None, rebuild: bool | None
) -> Any:
    """`index` with the `offsets` [n] of `model` in scan order. A graph is built anew where its links lose too much."""
    handler = handler_for(index)

    def made(rebuild: bool) -> Any:
        return handler.upgraded(offsets, upgrade_spec(offsets, model, rebuild=rebuild, vectors=originals))

    upgraded = made(bool(rebuild))
    if originals is None and handler.exhaustive:
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
    handler = handler_for(index)
    require_upgraded(handler)
    return handler.downgraded(in_memory)


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
    handler = handler_for(index)
    require_upgraded(handler)
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
        if not (has_fingerprint(handler, "") or has_fingerprint(handler, model.fingerprint)):
            raise StoreError(
                "the offsets in this index are those of another model; add with that one, or take this one for all: "
                "index = refresh(index, model)"
            )
        unit = model.metric is Metric.COSINE
        if unit:
            require_unit(block, given.name)
        coded = handler.coded(block)
        offsets = model.offsets(coded, device=device, memory=memory)
        offsets = (offsets - NormBias(handler, unit)(coded)).astype(np.float32)
    else:
        offsets = checked_offsets(model_or_offsets, len(block), "the batch")
    if ids is not None:
        ids = np.ascontiguousarray(ids, np.int64)
        if ids.shape != (len(block),):
            raise InputError(f"{len(block)} vectors, but ids of shape {ids.shape}: expected one for each")
    require_room(handler, offsets)
    handler.append(block, offsets, ids, unit)


def remove_ids(index: Any, ids: np.ndarray) -> int:
    """Removes the entries with `ids` (int64 [n], those that a search returns; others are passed over) from an
    upgraded index, and returns how many they were.

    As the index's own remove_ids, and for second stages, whose type has none: the ids of what stays close up there, as
    they do in a Flat index.

    Raises StoreError if the index is not upgraded, or is of a type that removes nothing.
    """
    handler = handler_for(index)
    require_upgraded(handler)
    before = handler.count
    known = np.intersect1d(np.asarray(ids, np.int64), handler.labels())
    if known.size:
        handler.remove(known)
    return before - handler.count


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
    held = Gallery(index) if handler_for(index).two_stage else None
    raw = downgrade(index)
    options: dict[str, Any] = {"device": device, "memory": memory, "progress": progress}
    return _upgraded(raw, model_or_offsets, vectors=held, tolerant=True, **options)
