"""hubplugin for Chroma: a corrected copy beside a collection, and a `Collection` that answers from it."""

from hubplugin_chroma.client import HubCollection
from hubplugin_chroma.store import ChromaStore

__all__ = ["ChromaStore", "HubCollection"]
