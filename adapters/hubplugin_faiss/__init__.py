"""hubplugin for Faiss: an index goes in, and a corrected one of the same d comes out.

Plain Faiss searches it.
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
"""What `hubplugin.vectors.as_vectors` reads an index by: so one may be passed wherever
vectors are."""
