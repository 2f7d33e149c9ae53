"""Banks: queries and what is known of their answers, of what kind they are, and texts that become vectors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hubplugin.bank.embedding import Embed, embedded, vectors_of
from hubplugin.bank.texts import Texts, holds_texts, read_clicks, read_texts

if TYPE_CHECKING:
    from hubplugin.bank.banks import Banks, Pairs, places
    from hubplugin.bank.kinds import SEEN, BankProfile, own_share, profile

# Looked up on first use, since a command line that reads texts needs no torch.
_HOMES = {
    "BankProfile": "kinds",
    "Banks": "banks",
    "Pairs": "banks",
    "SEEN": "kinds",
    "own_share": "kinds",
    "places": "banks",
    "profile": "kinds",
}

__all__ = [
    "SEEN",
    "BankProfile",
    "Banks",
    "Embed",
    "Pairs",
    "Texts",
    "embedded",
    "holds_texts",
    "own_share",
    "places",
    "profile",
    "read_clicks",
    "read_texts",
    "vectors_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hubplugin.bank' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hubplugin.bank.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
