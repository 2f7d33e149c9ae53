"""Whatever holds vectors, as checked blocks [rows, d] of float32."""

from hubplugin.vectors.base import BLOCK_ROWS, Progress, Scannable, Sliceable, Vectors, fingerprint, spool
from hubplugin.vectors.sources import Number, OffsetsLike, SupportsArray, VectorLike, as_vectors

__all__ = [
    "BLOCK_ROWS",
    "Number",
    "OffsetsLike",
    "Progress",
    "Scannable",
    "Sliceable",
    "SupportsArray",
    "VectorLike",
    "Vectors",
    "as_vectors",
    "fingerprint",
    "spool",
]
