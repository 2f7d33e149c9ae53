"""hubplugin for Faiss: an index goes in, an index of the same d comes out, and plain Faiss searches it corrected."""

from hubplugin_faiss.calibration import tune
from hubplugin_faiss.certified_search import CorrectedSearch
from hubplugin_faiss.index import Gallery, add, downgrade, refresh, remove_ids, upgrade
from hubplugin_faiss.index_file import read_index, upgrade_file

__all__ = [
    "CorrectedSearch",
    "Gallery",
    "add",
    "downgrade",
    "read_index",
    "refresh",
    "remove_ids",
    "tune",
    "upgrade",
    "upgrade_file",
]
