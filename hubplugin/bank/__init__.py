"""Banks: queries, known answers, the kind of a bank, and texts that become vectors."""

from hubplugin.bank.bank import Bank as Bank
from hubplugin.bank.bank import BankLike as BankLike
from hubplugin.bank.kinds import SEEN as SEEN
from hubplugin.bank.kinds import BankProfile as BankProfile
from hubplugin.bank.kinds import own_share as own_share
from hubplugin.bank.kinds import profile as profile
from hubplugin.bank.prepared import SPACINGS as SPACINGS
from hubplugin.bank.prepared import SURVEYED as SURVEYED
from hubplugin.bank.prepared import PreparedBank as PreparedBank
from hubplugin.bank.prepared import Survey as Survey
from hubplugin.bank.prepared import Whole as Whole
from hubplugin.bank.prepared import find_missing as find_missing
from hubplugin.bank.prepared import places as places
from hubplugin.bank.prepared import read_store as read_store
from hubplugin.bank.prepared import spacing_ratio as spacing_ratio
from hubplugin.bank.texts import holds_texts as holds_texts
