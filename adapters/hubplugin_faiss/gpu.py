"""A copy of an upgraded index, of parts that Faiss clones to a GPU."""

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
"""In how many parts, of 8 bits each, PQ codes lie on a GPU."""


def for_gpu(index: faiss.Index) -> faiss.Index:
    """Return a copy of an upgraded index that `faiss.index_cpu_to_gpu` takes.

    Faiss's cloner knows no `CenteringTransform`. One `LinearTransform` with bias does
    what all transforms before a part of the index do, somewhat slower on a CPU. PQ
    codes get parts that hold 0, up to a number of parts that there is on a GPU. The
    copy is for searches alone: keep the upgraded index to inspect, refresh or downgrade
    it.

    Args:
        index: An upgraded index of a type that Faiss has on GPUs, which
            docs/faiss-types.md lists. It is not changed.

    Returns:
        The copy, in memory of the CPU.

    Raises:
        StoreError: `index` is not upgraded, or Faiss has nothing like a part of it on
            GPUs.
    """
    upgraded_handler(index)  # or it is refused: Faiss clones it as it is
    return cloneable(index)


def cloneable(index: faiss.Index) -> faiss.Index:
    """Return a copy of `index`, as wide or wider.

    Behind a transform, it has 0 for the components that are new.
    """
    part = faiss.downcast_index(index)
    if isinstance(part, faiss.IndexIVF):
        quantizer = faiss.downcast_index(part.quantizer)
        if isinstance(quantizer, faiss.IndexPreTransform):
            cloneable(quantizer)  # or it is refused
    match part:
        case faiss.IndexPreTransform():
            inner = cloneable(part.index)
            return pretransform([as_one(transforms_of(part), inner.d)], inner)
        case faiss.IndexIDMap():
            return id_map_like(part, cloneable(part.index))
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
                f"Faiss has no {name_of(part)} like this on GPUs; docs/faiss-types.md "
                "lists what it has there"
            )
    return faiss.clone_index(part)


def width_on_gpu(part: faiss.IndexIVFPQ) -> int:
    """Return the dimensions of PQ codes with as many parts as there are on a GPU."""
    codes = part.pq
    counts = [count for count in PARTS if count >= codes.M]
    if codes.nbits != 8 or not counts:
        raise StoreError(
            f"on GPUs PQ codes have at most {max(PARTS)} parts of 8 bits; with the "
            f"offsets those of this {name_of(part)} have {codes.M} of {codes.nbits}"
        )
    return codes.dsub * counts[0]


def as_one(steps: list[faiss.VectorTransform], d_out: int) -> faiss.LinearTransform:
    """Return one transform x -> A x + b that does what all `steps` do.

    It appends zeros up to `d_out` components.
    """
    d = steps[0].d_in
    images = np.eye(d + 1, d, -1)  # of 0, then of each unit vector
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
                    f"Faiss clones no {type(step).__name__} (L2norm) to a GPU; normalise "
                    "vectors and queries"
                )
    images = np.pad(images, ((0, 0), (0, d_out - images.shape[1])))
    return linear_transform(images[1:].T, images[0])
