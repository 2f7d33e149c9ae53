"""Helpers for Faiss objects: names, errors, settings, ownership and transforms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import faiss
import numpy as np

from hubplugin_faiss.encoding.codecs import set_floats

SETTINGS = (
    "verbose", "is_trained", "metric_type", "metric_arg",
    "nprobe", "max_codes", "parallel_mode", "by_residual", "quantizer_trains_alone",
    "do_polysemous_training", "polysemous_ht", "search_type", "encode_signs",
    "scan_table_threshold", "implem", "skip", "qbs", "qbs2",
    "init_level0", "keep_max_size_level0", "k_factor",
)  # fmt: skip
"""The fields of any index type that describe its training and its searches."""


def name_of(index: faiss.Index) -> str:
    """Return the name of an index's type."""
    return type(faiss.downcast_index(index)).__name__


def reason(error: RuntimeError | MemoryError) -> str:
    """Return the message of an error from Faiss, cleaned up.

    The signature of the function that raised it is removed. So are the first bytes of a
    file that is not an index, which may be confidential.
    """
    text = re.sub(
        r"^Error in .+? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL
    )
    return re.sub(
        r"Index type 0x\w+ \(.*\) not recognized",
        "it is not an index, or its type is unknown to this Faiss",
        " ".join(text.split()),
    )


def copy_settings(new: faiss.Index, old: faiss.Index) -> None:
    """Copy the number of entries and all existing `SETTINGS` from `old` to `new`."""
    new.ntotal = old.ntotal
    for field in SETTINGS:
        if hasattr(old, field):
            setattr(new, field, getattr(old, field))


def parts(index: faiss.Index) -> Iterator[faiss.Index]:
    """Yield `index` and all indexes inside it that find candidates."""
    index = faiss.downcast_index(index)
    yield index
    inner = getattr(index, "index", None) or getattr(index, "base_index", None)
    if inner is not None:
        yield from parts(inner)


def recount(index: faiss.Index) -> int:
    """Return the number of entries in the innermost index, and set it in all others."""
    index = faiss.downcast_index(index)
    for field in ("base_index", "refine_index", "index"):
        if hasattr(index, field):
            index.ntotal = recount(getattr(index, field))
    return index.ntotal


def transforms_of(index: faiss.IndexPreTransform) -> list[faiss.VectorTransform]:
    """Return the transforms in front of an index, which still owns them."""
    return [
        faiss.downcast_VectorTransform(index.chain.at(number))
        for number in range(index.chain.size())
    ]


def copy_transforms(index: faiss.IndexPreTransform) -> list[faiss.VectorTransform]:
    """Return copies of the transforms in front of an index.

    The transforms are written and read again, since Faiss's cloner supports few of
    them.
    """
    copies = []
    for transform in transforms_of(index):
        writer = faiss.VectorIOWriter()
        faiss.write_VectorTransform(transform, writer)
        reader = faiss.VectorIOReader()
        faiss.copy_array_to_vector(faiss.vector_to_array(writer.data), reader.data)
        copies.append(faiss.read_VectorTransform(reader))
    return copies


def pretransform(
    transforms: Sequence[faiss.VectorTransform], index: faiss.Index
) -> faiss.IndexPreTransform:
    """Return `index` behind `transforms`. The new index takes ownership of them."""
    new = faiss.IndexPreTransform(index)
    new.own_fields = True
    index.this.disown()
    for transform in reversed(transforms):
        new.prepend_transform(transform)
        transform.this.disown()
    new.ntotal = index.ntotal
    new.is_trained = True
    return new


def linear_transform(matrix: np.ndarray, bias: np.ndarray) -> faiss.LinearTransform:
    """Return the transform x -> `matrix` x + `bias`."""
    d_out, d = matrix.shape
    transform = faiss.LinearTransform(d, d_out, True)
    set_floats(transform.A, matrix)
    set_floats(transform.b, bias)
    transform.is_trained = True
    return transform


def is_mapped(index: faiss.Index) -> bool:
    """Return True if a query map precedes an index.

    A query map is the only transform, linear and with all biases -0. A file preserves
    this mark, and no training produces it.
    """
    index = faiss.downcast_index(index)
    if not isinstance(index, faiss.IndexPreTransform) or index.chain.size() != 1:
        return False
    (transform,) = transforms_of(index)
    if type(transform) is not faiss.LinearTransform or not transform.have_bias:
        return False
    bias = faiss.vector_to_array(transform.b)
    return not bias.any() and np.signbit(bias).all()


def normalises_queries(index: faiss.Index) -> bool:
    """Return True if `index` normalises queries (L2norm).

    Such an index cannot have a query map: the lengths of mapped queries matter.
    """
    return any(
        isinstance(transform, faiss.NormalizationTransform)
        for part in parts(index)
        if isinstance(part, faiss.IndexPreTransform)
        for transform in transforms_of(part)
    )
