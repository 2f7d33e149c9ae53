"""The coarse quantizer of an index with inverted lists, with offsets of its own for the lists and without."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from hubplugin_faiss.encoding.assemble import in_memory
from hubplugin_faiss.encoding.codec import Coder
from hubplugin_faiss.encoding.codecs import FloatCodec
from hubplugin_faiss.encoding.extra_dimensions import Tail
from hubplugin_faiss.encoding.layout import Plan
from hubplugin_faiss.faiss_objects import appending, name_of, pretransform
from hubplugin_faiss.handlers.base import rule_for
from hubplugin_faiss.handlers.base_index import leaf_for
from hubplugin_faiss.handlers.flat import Row
from hubplugin_faiss.handlers.graph import Graph

FLOATS = ("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexHNSWFlat")
"""The coarse quantizers that hold their centroids as floats."""


def widened_quantizer(quantizer: Any, coder: Coder, ranks: np.ndarray) -> tuple[Any, np.ndarray]:
    """A coarse quantizer of d + w components whose centroids rank as if each had the offset in `ranks` [nlist], and
    their tails [nlist, w].

    One that does not hold its centroids as floats stays as it is behind a transform that drops the tail.
    """
    quantizer = faiss.downcast_index(quantizer)
    rule = Row(quantizer) if name_of(quantizer) in Row.names else Graph(quantizer)
    if name_of(quantizer) in FLOATS:
        centres = coder.centres(ranks)
        floats = FloatCodec(quantizer).coder(quantizer.d, coder.tail)
        return rule.widened_by(floats, centres), centres
    d, width = int(quantizer.d), coder.tail.width
    drop = faiss.RemapDimensionsTransform(d + width, d, False)
    return pretransform([drop], faiss.clone_index(quantizer)), np.zeros((len(ranks), width), np.float32)


def ranked_quantizer(quantizer: Any, ranks: np.ndarray, plan: Plan) -> Any:
    """A coarse quantizer of the same d whose centroids rank as if each had the offset in `ranks` [nlist]."""
    if name_of(quantizer) not in FLOATS:
        return faiss.clone_index(quantizer)
    coder = FloatCodec(quantizer).plan(plan, ranks, None)
    return pretransform(appending(int(quantizer.d), coder.tail), widened_quantizer(quantizer, coder, ranks)[0])


def unranked_quantizer(quantizer: Any) -> Any:
    """The coarse quantizer that `ranked_quantizer` was given."""
    if name_of(quantizer) != "IndexPreTransform":
        return faiss.clone_index(quantizer)
    return rule_for(quantizer).downgraded(in_memory)


def narrowed_quantizer(quantizer: Any, d: int, tail: Tail) -> Any:
    """The coarse quantizer of d components that `widened_quantizer` was given."""
    quantizer = faiss.downcast_index(quantizer)
    if isinstance(quantizer, faiss.IndexPreTransform):
        return faiss.clone_index(faiss.downcast_index(quantizer.index))
    return leaf_for(quantizer).narrowed(d, tail, in_memory)


def nearest_lists(quantizer: Any, vectors: np.ndarray, tail: Tail) -> np.ndarray:
    """The list of each of `vectors` [n, d] by its vector alone: int64 [n]."""
    if tail.euclidean:
        return np.ascontiguousarray(narrowed_quantizer(quantizer, vectors.shape[1], tail).search(vectors, 1)[1].ravel())
    blank = np.zeros((len(vectors), tail.width), np.float32)
    return np.ascontiguousarray(quantizer.search(np.concatenate([vectors, blank], axis=1), 1)[1].ravel())


def replace_quantizer(index: Any, quantizer: Any) -> None:
    """Gives the IVF `index`, which owns its coarse quantizer, another one."""
    old = faiss.downcast_index(index.quantizer)
    index.quantizer = quantizer  # which it owns from now on
    old.this.acquire()
