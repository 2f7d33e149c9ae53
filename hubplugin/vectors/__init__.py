"""Whatever holds vectors, as checked blocks [rows, d] of float32."""

from hubplugin.vectors.base import BLOCK_ROWS as BLOCK_ROWS
from hubplugin.vectors.base import Directed as Directed
from hubplugin.vectors.base import OffsetsLike as OffsetsLike
from hubplugin.vectors.base import Progress as Progress
from hubplugin.vectors.base import Scannable as Scannable
from hubplugin.vectors.base import Sliceable as Sliceable
from hubplugin.vectors.base import SupportsArray as SupportsArray
from hubplugin.vectors.base import VectorLike as VectorLike
from hubplugin.vectors.base import Vectors as Vectors
from hubplugin.vectors.base import as_vectors as as_vectors
from hubplugin.vectors.base import cannot_keep as cannot_keep
from hubplugin.vectors.base import draw_sample as draw_sample
from hubplugin.vectors.base import fingerprint as fingerprint
from hubplugin.vectors.base import locate_rows as locate_rows
from hubplugin.vectors.base import one_line as one_line
from hubplugin.vectors.base import open_npy as open_npy
from hubplugin.vectors.base import original_rows as original_rows
from hubplugin.vectors.base import prepare as prepare
from hubplugin.vectors.base import prepare_blocks as prepare_blocks
from hubplugin.vectors.base import require_file as require_file
from hubplugin.vectors.base import take_rows as take_rows
from hubplugin.vectors.base import to_tempfile as to_tempfile
