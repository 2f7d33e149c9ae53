"""One handler a Faiss index type: how it is read, upgraded and downgraded."""

from hubplugin_faiss.handlers import codes, lists, wrappers
from hubplugin_faiss.handlers.base import handler_for

__all__ = ["codes", "handler_for", "lists", "wrappers"]
