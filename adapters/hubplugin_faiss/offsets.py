"""The offsets of a model for what an index holds, and the room that they need in its codes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hubplugin.errors import InputError
from hubplugin.jobs.write import Unjudged, offsets_of_all
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, warn_if_swapped
from hubplugin.store import Batch
from hubplugin.vectors import Progress, Vectors
from hubplugin_faiss.checks import require_suits
from hubplugin_faiss.encoding.extra_dimensions import Assemble, UpgradeSpec, in_memory
from hubplugin_faiss.faiss_objects import block_rows, name_of
from hubplugin_faiss.gallery import Gallery
from hubplugin_faiss.handlers.base import IndexHandler, NormBias

if TYPE_CHECKING:
    from hubplugin.admission import Admission


@dataclass(frozen=True)
class Resources:
    """Device and memory to compute offsets with, as in `hubplugin.fit`, and a callback for progress."""

    device: str = "auto"
    memory: int | str = "1GiB"
    progress: Progress | None = None

    def offsets(self, model: OffsetModel, vectors: np.ndarray) -> np.ndarray:
        """Offsets of `vectors` [b, d] by `model`: float32 [b]."""
        return model.offsets(vectors, device=self.device, memory=self.memory)

    def admitted(self, model: OffsetModel, vectors: np.ndarray, ids: Sequence[int], admission: Admission) -> np.ndarray:
        """The same of newcomers, as `admission` has them."""
        from hubplugin.compute import Compute

        return admission.offsets(model, vectors, ids, Compute(self.device, self.memory))

    def report(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress("offsets", done, total)


def offsets_by(
    model: OffsetModel,
    gallery: Gallery,
    resources: Resources,
    originals: Vectors | None = None,
    into: np.ndarray | None = None,
    tolerant: bool = False,
) -> np.ndarray:
    """Offsets for the entries of an index in scan order, less its norm bias: float32 [n].

    Args:
        model: its offsets are centred on the index if they are not yet centred on a gallery.
        gallery: the index.
        resources: with what they are computed.
        originals: the vectors [n, d] that a second stage is going to hold; their offsets are computed instead.
        into: float32 [n], where to write them, such as a mapped file.
        tolerant: entries that the model cannot judge get its smallest offset, and a warning.

    Raises:
        InputError: the model does not suit the index, or cannot judge more than half of its entries.
    """
    handler = gallery.handler
    require_suits(model, handler.index)
    warn_if_swapped(model, gallery.rows)
    offsets = np.empty(gallery.rows, np.float32) if into is None else into
    norm_bias, row, unjudged = NormBias(handler, model.metric is Metric.COSINE), 0, Unjudged()
    source = originals if originals is not None and handler.two_stage else gallery
    tolerant &= source is gallery
    computed = _tolerant(model, handler, resources, unjudged) if tolerant else _computed(model, source, resources)
    for vectors, values in computed:
        offsets[row : row + len(vectors)] = values - norm_bias(vectors)
        row += len(vectors)
        resources.report(row, gallery.rows)
    if unjudged.count > gallery.rows / 2:
        raise InputError(f"the model does not suit this {name_of(handler.index)}: of {gallery.rows} entries {unjudged}")
    if unjudged.count:
        warnings.warn(f"of {gallery.rows} entries {unjudged}", stacklevel=4)
    if source is originals:
        offsets[:] = offsets[handler.order()]
    if model.gallery is None:
        offsets -= offsets.mean(dtype=np.float64)
    return offsets


def _computed(model: OffsetModel, source: Vectors, resources: Resources) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Vectors [b, d] and offsets [b] of all of `source`."""
    for vectors in source.blocks():
        yield vectors, resources.offsets(model.members, vectors)


def _tolerant(
    model: OffsetModel, handler: IndexHandler, resources: Resources, unjudged: Unjudged
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Vectors [b, d] and offsets [b] of all entries, the smallest offset for those that are then in `unjudged`."""
    from hubplugin.compute import Compute

    unit, row = model.metric is Metric.COSINE and not handler.lossy, 0
    compute = Compute(resources.device, resources.memory)
    for vectors, _ in handler.scan(0, block_rows(handler.index.d)):
        ids = handler.labels(row, row + len(vectors)).tolist()
        batch = Batch(ids, vectors, np.full(len(ids), np.nan, np.float32))
        yield vectors, offsets_of_all(model.members, batch, unjudged, unit=unit, compute=compute)
        row += len(vectors)


def upgrade_spec(
    offsets: np.ndarray, model: OffsetModel | None, assemble: Assemble = in_memory, **options: Any
) -> UpgradeSpec:
    """A spec with room for `offsets` [n], for those of the model's gallery, and for half their range more on either
    side, since targets that are added later may lie beyond."""
    low, high = float(offsets.min()), float(offsets.max())
    if model is not None and model.gallery is not None:
        low, high = min(low, model.gallery.smallest), max(high, model.gallery.largest)
    room = (high - low) / 2
    fingerprint, unit = ("", False) if model is None else (model.fingerprint, model.metric is Metric.COSINE)
    return UpgradeSpec(min(low - room, 0), max(high + room, 0), fingerprint, assemble, unit, **options)
