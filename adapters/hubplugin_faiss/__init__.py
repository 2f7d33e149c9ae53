"""hubplugin for Faiss: an index goes in, an index of the same d comes out, and plain Faiss searches it corrected."""

from typing import TYPE_CHECKING, Any

from hubplugin_faiss.file_reader import read_index
from hubplugin_faiss.files import upgrade_file
from hubplugin_faiss.gallery import Gallery
from hubplugin_faiss.index import add, downgrade, refresh, remove_ids, upgrade
from hubplugin_faiss.search_settings import tune

if TYPE_CHECKING:
    from hubplugin_faiss.certified_search import CorrectedSearch

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


def __getattr__(name: str) -> Any:
    if name == "CorrectedSearch":  # looked up on first use, because it imports torch
        from hubplugin_faiss.certified_search import CorrectedSearch

        return CorrectedSearch
    raise AttributeError(f"module 'hubplugin_faiss' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
