"""One handler a Faiss index type: how it is read, upgraded and downgraded."""

from hubplugin_faiss.handlers import fast_scan, flat, graph, inverted_lists, refine, two_stage, wrappers
from hubplugin_faiss.handlers.base import handler_for

__all__ = ["fast_scan", "flat", "graph", "handler_for", "inverted_lists", "refine", "two_stage", "wrappers"]
