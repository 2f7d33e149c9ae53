"""One cause of bad searches, looked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """Whether a cause is there: found is None where that cannot be told.

    says: what was seen, one sentence. advice: what to do, where it is there or could be told with more. figures: what
    it was told by.
    """

    cause: str
    found: bool | None
    says: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        verdict = {True: "YES", False: "no", None: "?"}[self.found]
        advice = f"; {self.advice}" if self.advice and self.found is not False else ""
        return f"{self.cause}: {verdict}. {self.says}{advice}"
