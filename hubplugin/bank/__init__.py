"""Banks: queries and what is known of their answers, of what kind they are, and texts that become vectors."""

from hubplugin.bank.bank import Bank, BankLike
from hubplugin.bank.kinds import SEEN, BankProfile, own_share, profile
from hubplugin.bank.prepared import PreparedBank, places
from hubplugin.bank.texts import holds_texts

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
