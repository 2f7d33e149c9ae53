"""Banks: queries and what is known of their answers, of what kind they are, and texts that become vectors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hubplugin.bank.bank import Bank, BankLike
from hubplugin.bank.texts import holds_texts

if TYPE_CHECKING:
    from hubplugin.bank.kinds import SEEN, BankProfile, own_share, profile
    from hubplugin.bank.prepared import PreparedBank, places

# Looked up on first use, since a command line that reads texts needs no torch.
_HOMES = {
    "BankProfile": "kinds",
    "PreparedBank": "prepared",
    "SEEN": "kinds",
    "own_share": "kinds",
    "places": "prepared",
    "profile": "kinds",
}

__all__ = [
    "SEEN",
    "Bank",
    "BankLike",
    "BankProfile",
    "PreparedBank",
    "holds_texts",
    "own_share",
    "places",
    "profile",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hubplugin.bank' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hubplugin.bank.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
