"""One handler a Faiss index type: how it is read, upgraded and downgraded."""

from hubplugin_faiss.handlers import graph, lists, refine, wrappers
from hubplugin_faiss.handlers.base import handler_for

__all__ = ["graph", "handler_for", "lists", "refine", "wrappers"]
