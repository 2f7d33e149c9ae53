"""hubplugin for Chroma: a corrected copy beside a collection, and a `Collection` that answers from it."""

from hubplugin_chroma.store import ChromaStore, HubCollection

__all__ = ["ChromaStore", "HubCollection"]
