"""The public functions on an index in memory, and the checks of their arguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

import faiss
import numpy as np

from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.jobs.results import InvalidVectors
from hubplugin.jobs.write import UNIT, offsets_of_all
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, refuse_query_map
from hubplugin.store import Batch
from hubplugin.vectors import OffsetsLike, VectorLike, Vectors, as_vectors
from hubplugin_faiss.calibration import require_recall
from hubplugin_faiss.encoding.offsets import upgrade_spec
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import Added, IndexHandler
from hubplugin_faiss.objects import (
    linear_transform,
    name_of,
    normalises_queries,
    pretransform,
    recount,
)
from hubplugin_faiss.scale import IndexScale

LOSSY_UNIT = 0.7
"""The maximum difference from 1 in the length of a unit vector after coding."""


def upgrade(
    index: faiss.Index,
    model_or_offsets: OffsetModel | OffsetsLike,
    *,
    force: bool = False,
    compute: Compute = Compute(),
) -> faiss.Index:
    """Return a stock Faiss index of the same d that ranks by similarity + offset.

    Searching, reconstructing and writing the index work as before. Inner product scores
    become s + offset. L2 distances become |q - t|^2 + 2 (M - offset), where M is
    slightly larger than the largest offset. Use `add` for new vectors: plain Faiss
    would give them the offset 0 under inner product and the largest offset under L2.

    With a model, an approximate index is searched with queries from the model's bank
    before and after the upgrade. If recall falls by more than 0.01, a warning says by
    how much. If it falls by more than docs/faiss-types.md promises for the type, an
    error is raised. Recall refers to the vectors that the index reconstructs, so it
    does not include the errors of their codes.

    The query map of a model becomes an additional transform in front of the index, so
    plain Faiss maps the queries of searches. But plain `add` would also map new
    vectors, and `reconstruct` would invert the map as if it were a rotation. Use `add`
    from this package, and reconstruct vectors from the index behind the map,
    `faiss.downcast_index(index).index`.

    If the index is already upgraded, all offsets are replaced. Entries that the model
    cannot judge get the model's smallest offset, and a warning counts them. For a
    cosine model, these are for example vectors that plain Faiss added without unit
    length.

    Args:
        index: A trained, filled faiss.Index with inner product or L2, upgraded or not.
            It is not changed.
        model_or_offsets: An `OffsetModel` for the metric of the index (cosine if the
            vectors are of unit length). If it was fitted without targets, its offsets
            are centred on the index. Or offsets [ntotal], in the order of the ids
            0, 1, 2, ... that a search returns; for `IndexIDMap`, in the order in which
            vectors were added.
        force: True to upgrade even if recall falls by more than the type promises.
        compute: The device and the memory limit for computing offsets.

    Returns:
        The upgraded index.

    Raises:
        StoreError: The index is untrained, empty or of a type that cannot carry
            offsets.
        InputError: The offsets or the model do not suit the index, or the model cannot
            judge more than half of the entries of an upgraded index.
        CorrectionRefused: The upgraded index would have much lower recall than the raw
            index.
    """
    handler = handler_for(index)
    is_upgraded = bool(handler.extras)
    if is_upgraded:
        handler = handler_for(handler.downgrade())
    handler.check()
    if not isinstance(model_or_offsets, OffsetModel):
        offsets = require_offsets(model_or_offsets, handler.count, "the index")
        offsets = offsets[handler.order()]  # from the order of ids to scan order
        return handler.upgrade(offsets, upgrade_spec(offsets, handler.euclidean))
    model = model_or_offsets
    require_suits(model, handler)
    if model.query_map is not None and normalises_queries(index):
        raise refuse_query_map("an index that normalises queries (L2norm)")
    if model.gallery is None:
        model = model.centre_on(Gallery(handler.index), compute=compute)
    scale = IndexScale.of(handler, model)
    offsets = offsets_by(model, handler, scale, compute, tolerant=is_upgraded)
    return upgrade_by(handler, offsets, model, scale, force)


def upgrade_by(
    handler: IndexHandler,
    offsets: np.ndarray,
    model: OffsetModel,
    scale: IndexScale,
    force: bool = False,
) -> faiss.Index:
    """Return an upgraded index, behind the query map of the model if there is one.

    Args:
        handler: The handler of the raw index.
        offsets: The offsets of the entries in scan order, on `scale`, [n].
        model: The model that gives the offsets.
        scale: The scale on which the index holds the offsets.
        force: True to only warn if recall is too low.

    Raises:
        CorrectionRefused: The recall of the upgraded index is too low.
    """
    spec = upgrade_spec(offsets, handler.euclidean, model)
    upgraded = handler.upgrade(offsets, spec)
    if model.query_map is not None:
        mark = np.full(upgraded.d, -0.0)  # see `is_mapped`
        query_map = linear_transform(model.query_map.matrix, mark)
        upgraded = pretransform([query_map], upgraded)
    if handler.lossy or not handler.exhaustive:
        require_recall(handler, handler_for(upgraded), model, scale, force)
    return upgraded


def downgrade(index: faiss.Index) -> faiss.Index:
    """Return the raw index from before `upgrade`, with all later additions.

    Args:
        index: An upgraded index. It is not changed.

    Returns:
        The raw index.

    Raises:
        StoreError: `index` is not upgraded.
    """
    return upgraded_handler(index).downgrade()


def add(
    index: faiss.Index,
    vectors: VectorLike,
    model_or_offsets: OffsetModel | OffsetsLike,
    ids: np.ndarray | None = None,
    *,
    compute: Compute = Compute(),
) -> None:
    """Add `vectors` [n, d] to an upgraded index, each with its offset.

    Args:
        index: An upgraded index. It is changed in place, or not at all if an error is
            raised.
        vectors: The new vectors, [n, d]. A cosine model requires unit length.
        model_or_offsets: The model with which the index was upgraded, or offsets [n].
        ids: The ids, int64 [n], for an index with ids set by the user.
        compute: The device and the memory limit for computing offsets.

    Raises:
        StoreError: The index is not upgraded, has offsets from another model, or cannot
            hold the new offsets in its codes.
        InputError: The vectors, offsets, model or ids do not suit the index.
    """
    handler = upgraded_handler(index)
    added = as_vectors(vectors, "vectors")
    if added.dim != index.d:
        raise InputError(
            f"{added.name} have {added.dim} dimensions, the index has {index.d}"
        )
    block = added.array()
    if isinstance(model_or_offsets, OffsetModel):
        model = model_or_offsets
        require_made_by(model, handler)
        # Offsets belong to the vectors as the index stores them.
        quantised = handler.quantise(block)
        if model.metric is Metric.COSINE:
            require_unit(block, added.name)
            quantised = handler.with_zeros(quantised)
        offsets = model.offsets(quantised, compute=compute.without_progress)
        scale = IndexScale.of(handler, model)
        offsets = scale.to_index(offsets, quantised).astype(np.float32)
    else:
        offsets = require_offsets(model_or_offsets, len(block), "the batch")
    if ids is not None:
        ids = np.ascontiguousarray(ids, np.int64)
        if ids.shape != (len(block),):
            raise InputError(
                f"{len(block)} vectors, but ids of shape {ids.shape}: expected one for "
                "each"
            )
    for step in handler.plan_append(Added(block, offsets, ids)):
        step()
    recount(index)


def remove_ids(index: faiss.Index, ids: np.ndarray | faiss.IDSelector) -> int:
    """Remove entries from an upgraded index, like Faiss's `index.remove_ids`.

    Refined indexes are supported, although Faiss cannot remove entries from them. Their
    remaining entries are renumbered, as in a Flat index. In an IDMap over inverted
    lists, each remaining entry keeps its id, which Faiss itself would mix up.

    Args:
        index: An upgraded index. It is changed in place, or not at all if an error is
            raised.
        ids: The ids that a search returns, int64 [n], or a selector for them. Ids that
            are not in the index are ignored.

    Returns:
        The number of removed entries.

    Raises:
        StoreError: The index is not upgraded, or its type or the type of its direct map
            does not support removal.
        InputError: The ids are not integers.
    """
    handler = upgraded_handler(index)
    labels = np.unique(handler.labels())
    if isinstance(ids, faiss.IDSelector):
        selected = labels[[ids.is_member(label) for label in labels.tolist()]]
    else:
        numbers = np.asarray(ids)
        if numbers.size and numbers.dtype.kind not in "iu":
            raise InputError(
                f"ids are of type {numbers.dtype}: expected whole numbers, or a "
                "faiss.IDSelector"
            )
        selected = labels[np.isin(labels, numbers.astype(np.int64))]
    before = handler.count
    steps = handler.plan_remove(selected, renumbered=False)
    if selected.size:
        for step in steps:
            step()
    return before - recount(index)


class Gallery(Vectors):
    """The vectors [rows, dim] that an index reconstructs.

    Args:
        index: A faiss.Index of a type that can be upgraded, upgraded or not.
        name: The name used in error messages.

    Raises:
        StoreError: The type of the index cannot carry offsets.
    """

    def __init__(self, index: faiss.Index, name: str = "index"):
        self._handler = handler_for(index)
        super().__init__(name, self._handler.count, index.d)

    def raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        for batch in self._handler.scan(size):
            yield self._handler.with_zeros(batch.vectors)


def check_batches(
    batches: Iterable[Batch], handler: IndexHandler, name: str, tolerant: bool
) -> Iterator[Batch]:
    """Yield `batches` from `handler` with zero vectors restored.

    Unless `tolerant`, raises InputError if vectors cannot be of unit length.
    """
    for batch in batches:
        vectors = handler.with_zeros(batch.vectors)
        if not tolerant:
            first_row = int(batch.place or 0)
            require_unit(vectors, name, first_row, handler.lossy)
        yield replace(batch, vectors=vectors)


def offsets_by(
    model: OffsetModel,
    handler: IndexHandler,
    scale: IndexScale,
    compute: Compute,
    *,
    tolerant: bool = False,
) -> np.ndarray:
    """Return offsets for the entries of an index.

    Entries that the model cannot judge get the model's smallest offset, or 0 if their
    length is 0. A warning counts them.

    Args:
        model: The model that gives the offsets.
        handler: The handler of the index.
        scale: The scale on which the index holds offsets.
        compute: The device, the memory limit and the progress.
        tolerant: True to skip the check for unit length with a cosine model.

    Returns:
        The offsets in scan order, on `scale`, float32 [n].

    Raises:
        InputError: The model cannot judge more than half of the entries, or it is for
            cosine, and vectors cannot be of unit length.
    """
    offsets = np.empty(handler.count, np.float32)
    invalid = InvalidVectors()
    unit = not handler.lossy
    batches = handler.scan()
    if model.metric is Metric.COSINE:
        batches = check_batches(batches, handler, "index", tolerant)
    for batch in batches:
        given = offsets_of_all(model, batch, invalid, unit=unit, compute=compute)
        first = int(batch.place or 0)
        done = first + len(given)
        offsets[first:done] = scale.to_index(given, batch.vectors)
        compute.report("offsets", done, handler.count)
    if invalid.count:
        text = str(invalid)
        if invalid.count > handler.count / 2:
            name = name_of(handler.index)
            raise InputError(f"the model does not suit this {name}: {text}")
        warnings.warn(text, stacklevel=3)
    return offsets


def require_unit(
    vectors: np.ndarray, name: str, first_row: int = 0, lossy: bool = False
) -> None:
    """Raise InputError if `vectors` are neither of unit length nor zero.

    Args:
        vectors: The vectors, [b, d].
        name: The name of the vectors in the error message.
        first_row: The number of the first vector.
        lossy: True for vectors decoded from codes, which may halve a length. Then only
            half of them must be of about unit length.
    """
    lengths = np.linalg.norm(vectors, axis=1)
    if lossy:
        tolerance = LOSSY_UNIT
        most_bad = len(lengths) / 2
    else:
        tolerance = UNIT
        most_bad = 0.0
    bad = np.flatnonzero((np.abs(lengths - 1) > tolerance) & (lengths > 0))
    if len(bad) > most_bad:
        row = bad[0]
        raise InputError(
            f"{name}: the model is for cosine, but row {first_row + row} has length "
            f"{lengths[row]:.4g} and Faiss does not normalise; use unit vectors "
            "(faiss.normalize_L2), or fit with ",
            Parameter("metric", "dot"),
            " or 'euclidean'",
        )


def upgraded_handler(index: faiss.Index) -> IndexHandler:
    """Return the handler of an upgraded index.

    Raises StoreError if the index is not upgraded.
    """
    handler = handler_for(index)
    if not handler.extras:
        raise StoreError(
            f"this {name_of(handler.index)} is not upgraded; upgrade(index, model) puts "
            "offsets into it"
        )
    return handler


def require_suits(model: OffsetModel, handler: IndexHandler) -> None:
    """Raise InputError if `model` does not suit the vectors of an index."""
    if model.dim != handler.index.d:
        raise InputError(
            f"the model has {model.dim} dimensions, the index has {handler.index.d}; "
            "fit a model on its vectors"
        )
    if model.metric not in (handler.metric, Metric.COSINE):
        raise InputError(
            f"the model is for {model.metric.value}, the index ranks by "
            f"{handler.metric.value}; fit with metric={handler.metric.value!r}, or "
            "'cosine' if its vectors are of unit length"
        )


def require_made_by(model: OffsetModel, handler: IndexHandler) -> None:
    """Raise InputError or StoreError if an upgraded index has another model's offsets.

    Offsets that do not come from any model are accepted.
    """
    require_suits(model, handler)
    if model.gallery is None:
        raise InputError(
            "the model is not centred on the index: use "
            "model = model.centre_on(targets), then upgrade"
        )
    if not any(map(handler.holds_offsets_of, ("", model.fingerprint))):
        raise StoreError(
            "the offsets in this index come from another model; add with that model, or "
            "replace all offsets: index = upgrade(index, model)"
        )


def require_offsets(values: OffsetsLike, count: int, name: str) -> np.ndarray:
    """Return `values` as offsets: float32 [count].

    Raises InputError if `values` are not valid offsets.

    name: The name of the index or batch in error messages.
    """
    try:
        offsets = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError):
        raise InputError(
            f"expected an OffsetModel or offsets [{count}], got {type(values).__name__}"
        ) from None
    if offsets.shape != (count,):
        raise InputError(
            f"offsets have shape {list(offsets.shape)}, {name} holds {count}: expected "
            "an OffsetModel, or one offset for each"
        )
    finite = np.isfinite(offsets)
    if not finite.all():
        raise InputError(
            f"offsets: entry {int(np.argmin(finite))} is NaN, infinite or too large for "
            "float32"
        )
    return offsets
