"""Copies of upgraded indexes that Faiss can clone to a GPU."""

from __future__ import annotations

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.handlers.lists import InvertedListsHandler
from hubplugin_faiss.handlers.wrappers import id_map_like
from hubplugin_faiss.index import upgraded_handler
from hubplugin_faiss.objects import (
    linear_transform,
    name_of,
    pretransform,
    transforms_of,
)

SQ = faiss.ScalarQuantizer

PARTS = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)
"""The numbers of 8-bit parts that PQ codes may have on a GPU."""


def for_gpu(index: faiss.Index) -> faiss.Index:
    """Return a copy of an upgraded index that `faiss.index_cpu_to_gpu` takes.

    Faiss's cloner does not support `CenteringTransform`. In the copy, one
    `LinearTransform` with bias replaces all transforms in front of a part of the index;
    it is somewhat slower on a CPU. PQ codes are padded with parts of zeros, up to a
    number of parts that GPUs support. Use the copy for searches only, and keep the
    upgraded index to inspect, refresh or downgrade it.

    Args:
        index: An upgraded index of a type that Faiss supports on GPUs;
            docs/faiss-types.md lists them. It is not changed.

    Returns:
        The copy, in CPU memory.

    Raises:
        StoreError: `index` is not upgraded, or Faiss does not support a part of it on
            GPUs.
    """
    upgraded_handler(index)  # raises: Faiss itself can clone a raw index
    return cloneable_copy(index)


def cloneable_copy(index: faiss.Index) -> faiss.Index:
    """Return a copy of `index` with the same number of components, or more.

    The transform in front of the copy sets the additional components to 0.
    """
    part = faiss.downcast_index(index)
    if isinstance(part, faiss.IndexIVF):
        quantizer = faiss.downcast_index(part.quantizer)
        if isinstance(quantizer, faiss.IndexPreTransform):
            cloneable_copy(quantizer)  # raises if Faiss cannot clone the quantizer
    match part:
        case faiss.IndexPreTransform():
            inner = cloneable_copy(part.index)
            return pretransform([merge(transforms_of(part), inner.d)], inner)
        case faiss.IndexIDMap():
            return id_map_like(part, cloneable_copy(part.index))
        case faiss.IndexIVFPQ():
            width = width_on_gpu(part)
            if width > part.d:
                return InvertedListsHandler(part).pad(width)
        case faiss.IndexIVFScalarQuantizer() if part.sq.qtype != SQ.QT_bf16:
            pass
        case faiss.IndexScalarQuantizer() if part.sq.qtype == SQ.QT_fp16:
            pass
        case faiss.IndexIVFFlat() | faiss.IndexFlat():
            pass
        case _:
            raise StoreError(
                f"Faiss does not support this {name_of(part)} on GPUs; "
                "docs/faiss-types.md lists the supported types"
            )
    return faiss.clone_index(part)


def width_on_gpu(part: faiss.IndexIVFPQ) -> int:
    """Return the dimensions of `part` once its PQ codes have a number of parts that
    GPUs support."""
    codes = part.pq
    counts = [count for count in PARTS if count >= codes.M]
    if codes.nbits != 8 or not counts:
        raise StoreError(
            f"on GPUs, PQ codes have at most {max(PARTS)} parts of 8 bits; with the "
            f"offsets, those of this {name_of(part)} have {codes.M} of {codes.nbits}"
        )
    return codes.dsub * counts[0]


def merge(steps: list[faiss.VectorTransform], d_out: int) -> faiss.LinearTransform:
    """Return one transform x -> A x + b that replaces all `steps`.

    The transform also appends zeros up to `d_out` components.
    """
    d = steps[0].d_in
    # Row 0 starts as 0 and becomes b; row i + 1 starts as unit vector i and becomes
    # column i of A. So only row 0 gets the biases.
    images = np.eye(d + 1, d, -1)
    for step in steps:
        match step:
            case faiss.RemapDimensionsTransform():
                images = step.apply(images.astype(np.float32)).astype(np.float64)
            case faiss.CenteringTransform():
                images[0] -= faiss.vector_to_array(step.mean)
            case faiss.LinearTransform():
                matrix = faiss.vector_to_array(step.A).reshape(step.d_out, step.d_in)
                images = images @ matrix.T.astype(np.float64)
                if step.have_bias:
                    images[0] += faiss.vector_to_array(step.b)
            case _:
                raise StoreError(
                    f"Faiss cannot clone a {type(step).__name__} (L2norm) to a GPU; "
                    "normalise vectors and queries yourself"
                )
    images = np.pad(images, ((0, 0), (0, d_out - images.shape[1])))
    return linear_transform(images[1:].T, images[0])
