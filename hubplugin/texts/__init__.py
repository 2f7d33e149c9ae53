"""Logs of texts: read (`files`), embedded (`embedding`) by a model that `models` finds; and their `clicks`."""

from hubplugin.texts.clicks import read_clicks
from hubplugin.texts.embedding import Embed, embedded, vectors_of
from hubplugin.texts.files import Texts, holds_texts, read_texts

__all__ = ["Embed", "Texts", "embedded", "holds_texts", "read_clicks", "read_texts", "vectors_of"]
