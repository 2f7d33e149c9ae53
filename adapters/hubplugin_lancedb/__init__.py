"""hubplugin for LanceDB: a corrected copy of the vectors in a column of the table."""

from hubplugin_lancedb.store import LanceStore

__all__ = ["LanceStore"]
