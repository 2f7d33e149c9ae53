"""What a result shows, as values, and the one way in which they become text, HTML and JSON."""

from hubplugin.report.render import Reported, as_text, facts_of
from hubplugin.report.sections import (
    Answer,
    Example,
    Histogram,
    Hub,
    Plot,
    Report,
    Share,
    Table,
    Tile,
    Verdict,
    bank_tile,
    changes_told,
    percent,
    points,
    share_tile,
    shares_tile,
)

__all__ = [
    "Answer",
    "Example",
    "Histogram",
    "Hub",
    "Plot",
    "Report",
    "Reported",
    "Share",
    "Table",
    "Tile",
    "Verdict",
    "as_text",
    "bank_tile",
    "changes_told",
    "facts_of",
    "percent",
    "points",
    "share_tile",
    "shares_tile",
]
