"""The coarse quantizer of an index with inverted lists, with offsets of its own for the lists and without."""

from __future__ import annotations

import faiss
import numpy as np

from hubplugin_faiss.encoding.assemble import in_memory
from hubplugin_faiss.encoding.codec import Coder
from hubplugin_faiss.encoding.codecs import FloatCodec
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.layout import UpgradeSpec
from hubplugin_faiss.faiss_objects import appending, name_of, pretransform
from hubplugin_faiss.handlers.base import handler_for
from hubplugin_faiss.handlers.base_index import base_index_handler
from hubplugin_faiss.handlers.flat import FlatCodesHandler
from hubplugin_faiss.handlers.graph import GraphHandler

FLOATS = ("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexHNSWFlat")
"""The coarse quantizers that hold their centroids as floats."""


def widened_quantizer(quantizer: faiss.Index, coder: Coder, ranks: np.ndarray) -> tuple[faiss.Index, np.ndarray]:
    """A coarse quantizer of d + w components whose centroids rank as if each had the offset in `ranks` [nlist], and
    their extra components [nlist, w].

    One that does not hold its centroids as floats stays as it is behind a transform that drops the extra dimensions.
    """
    quantizer = faiss.downcast_index(quantizer)
    if name_of(quantizer) in FLOATS:
        is_flat = name_of(quantizer) in FlatCodesHandler.names
        handler = FlatCodesHandler(quantizer) if is_flat else GraphHandler(quantizer)
        centres = coder.centres(ranks)
        floats = FloatCodec(quantizer).coder(quantizer.d, coder.extra)
        return handler.widened_by(floats, centres), centres
    d, width = int(quantizer.d), coder.extra.width
    drop = faiss.RemapDimensionsTransform(d + width, d, False)
    return pretransform([drop], faiss.clone_index(quantizer)), np.zeros((len(ranks), width), np.float32)


def ranked_quantizer(quantizer: faiss.Index, ranks: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
    """A coarse quantizer of the same d whose centroids rank as if each had the offset in `ranks` [nlist]."""
    if name_of(quantizer) not in FLOATS:
        return faiss.clone_index(quantizer)
    coder = FloatCodec(quantizer).design(spec, ranks, None)
    return pretransform(appending(int(quantizer.d), coder.extra), widened_quantizer(quantizer, coder, ranks)[0])


def unranked_quantizer(quantizer: faiss.Index) -> faiss.Index:
    """The coarse quantizer that `ranked_quantizer` was given."""
    if name_of(quantizer) != "IndexPreTransform":
        return faiss.clone_index(quantizer)
    return handler_for(quantizer).downgraded(in_memory)


def narrowed_quantizer(quantizer: faiss.Index, d: int, extra: ExtraDimensions) -> faiss.Index:
    """The coarse quantizer of d components that `widened_quantizer` was given."""
    quantizer = faiss.downcast_index(quantizer)
    if isinstance(quantizer, faiss.IndexPreTransform):
        return faiss.clone_index(faiss.downcast_index(quantizer.index))
    return base_index_handler(quantizer).narrowed(d, extra, in_memory)


def nearest_lists(quantizer: faiss.Index, vectors: np.ndarray, extra: ExtraDimensions) -> np.ndarray:
    """The list that each of `vectors` [n, d] has in the raw index, where lists have no offsets: int64 [n]."""
    if extra.euclidean:
        return np.ascontiguousarray(
            narrowed_quantizer(quantizer, vectors.shape[1], extra).search(vectors, 1)[1].ravel()
        )
    blank = np.zeros((len(vectors), extra.width), np.float32)
    return np.ascontiguousarray(quantizer.search(np.concatenate([vectors, blank], axis=1), 1)[1].ravel())


def replace_quantizer(index: faiss.Index, quantizer: faiss.Index) -> None:
    """Replaces the coarse quantizer of the IVF `index`, which owns it."""
    old = faiss.downcast_index(index.quantizer)
    index.quantizer = quantizer  # which it owns from now on
    old.this.acquire()
