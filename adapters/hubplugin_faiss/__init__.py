"""hubplugin for Faiss: an index goes in, an index of the same d comes out, and plain Faiss searches it corrected."""

from hubplugin_faiss.augment import add, downgrade, refresh, upgrade
from hubplugin_faiss.files import read_index, upgrade_file

__all__ = ["add", "downgrade", "read_index", "refresh", "upgrade", "upgrade_file"]
