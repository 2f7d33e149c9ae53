"""Whatever holds vectors, as checked blocks [rows, d] of float32."""

from hubplugin.vectors.base import (
    BLOCK_ROWS,
    Progress,
    Scannable,
    Sliceable,
    Spread,
    Vectors,
    fingerprint,
    one_line,
    spool,
)
from hubplugin.vectors.shards import SHARD_ROWS, FileShard, GalleryLike, Shard, even_ranges, shards_of
from hubplugin.vectors.sources import Number, OffsetsLike, SupportsArray, VectorLike, as_vectors

__all__ = [
    "BLOCK_ROWS",
    "SHARD_ROWS",
    "FileShard",
    "GalleryLike",
    "Number",
    "OffsetsLike",
    "Progress",
    "Scannable",
    "Shard",
    "Sliceable",
    "Spread",
    "SupportsArray",
    "VectorLike",
    "Vectors",
    "as_vectors",
    "even_ranges",
    "fingerprint",
    "one_line",
    "shards_of",
    "spool",
]
