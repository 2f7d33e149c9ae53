"""What is refused before anything is changed, each in one line."""

from __future__ import annotations

import faiss
import numpy as np

from hubplugin.errors import InputError, Parameter, StoreError
from hubplugin.jobs.write import UNIT
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.vectors import OffsetsLike, VectorLike, Vectors, as_vectors
from hubplugin_faiss.faiss_objects import name_of
from hubplugin_faiss.handlers.base import IndexHandler

ABOUT = 0.3, 1.7
"""Between these lies the median length that codes leave of unit vectors: PQ makes them shorter, down to a half."""


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


def require_upgradable(handler: IndexHandler) -> None:
    if handler.is_upgraded():
        raise StoreError(
            f"this {name_of(handler.index)} is already upgraded: refresh(index, model) replaces its offsets, "
            "downgrade(index) takes them out"
        )
    handler.check()
    if handler.count == 0:
        raise StoreError(f"{name_of(handler.index)} is empty; add vectors, then upgrade it")


def require_upgraded(handler: IndexHandler) -> None:
    if not handler.is_upgraded():
        raise StoreError(f"this {name_of(handler.index)} is not upgraded; upgrade(index, model) puts offsets into it")


def require_suits(model: OffsetModel, index: faiss.Index) -> None:
    """Raises InputError if the offsets of `model` do not belong to the similarity of `index`."""
    if model.dim != index.d:
        raise InputError(f"the model has {model.dim} dimensions, the index has {index.d}; fit one on its vectors")
    euclidean = index.metric_type == faiss.METRIC_L2
    if model.metric is (Metric.DOT if euclidean else Metric.EUCLIDEAN):
        raise InputError(
            f"the model is for {model.metric.value}, the index ranks by {'L2' if euclidean else 'inner product'}; "
            f"fit with metric={'euclidean' if euclidean else 'dot'!r}, or 'cosine' if its vectors are of unit length"
        )


def require_made_by(model: OffsetModel, handler: IndexHandler) -> None:
    """Raises InputError or StoreError unless the offsets in an upgraded index are of `model`, or of no model."""
    require_suits(model, handler.index)
    if model.gallery is None:
        raise InputError("the model is not centred on the index: use model = model.centred_on(targets), then refresh")
    if not (has_fingerprint(handler, "") or has_fingerprint(handler, model.fingerprint)):
        raise StoreError(
            "the offsets in this index are those of another model; add with that one, or take this one for all: "
            "index = refresh(index, model)"
        )


def has_fingerprint(handler: IndexHandler, fingerprint: str) -> bool:
    """Whether the offsets in an upgraded index are those of the model called `fingerprint`, "" for none."""
    return all(extra.has_fingerprint(fingerprint) for extra in handler.extra_dimensions())


def checked_originals(vectors: VectorLike | None, handler: IndexHandler) -> Vectors | None:
    """`vectors` as the originals of the entries; raises InputError unless their shape is [ntotal, d]."""
    originals = None if vectors is None else as_vectors(vectors, "vectors")
    if originals is not None and (originals.rows, originals.dim) != (handler.count, handler.index.d):
        raise InputError(
            f"{originals.name} have shape {[originals.rows, originals.dim]}, "
            f"the index holds {[handler.count, int(handler.index.d)]}"
        )
    return originals


def checked_offsets(values: OffsetsLike | None, count: int, name: str) -> np.ndarray:
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
