"""What the commands print with `--json`, by type; docs/reference/json.md is made from them.

Results of jobs tell themselves (`hubplugin.jobs.facts`). Typed here are the figures that a command gathers.
"""

from __future__ import annotations

from pydantic import BaseModel

from hubplugin.jobs.facts import CorrectionFacts, ModelFacts


class Removed(BaseModel):
    """What was taken out: the correction, and the model that was active before, null where there was none or it cannot
    be read. written: false after a dry run."""

    written: bool
    correction: CorrectionFacts | None
    previous: ModelFacts | None


class RecordedBank(BaseModel):
    """What is recorded now: so many queries and, unless there are none, their dimensions, how many were asked (seen),
    about how many of these differ, and when the first and the last was asked. clicks: how often targets were
    clicked for them; pairs: of how many different queries and targets; targets: how many. written: whether any went."""

    folder: str
    written: bool
    queries: int = 0
    dim: int | None = None
    seen: int | None = None
    different: int | None = None
    first: str | None = None
    last: str | None = None
    texts: bool | None = None
    clicks: int = 0
    pairs: int = 0
    targets: int = 0
