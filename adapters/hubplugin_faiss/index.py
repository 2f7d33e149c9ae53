"""The public functions on an index in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import faiss
import numpy as np

from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.vectors import OffsetsLike, Progress, VectorLike, Vectors, as_vectors
from hubplugin_faiss.calibration import is_exact, require_recall, require_rehearsed, trial_of, widen
from hubplugin_faiss.checks import (
    checked_offsets,
    checked_originals,
    require_made_by,
    require_unit,
    require_upgradable,
    require_upgraded,
)
from hubplugin_faiss.encoding.extra_dimensions import in_memory
from hubplugin_faiss.gallery import Gallery
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import NormBias
from hubplugin_faiss.offsets import Resources, offsets_by, upgrade_spec
from hubplugin_faiss.search_settings import holds_graph

if TYPE_CHECKING:
    from hubplugin.admission import Admission


def upgrade(
    index: faiss.Index,
    model_or_offsets: OffsetModel | OffsetsLike,
    *,
    vectors: VectorLike | None = None,
    rebuild: bool | None = None,
    force: bool = False,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> faiss.Index:
    """A stock Faiss index of the same d that ranks by similarity + offset.

    Search, reconstruct, write_index and all else work as before. Inner product scores are s + offset; L2 distances
    are |q - t|^2 + 2 (M - offset), with M a little above the largest offset. A vector that is added through plain
    Faiss is neutral under inner product and has the largest offset under L2: use `add`.

    With a model, an approximate index is searched with queries of its bank before and after. If recall falls by more
    than 0.01, a warning says by how much; if it falls by more than docs/faiss.md promises for the type, the upgrade is
    refused. Recall is measured over what the index reconstructs, so a loss in the codes themselves shows only where
    `vectors` are given. An index that needs a second stage is tried with vectors that are known, too.

    Args:
        index: a trained, filled faiss.Index with inner product or L2. It is not changed.
        model_or_offsets: an `OffsetModel` for the metric of the index (cosine if its vectors are of unit length); its
            offsets are centred on the index if it was fitted without targets. Or offsets [ntotal] in the order of the
            ids 0, 1, 2, ... that a search returns, for `IndexIDMap` in the order in which vectors were added.
        vectors: the originals [ntotal, d] in the same order. A two-stage index holds them in its second stage, instead
            of what its codes decode to.
        rebuild: build graphs anew (True) or keep their links (False). By default, and with a model, a graph whose kept
            links lose more than 0.01 of recall is built anew, and taken if it finds more. That takes about as long as
            the graph took at first.
        force: upgrade it even if recall falls by more than is promised for its type.
        device: where offsets are computed, as in `hubplugin.fit`.
        memory: how much memory that may take.
        progress: called with a text, what is done and the total.

    Returns:
        The upgraded index.

    Raises:
        StoreError: the index is untrained, empty, already upgraded or of a type that cannot carry offsets.
        InputError: the offsets, the model or the vectors do not suit it.
        CorrectionRefused: the upgraded index would find much less than the raw one does.
    """
    resources = Resources(device, memory, progress)
    return _upgraded(index, model_or_offsets, resources, vectors=vectors, rebuild=rebuild, force=force)


def _upgraded(
    index: faiss.Index,
    model_or_offsets: OffsetModel | OffsetsLike,
    resources: Resources,
    *,
    vectors: VectorLike | None = None,
    rebuild: bool | None = None,
    force: bool = False,
    tolerant: bool = False,
) -> faiss.Index:
    """`upgrade`; tolerant: entries that the model cannot judge are no error."""
    handler = handler_for(index)
    require_upgradable(handler)
    originals = checked_originals(vectors, handler)
    if not isinstance(model_or_offsets, OffsetModel):
        offsets = checked_offsets(model_or_offsets, handler.count, "the index")[handler.order()]
        return handler.upgraded(offsets, upgrade_spec(offsets, None, rebuild=bool(rebuild), vectors=originals))
    model = model_or_offsets
    gallery = Gallery(index, unit=model.metric is Metric.COSINE)
    offsets = offsets_by(model, gallery, resources, originals, tolerant=tolerant)
    return upgraded_by(index, offsets, model, originals, rebuild, force)


def upgraded_by(
    index: faiss.Index,
    offsets: np.ndarray,
    model: OffsetModel,
    originals: Vectors | None,
    rebuild: bool | None,
    force: bool = False,
) -> faiss.Index:
    """`index` with the `offsets` [n] of `model` in scan order. A graph is built anew where its links lose too much, and
    a second stage gets more candidates. Raises CorrectionRefused where that does not suffice."""
    handler = handler_for(index)
    if originals is None and not force:
        require_rehearsed(index, offsets, model)

    def made(rebuild: bool) -> faiss.Index:
        return handler.upgraded(offsets, upgrade_spec(offsets, model, rebuild=rebuild, vectors=originals))

    upgraded = made(bool(rebuild))
    trial = None if is_exact(index) and originals is None else trial_of(index, upgraded, model, originals=originals)
    if trial is None:
        return upgraded
    recall = trial.recall(upgraded)
    if rebuild is None and recall.fell and holds_graph(index):
        rebuilt = made(True)
        of_rebuilt = trial.recall(rebuilt)
        if of_rebuilt.after > recall.after:
            upgraded, recall = rebuilt, of_rebuilt
    require_recall(widen(upgraded, trial, recall), index, upgraded, force)
    return upgraded


def downgrade(index: faiss.Index) -> faiss.Index:
    """The index as it was before `upgrade`, with what has been added since.

    A graph that `upgrade` built anew is kept.

    Args:
        index: an upgraded index. It is not changed.

    Returns:
        The raw index.

    Raises:
        StoreError: `index` is not upgraded.
    """
    handler = handler_for(index)
    require_upgraded(handler)
    return handler.downgraded(in_memory)


def add(
    index: faiss.Index,
    vectors: VectorLike,
    model_or_offsets: OffsetModel | OffsetsLike,
    ids: np.ndarray | None = None,
    *,
    admission: Admission | None = None,
    device: str = "auto",
    memory: int | str = "1GiB",
) -> None:
    """Adds `vectors` [n, d] to an upgraded index, each with its offset.

    Args:
        index: an upgraded index. It is changed in place, or left as it is where an error is raised.
        vectors: the new vectors [n, d]; of unit length for a model for cosine.
        model_or_offsets: the model that the index was upgraded with, or offsets [n].
        ids: int64 [n], for an index that has ids of its own.
        admission: what becomes of vectors that look planted; needs a model. None looks at nothing.
        device: where offsets are computed, as in `hubplugin.fit`.
        memory: how much memory that may take.

    Raises:
        StoreError: the index is not upgraded, has offsets of another model, or its codes have no room for these.
        InputError: vectors, offsets, model or ids do not suit the index.
    """
    handler = handler_for(index)
    require_upgraded(handler)
    given = as_vectors(vectors, "vectors")
    if given.dim != index.d:
        raise InputError(f"{given.name} have {given.dim} dimensions, the index has {index.d}")
    block, unit = given.array(), False
    if isinstance(model_or_offsets, OffsetModel):
        model = model_or_offsets
        require_made_by(model, handler)
        unit = model.metric is Metric.COSINE
        if unit:
            require_unit(block, given.name)
        coded = handler.coded(block)
        names = range(handler.count, handler.count + len(block)) if ids is None else np.asarray(ids).tolist()
        resources = Resources(device, memory)
        offsets = (
            resources.offsets(model, coded) if admission is None else resources.admitted(model, coded, names, admission)
        )
        offsets = (offsets - NormBias(handler, unit)(coded)).astype(np.float32)
    else:
        offsets = checked_offsets(model_or_offsets, len(block), "the batch")
    if ids is not None:
        ids = np.ascontiguousarray(ids, np.int64)
        if ids.shape != (len(block),):
            raise InputError(f"{len(block)} vectors, but ids of shape {ids.shape}: expected one for each")
    handler.require_takes(block, offsets, ids, unit)
    handler.append(block, offsets, ids, unit)


def remove_ids(index: faiss.Index, ids: np.ndarray) -> int:
    """Removes entries from an upgraded index, as the index's own remove_ids does.

    It also removes from two-stage indexes, whose type in Faiss removes nothing. There the ids of what stays close up,
    as they do in a Flat index.

    Args:
        index: an upgraded index. It is changed in place.
        ids: int64 [n], as a search returns them; ids that are not in the index are passed over.

    Returns:
        How many entries were removed.

    Raises:
        StoreError: the index is not upgraded, or its type removes nothing.
    """
    handler = handler_for(index)
    require_upgraded(handler)
    before = handler.count
    known = np.intersect1d(np.asarray(ids, np.int64), handler.labels())
    if known.size:
        handler.remove(known)
    return before - handler.count


def refresh(
    index: faiss.Index,
    model_or_offsets: OffsetModel | OffsetsLike,
    *,
    force: bool = False,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> faiss.Index:
    """An upgraded index with all its offsets replaced, as by `upgrade(downgrade(index), model)`: by a robust model,
    too, every entry counts as a member of the gallery then. (`hubplugin.refresh` of a file keeps newcomers apart.)

    A second stage that an upgrade made keeps the vectors that it holds. Entries that the model cannot judge get its
    smallest offset, and a warning names them: such as vectors that plain Faiss added and that are not of unit length,
    where the model is for cosine.

    Args:
        index: an upgraded index. It is not changed.
        model_or_offsets: as in `upgrade`.
        force: as in `upgrade`.
        device: where offsets are computed, as in `hubplugin.fit`.
        memory: how much memory that may take.
        progress: called with a text, what is done and the total.

    Returns:
        The new index.

    Raises:
        StoreError: `index` is not upgraded.
        InputError: the model or the offsets do not suit it, or the model cannot judge more than half of its entries.
        CorrectionRefused: as in `upgrade`.
    """
    held = Gallery(index) if handler_for(index).two_stage else None
    resources = Resources(device, memory, progress)
    return _upgraded(downgrade(index), model_or_offsets, resources, vectors=held, force=force, tolerant=True)
