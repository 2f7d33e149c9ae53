"""Banks: queries and what is known of their answers, of what kind they are, and texts that become vectors."""

from hubplugin.bank.bank import Bank as Bank
from hubplugin.bank.bank import BankLike as BankLike
from hubplugin.bank.bank import PreparedBank as PreparedBank
from hubplugin.bank.bank import places as places
from hubplugin.bank.bank import read_store as read_store
from hubplugin.bank.kinds import SEEN as SEEN
from hubplugin.bank.kinds import BankProfile as BankProfile
from hubplugin.bank.kinds import own_share as own_share
from hubplugin.bank.kinds import profile as profile
from hubplugin.bank.texts import holds_texts as holds_texts
