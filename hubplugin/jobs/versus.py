"""The comparison that decides whether a new correction may replace the old one."""

from __future__ import annotations

from dataclasses import dataclass

from hubplugin.measures.significance import Side
from hubplugin.validation import Figures

WORSE = 0.1
"""Without known answers, a new correction is worse if skewness rises by more than this
share of the raw skewness. On eight galleries a bank of twice the size raised it by at
most 0.08, and every bank that raised it by more than 0.1 lost R@1, up to 2.4 points
(benchmarks/keeping.py)."""

TOLERATED = 0.01
"""The fall of R@1 that must be ruled out before a smaller bank replaces a larger."""


@dataclass(frozen=True)
class OldVersusNew:
    """The raw search and both corrections on held-out queries of the new bank.

    change: R@1 of the old and the new correction; None without known answers.
    share: The size of the new bank, as a share of the old bank's size.
    """

    raw: Figures
    old: Figures
    new: Figures
    change: Side | None
    share: float = 1.0

    @property
    def objection(self) -> str | None:
        """The reason against the new correction, with both figures; None without one.

        Changes of R@1 are judged by twice their standard error.
        """
        if self.change is None:
            rise = self.new.skewness - self.old.skewness
            is_worse = rise > WORSE * max(self.raw.skewness, 0.0)
            return self.figures if is_worse else None
        gain = self.change.change.value
        margin = 2 * self.change.error
        if gain < -margin:
            return self.figures
        # Only a smaller bank must also rule out a fall.
        if self.share >= 1 or gain - margin >= -TOLERATED:
            return None
        return (
            f"{self.figures}, and so few queries do not rule out a fall of "
            f"{100 * (margin - gain):.1f} points"
        )

    @property
    def figures(self) -> str:
        """The change from old to new: of R@1, or of hubness without known answers."""
        if self.change is not None:
            before = 100 * self.change.before
            change = f"from {before:.1f} to {100 * self.change.after:.1f}"
            return f"R@1 of held-out queries goes {change}"
        change = f"from {self.old.skewness:.2f} to {self.new.skewness:.2f}"
        return (
            f"hubness (skewness) of held-out queries goes {change}; it is "
            f"{self.raw.skewness:.2f} raw"
        )
