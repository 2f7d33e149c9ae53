"""Banks: queries, known answers, the kind of a bank, and texts that become vectors."""

from hubplugin.bank.bank import Bank, BankLike
from hubplugin.bank.kinds import SEEN, BankProfile, own_share, profile
from hubplugin.bank.prepared import (
    SPACINGS,
    PreparedBank,
    Survey,
    WholeGallery,
    compare,
    find_missing,
    number_rows,
    places,
    read_store,
    spacing_ratio,
)
from hubplugin.bank.texts import holds_texts

__all__ = [
    "SEEN",
    "SPACINGS",
    "Bank",
    "BankLike",
    "BankProfile",
    "PreparedBank",
    "Survey",
    "WholeGallery",
    "compare",
    "find_missing",
    "holds_texts",
    "number_rows",
    "own_share",
    "places",
    "profile",
    "read_store",
    "spacing_ratio",
]
