"""Small helpers for the objects of Faiss: their names, errors, fields and owners."""

from __future__ import annotations

import re

import faiss
import numpy as np

from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions

BLOCK_BYTES = 8 << 20
"""Codes and vectors are handled in blocks of about this size, whatever the size of the index."""


def name_of(index: faiss.Index) -> str:
    return type(faiss.downcast_index(index)).__name__


def reason(error: RuntimeError) -> str:
    """The message of an error of Faiss, without the signature of the function that raised it, and without the first
    bytes of a file that is no index: it may be any file."""
    text = " ".join(re.sub(r"^Error in .+? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL).split())
    return re.sub(r"Index type 0x\w+ \(.*\) not recognized", "it is no index, or of a type unknown to this Faiss", text)


def block_rows(d: int) -> int:
    """How many vectors of d components make a block."""
    return max(1, BLOCK_BYTES // (4 * int(d)))


def pretransform(chain: list[faiss.VectorTransform], index: faiss.Index) -> faiss.Index:
    """An IndexPreTransform of the transforms `chain` and `index`, which takes all of them over."""
    new = faiss.IndexPreTransform(index)
    new.own_fields = handed_over(index)
    for transform in reversed(chain):
        new.prepend_transform(transform)
        transform.this.disown()
    new.ntotal, new.is_trained = index.ntotal, True
    return new


def appending(d: int, extra: ExtraDimensions) -> list[faiss.VectorTransform]:
    """The transforms from d components x to [x, q]."""
    remap = faiss.RemapDimensionsTransform(d, d + extra.width, False)
    centring = faiss.CenteringTransform(d + extra.width)
    faiss.copy_array_to_vector(np.concatenate([np.zeros(d, np.float32), -extra.query]), centring.mean)
    centring.is_trained = True
    return [remap, centring]


def handed_over(part: faiss.Index) -> bool:
    """Releases `part` to the C++ object that takes it over, and returns True for the field own_fields of that."""
    part.this.disown()
    return True


def copy_fields(new: faiss.Index, old: faiss.Index, *fields: str) -> None:
    """Copies from `old` to `new` the fields that every index has, and `fields`."""
    for field in ("ntotal", "verbose", "is_trained", "metric_type", "metric_arg", *fields):
        setattr(new, field, getattr(old, field))


def copied(index: faiss.Index) -> faiss.Index:
    """A copy made through Faiss's writer: its cloner knows few transforms."""
    return faiss.deserialize_index(faiss.serialize_index(index))
