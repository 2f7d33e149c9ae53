"""hubplugin for Qdrant Edge; needs `hubplugin[edge]`.

`store`, `writing` and `folder` (manifest and models) are what `store`, `writing` and `collection_metadata` are for a
collection. `shard` asks the engine, `searches` makes its requests.
"""

from hubplugin_qdrant.edge.store import EdgeStore, open_url

__all__ = ["EdgeStore", "open_url"]
