"""hubplugin for Faiss: turns an index into a corrected index of the same d.

Plain Faiss searches the corrected index.
"""

from hubplugin_faiss.certified_search import CorrectedSearch
from hubplugin_faiss.gpu import for_gpu
from hubplugin_faiss.index import Gallery, add, downgrade, remove_ids, upgrade
from hubplugin_faiss.store import open_store, read_index

__all__ = [
    "CorrectedSearch",
    "add",
    "downgrade",
    "for_gpu",
    "open_store",
    "read_index",
    "remove_ids",
    "upgrade",
]

vectors_in = Gallery
"""The class with which `hubplugin.vectors.as_vectors` reads an index.

So an index can be passed wherever vectors are expected.
"""
