"""The offsets of a model for what an index holds, and the room that they need in its codes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from hubplugin.errors import InputError
from hubplugin.jobs.unjudged import Unjudged, offsets_of_all
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, warn_if_swapped
from hubplugin.vectors import Progress, Vectors
from hubplugin_faiss.checks import require_suits
from hubplugin_faiss.encoding.assemble import in_memory
from hubplugin_faiss.encoding.layout import Assemble, UpgradeSpec
from hubplugin_faiss.faiss_objects import block_rows, name_of
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.norm_bias import NormBias


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
    """The offsets of `index` by `model` in scan order, less its norm bias: float32 [n], centred if the model
    is not. They are those of what the index holds, its `gallery`, or where a second stage is to hold the `originals`,
    of these. `into` [n] is where they are written. tolerant: what the model cannot judge gets its smallest offset."""
    require_suits(model, index)
    warn_if_swapped(model, gallery.rows)
    offsets = np.empty(gallery.rows, np.float32) if into is None else into
    handler = handler_for(index)
    source = originals if originals is not None and handler.two_stage else gallery
    norm_bias, row, unjudged = NormBias(handler, model.metric is Metric.COSINE), 0, Unjudged()
    tolerant &= source is gallery
    for vectors in (part for part, _ in handler.scan(0, block_rows(index.d))) if tolerant else source.blocks():
        if tolerant:
            unit = model.metric is Metric.COSINE and not handler.lossy
            ids = handler.labels(row, row + len(vectors)).tolist()
            values = offsets_of_all(model, vectors, ids, unjudged, unit=unit, device=device, memory=memory)
        else:
            values = model.offsets(vectors, device=device, memory=memory)
        offsets[row : row + len(vectors)] = values - norm_bias(vectors)
        row += len(vectors)
        if progress is not None:
            progress("offsets", row, gallery.rows)
    if unjudged.count > gallery.rows / 2:
        raise InputError(f"the model does not suit this {name_of(index)}: of {gallery.rows} entries {unjudged}")
    if unjudged.count:
        warnings.warn(f"of {gallery.rows} entries {unjudged}", stacklevel=4)
    if source is originals:
        offsets[:] = offsets[handler.order()]
    if model.gallery is None:
        offsets -= offsets.mean(dtype=np.float64)
    return offsets


def upgrade_spec(
    offsets: np.ndarray, model: OffsetModel | None, assemble: Assemble = in_memory, **options: Any
) -> UpgradeSpec:
    """Room for `offsets` [n], for those of the model's gallery, and for half their range more on either side, since
    targets that come later may lie beyond."""
    low, high = float(offsets.min()), float(offsets.max())
    if model is not None and model.gallery is not None:
        low, high = min(low, model.gallery.smallest), max(high, model.gallery.largest)
    room = (high - low) / 2
    fingerprint, unit = ("", False) if model is None else (model.fingerprint, model.metric is Metric.COSINE)
    return UpgradeSpec(min(low - room, 0), max(high + room, 0), fingerprint, assemble, unit, **options)
