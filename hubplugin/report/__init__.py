"""What a result shows, as values, and the one way in which they become text, HTML and JSON."""

from hubplugin.report.render import Reported as Reported
from hubplugin.report.render import as_text as as_text
from hubplugin.report.render import facts_of as facts_of
from hubplugin.report.sections import Answer as Answer
from hubplugin.report.sections import Example as Example
from hubplugin.report.sections import Histogram as Histogram
from hubplugin.report.sections import Hub as Hub
from hubplugin.report.sections import Plot as Plot
from hubplugin.report.sections import Report as Report
from hubplugin.report.sections import Share as Share
from hubplugin.report.sections import Table as Table
from hubplugin.report.sections import Tile as Tile
from hubplugin.report.sections import Verdict as Verdict
from hubplugin.report.sections import bank_tile as bank_tile
from hubplugin.report.sections import changes_told as changes_told
from hubplugin.report.sections import percent as percent
from hubplugin.report.sections import points as points
from hubplugin.report.sections import share_tile as share_tile
from hubplugin.report.sections import shares_tile as shares_tile
