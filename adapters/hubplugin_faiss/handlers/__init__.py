"""Handlers that read, upgrade and downgrade Faiss indexes, one for each type."""

from hubplugin_faiss.handlers import codes, lists, wrappers
from hubplugin_faiss.handlers.base import handler_for

__all__ = ["codes", "handler_for", "lists", "wrappers"]
