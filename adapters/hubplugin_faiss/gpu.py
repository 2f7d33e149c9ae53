"""A copy of an upgraded index, of parts that Faiss clones to a GPU."""

from __future__ import annotations

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.handlers.base import handler_for, name_of, pretransform
from hubplugin_faiss.handlers.lists import InvertedListsHandler, centroids
from hubplugin_faiss.handlers.wrappers import copy_chain, id_map_like

PARTS = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)
"""In how many parts, of 8 bits each, PQ codes lie on a GPU."""

SCALARS = (
    "fp16",
    "8bit",
    "8bit_uniform",
    "8bit_direct",
    "6bit",
    "4bit",
    "4bit_uniform",
)
"""The scalar codes that inverted lists have on a GPU."""


def for_gpu(index: faiss.Index) -> faiss.Index:
    """A copy of an upgraded index that `faiss.index_cpu_to_gpu` takes.

    Faiss's cloner knows no `CenteringTransform`. One `LinearTransform` with bias does what the two transforms of an
    upgrade do: the same ids and scores to the bit, somewhat slower on a CPU. PQ codes get
    parts that hold 0, up to a number of parts that there is on a GPU. The copy is for searches alone: keep the upgraded
    index to inspect, refresh or downgrade it. For a moment it takes three times the memory of the index.

    Args:
        index: an upgraded index of a type that Faiss has on GPUs, which docs/faiss-types.md lists. It is not changed.

    Returns:
        The copy, in memory of the CPU.

    Raises:
        StoreError: `index` is not upgraded, or Faiss has nothing like a part of it on GPUs.
    """
    if not handler_for(index).extras:
        raise StoreError(
            f"this {name_of(index)} is not upgraded; for a GPU give it to faiss.index_cpu_to_gpu itself"
        )
    return _cloneable(faiss.deserialize_index(faiss.serialize_index(index)))


def _cloneable(index: faiss.Index) -> faiss.Index:
    """A copy of `index`, as wide or wider: what it is behind a transform for has 0 for the components that are new."""
    part = faiss.downcast_index(index)
    if isinstance(part, faiss.IndexPreTransform):
        inner = _cloneable(part.index)
        return pretransform(_linear(copy_chain(part), int(inner.d)), inner)
    if isinstance(part, faiss.IndexIDMap):
        return id_map_like(part, _cloneable(part.index))
    if isinstance(part, faiss.IndexIVF):
        _require_there(part)
        return _lists(part)
    half = (
        isinstance(part, faiss.IndexScalarQuantizer)
        and part.sq.qtype == faiss.ScalarQuantizer.QT_fp16
    )
    if not half and not isinstance(part, faiss.IndexFlat):
        raise _missing(part)
    return faiss.clone_index(part)


def _linear(
    links: list[faiss.VectorTransform], d_out: int
) -> list[faiss.VectorTransform]:
    """`links`, with one linear transform in the place of each run of those that move, append or drop components; the
    last appends zeros up to `d_out` components."""
    merged: list[faiss.VectorTransform] = []
    run: list[faiss.VectorTransform] = []
    for link in links:
        kind = type(faiss.downcast_VectorTransform(link))
        if kind is faiss.NormalizationTransform:
            raise StoreError(
                "Faiss clones no NormalizationTransform (L2norm) to a GPU; normalise vectors and queries"
            )
        if kind in (faiss.CenteringTransform, faiss.RemapDimensionsTransform):
            run.append(link)
            continue
        merged += [_as_one(run, run[-1].d_out)] if run else []
        merged.append(link)
        run = []
    if run:
        merged.append(_as_one(run, d_out))
    elif merged[-1].d_out != d_out:
        merged.append(faiss.RemapDimensionsTransform(merged[-1].d_out, d_out, False))
    return merged


def _as_one(run: list[faiss.VectorTransform], d_out: int) -> faiss.LinearTransform:
    """The transform of all in `run`, one after the other: x -> A x + b, then zeros up to `d_out` components."""
    d = run[0].d_in
    moved, matrix = np.zeros((1, d), np.float32), np.eye(d, dtype=np.float32)
    for step in run:
        moved = step.apply(moved)
        if isinstance(
            faiss.downcast_VectorTransform(step), faiss.RemapDimensionsTransform
        ):
            matrix = step.apply(matrix)
    link = faiss.LinearTransform(d, d_out, True)
    missing = d_out - moved.shape[1]
    faiss.copy_array_to_vector(
        np.pad(matrix, ((0, 0), (0, missing))).T.ravel().copy(), link.A
    )
    faiss.copy_array_to_vector(np.pad(moved[0], (0, missing)), link.b)
    link.is_trained = True
    return link


def _lists(part: faiss.IndexIVF) -> faiss.Index:
    quantizer = faiss.downcast_index(part.quantizer)
    if isinstance(quantizer, faiss.IndexPreTransform):
        quantizer = _cloneable(quantizer)
    else:
        quantizer = faiss.clone_index(quantizer)
    d = int(part.d)
    if isinstance(part, faiss.IndexIVFPQ):
        d = part.pq.dsub * min(number for number in PARTS if number >= part.pq.M)
    return InvertedListsHandler(part).pad(d, _pad_quantizer(quantizer, d))


def _pad_quantizer(quantizer: faiss.Index, d: int) -> faiss.Index:
    """A coarse quantizer of `d` components, the last of which count for nothing."""
    if quantizer.d == d:
        return quantizer
    if not isinstance(quantizer, faiss.IndexFlat):
        return pretransform(
            [faiss.RemapDimensionsTransform(d, int(quantizer.d), False)], quantizer
        )
    centres = centroids(quantizer, np.arange(quantizer.ntotal))
    wider = faiss.IndexFlat(d, quantizer.metric_type)
    wider.add(np.pad(centres, ((0, 0), (0, d - centres.shape[1]))))
    return wider


def _require_there(part: faiss.IndexIVF) -> None:
    if isinstance(part, faiss.IndexIVFPQ):
        if part.pq.nbits != 8:
            raise StoreError(
                f"PQ codes have 8 bits a part on GPUs, those of this {name_of(part)} have {part.pq.nbits}"
            )
        if max(PARTS) < part.pq.M:
            raise StoreError(
                f"PQ codes have at most {max(PARTS)} parts on GPUs; with the offsets these have {part.pq.M}"
            )
        return
    scalars = {getattr(faiss.ScalarQuantizer, f"QT_{kind}") for kind in SCALARS}
    if isinstance(part, faiss.IndexIVFScalarQuantizer) and part.sq.qtype in scalars:
        return
    if type(part) is not faiss.IndexIVFFlat:
        raise _missing(part)


def _missing(part: faiss.Index) -> StoreError:
    return StoreError(
        f"Faiss has no {name_of(part)} like this on GPUs; docs/faiss-types.md lists what it has there"
    )
