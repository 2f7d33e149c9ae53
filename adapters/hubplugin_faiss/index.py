"""An index in memory: the public functions on it, its vectors, and what is refused."""

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
from hubplugin_faiss.objects import name_of, normalises_queries, recount, with_map
from hubplugin_faiss.scale import IndexScale

LOSSY_UNIT = 0.7
"""How far from 1 the length may lie that codes give to a unit vector."""


def upgrade(
    index: faiss.Index,
    model_or_offsets: OffsetModel | OffsetsLike,
    *,
    force: bool = False,
    compute: Compute = Compute(),
) -> faiss.Index:
    """Return a stock Faiss index of the same d that ranks by similarity + offset.

    Search, reconstruct, write_index and all else work as before. Inner product scores
    are s + offset. L2 distances are |q - t|^2 + 2 (M - offset), with M a little above
    the largest offset. A vector that is added through plain Faiss is neutral under
    inner product and has the largest offset under L2: use `add`.

    With a model, an approximate index is searched with queries of its bank before and
    after. If recall falls by more than 0.01, a warning says by how much. If it falls by
    more than docs/faiss-types.md promises for the type, the upgrade is refused. Recall
    is measured over what the index reconstructs, without what its codes lose of a
    vector.

    A model with a query map puts that before the index, as one more transform: searches
    map their queries, in plain Faiss, too. Plain `add` would map what it adds, and
    `reconstruct` would turn it back as if it were a rotation: use `add` of this
    package, and reconstruct what lies behind, `faiss.downcast_index(index).index`.

    All offsets of an index that is upgraded already are replaced. Entries that the
    model cannot judge get its smallest offset, and a warning names them: such as
    vectors that plain Faiss added and that are not of unit length, where the model is
    for cosine.

    Args:
        index: A trained, filled faiss.Index with inner product or L2, upgraded or not.
            It is not changed.
        model_or_offsets: An `OffsetModel` for the metric of the index (cosine if its
            vectors are of unit length); its offsets are centred on the index if it was
            fitted without targets. Or offsets [ntotal] in the order of the ids 0, 1, 2,
            ... that a search returns, for `IndexIDMap` in the order in which vectors
            were added.
        force: Upgrade it even if recall falls by more than is promised for its type.
        compute: Where offsets are computed, and within what memory.

    Returns:
        The upgraded index.

    Raises:
        StoreError: The index is untrained, empty or of a type that cannot carry
            offsets.
        InputError: The offsets or the model do not suit it, or the model cannot judge
            more than half of the entries of an upgraded one.
        CorrectionRefused: The upgraded index would find much less than the raw one
            does.
    """
    handler = handler_for(index)
    is_upgraded = bool(handler.extras)
    if is_upgraded:
        handler = handler_for(handler.downgrade())
    handler.check()
    if not isinstance(model_or_offsets, OffsetModel):
        offsets = require_offsets(model_or_offsets, handler.count, "the index")
        offsets = offsets[handler.order()]
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
    """Return an upgraded index, behind the query map of the model.

    Args:
        handler: That of the raw index.
        offsets: Those of its entries in scan order, on `scale` [n].
        model: Gives the offsets.
        scale: The scale on which the index holds them.
        force: Only warn where it finds too little.

    Raises:
        CorrectionRefused: The upgraded index finds too little.
    """
    spec = upgrade_spec(offsets, handler.euclidean, model)
    upgraded = handler.upgrade(offsets, spec)
    if model.query_map is not None:
        upgraded = with_map(upgraded, model.query_map)
    if handler.lossy or not handler.exhaustive:
        require_recall(handler, handler_for(upgraded), model, scale, force)
    return upgraded


def downgrade(index: faiss.Index) -> faiss.Index:
    """Return the index as it was before `upgrade`, with what has been added since.

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
        index: An upgraded index. It is changed in place, or left as it is where an
            error is raised.
        vectors: The new vectors [n, d]; of unit length for a model for cosine.
        model_or_offsets: The model that the index was upgraded with, or offsets [n].
        ids: int64 [n], for an index that has ids of its own.
        compute: Where offsets are computed, and within what memory.

    Raises:
        StoreError: The index is not upgraded, has offsets of another model, or its
            codes have no room for these.
        InputError: Vectors, offsets, model or ids do not suit the index.
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
    """Remove entries from an upgraded index, as the index's own remove_ids does.

    It also removes from refined indexes, whose type in Faiss removes nothing. There the
    ids of what stays close up, as they do in a Flat index. In an IDMap over inverted
    lists each entry keeps its id, which Faiss itself mixes up.

    Args:
        index: An upgraded index. It is changed in place, or left as it is where an
            error is raised.
        ids: int64 [n], as a search returns them, or a selector of these; ids that are
            not in the index are passed over.

    Returns:
        How many entries were removed.

    Raises:
        StoreError: The index is not upgraded, or its type, or that of its direct map,
            removes nothing.
        InputError: The ids are no whole numbers.
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
    steps = handler.plan_remove(selected, False)
    if selected.size:
        for step in steps:
            step()
    return handler.count - recount(index)


class Gallery(Vectors):
    """The vectors [rows, dim] in an index, as the index itself reconstructs them,
    upgraded or not.

    Args:
        index: A faiss.Index of a type that can be upgraded.
        name: The name that errors give it.

    Raises:
        StoreError: The type of the index cannot carry offsets.
    """

    def __init__(self, index: faiss.Index, name: str = "index"):
        self._handler = handler_for(index)
        super().__init__(name, self._handler.count, index.d)

    def raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        for batch in self._handler.scan(size):
            yield self._handler.with_zeros(batch.vectors)


def as_unit(
    batches: Iterable[Batch], handler: IndexHandler, name: str, tolerant: bool
) -> Iterator[Batch]:
    """Yield `batches` that `handler` has read, with zeros where codes stand for these.

    Raises InputError, unless `tolerant`, if vectors cannot be of unit length.
    """
    for batch in batches:
        vectors = handler.with_zeros(batch.vectors)
        if not tolerant:
            require_unit(vectors, name, int(batch.place or 0), handler.lossy)
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

    Entries that the model cannot judge get its smallest offset, or 0 at length 0, and a
    warning counts them.

    Args:
        model: Gives the offsets.
        handler: That of the index.
        scale: The scale on which the index holds offsets.
        compute: Device, memory and progress.
        tolerant: Do not check that vectors are of unit length for cosine.

    Returns:
        float32 [n], in scan order, on `scale`.

    Raises:
        InputError: The model cannot judge more than half of the entries, or cosine does
            not suit them.
    """
    offsets = np.empty(handler.count, np.float32)
    invalid = InvalidVectors()
    unit = not handler.lossy
    batches = handler.scan()
    if model.metric is Metric.COSINE:
        batches = as_unit(batches, handler, "index", tolerant)
    for batch in batches:
        given = offsets_of_all(model, batch, invalid, unit=unit, compute=compute)
        first = int(batch.place or 0)
        done = first + len(given)
        offsets[first:done] = scale.to_index(given, batch.vectors)
        compute.report("offsets", done, handler.count)
    if invalid.count:
        text = f"of {handler.count} entries {invalid}"
        if invalid.count > handler.count / 2:
            name = name_of(handler.index)
            raise InputError(f"the model does not suit this {name}: {text}")
        warnings.warn(text, stacklevel=3)
    return offsets


def require_unit(
    vectors: np.ndarray, name: str, first_row: int = 0, lossy: bool = False
) -> None:
    """Raise InputError if `vectors` [b, d] are neither of unit length nor zero.

    Args:
        vectors: The vectors.
        name: What the error calls them.
        first_row: The number of the first.
        lossy: Codes stand for them, which may halve a length: most vectors must be of
            about unit length.
    """
    lengths = np.linalg.norm(vectors, axis=1)
    room = LOSSY_UNIT if lossy else UNIT
    bad = np.flatnonzero((np.abs(lengths - 1) > room) & (lengths > 0))
    tolerated = len(lengths) / 2 if lossy else 0
    if len(bad) > tolerated:
        row = bad[0]
        raise InputError(
            f"{name}: the model is for cosine, but row {first_row + row} has length "
            f"{lengths[row]:.4g} and Faiss does not normalise; take unit vectors "
            "(faiss.normalize_L2), or fit with ",
            Parameter("metric", "dot"),
            " or 'euclidean'",
        )


def upgraded_handler(index: faiss.Index) -> IndexHandler:
    """Return the handler of an upgraded index. Raises StoreError if it is not
    upgraded."""
    handler = handler_for(index)
    if not handler.extras:
        raise StoreError(
            f"this {name_of(handler.index)} is not upgraded; upgrade(index, model) puts "
            "offsets into it"
        )
    return handler


def require_suits(model: OffsetModel, handler: IndexHandler) -> None:
    """Raise InputError if `model` is for other vectors than those of an index."""
    if model.dim != handler.index.d:
        raise InputError(
            f"the model has {model.dim} dimensions, the index has {handler.index.d}; "
            "fit one on its vectors"
        )
    if model.metric not in (handler.metric, Metric.COSINE):
        raise InputError(
            f"the model is for {model.metric.value}, the index ranks by "
            f"{handler.metric.value}; fit with metric={handler.metric.value!r}, or "
            "'cosine' if its vectors are of unit length"
        )


def require_made_by(model: OffsetModel, handler: IndexHandler) -> None:
    """Raise InputError or StoreError unless the offsets in the upgraded index of
    `handler` are those of `model`, or of no model."""
    require_suits(model, handler)
    if model.gallery is None:
        raise InputError(
            "the model is not centred on the index: use "
            "model = model.centre_on(targets), then upgrade"
        )
    if not any(map(handler.holds_offsets_of, ("", model.fingerprint))):
        raise StoreError(
            "the offsets in this index are those of another model; add with that one, or "
            "take this one for all: index = upgrade(index, model)"
        )


def require_offsets(values: OffsetsLike, count: int, name: str) -> np.ndarray:
    """Return `values` as offsets: float32 [count].

    Raises InputError, which calls what they are for `name`, if they are none.
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
            "an OffsetModel, or one for each"
        )
    finite = np.isfinite(offsets)
    if not finite.all():
        raise InputError(
            f"offsets: entry {int(np.argmin(finite))} is NaN, infinite or too large for "
            "float32"
        )
    return offsets
