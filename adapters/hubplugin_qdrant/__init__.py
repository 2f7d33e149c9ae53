"""hubplugin for Qdrant: corrects collections in place, and searches them corrected."""

from hubplugin_qdrant.client import AsyncHubQdrantClient, HubQdrantClient
from hubplugin_qdrant.store import QdrantStore, apply, inspect, refresh, remove

__all__ = ["AsyncHubQdrantClient", "HubQdrantClient", "QdrantStore", "apply", "inspect", "refresh", "remove"]
