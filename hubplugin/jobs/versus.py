"""Whether a new correction may take the place of the old one."""

from __future__ import annotations

from dataclasses import dataclass

from hubplugin.measures.significance import Side
from hubplugin.methods import Method
from hubplugin.model import OffsetModel
from hubplugin.validation import Figures, Margins, change_of

WORSE = 0.1
"""Without known answers, a new correction is worse if skewness rises by more than this
share of raw skewness. On eight galleries a bank of twice the size rises by 0.08 at most;
every bank that rose by more than 0.1 lost R@1, up to 2.4 points (benchmarks/keeping.py)."""

TOLERATED = 0.01
"""The fall of R@1 that must be ruled out before a smaller bank replaces a larger one."""


@dataclass(frozen=True)
class OldVersusNew:
    """The old and the new correction on held-out queries of the new bank; `raw` is without.

    change: R@1 of the old and of the new one; None without known answers.
    share: the size of the new bank as a share of the old one's.
    """

    raw: Figures
    old: Figures
    new: Figures
    change: Side | None
    share: float = 1.0

    @classmethod
    def of(
        cls, margins: Margins, old: OffsetModel, new: Method, queries: int
    ) -> OldVersusNew:
        """Compare by the `margins` of no correction, the old and the new one.

        queries: how many the new bank has.
        """
        return cls(
            Figures.of(margins, 0),
            Figures.of(margins, 1, old.method, old.parameters),
            Figures.of(margins, 2, new.name, new.parameters),
            change_of(margins, 1, 2),
            queries / len(old.terms[0].bank),
        )

    @property
    def objection(self) -> str | None:
        """The reason why the new correction is worse, with both figures; None if it is not."""
        if self.change is None:
            rise = self.new.skewness - self.old.skewness
            worse = rise > WORSE * max(self.raw.skewness, 0.0)
            return self.figures if worse else None
        gain = self.change.change.value
        lowest = gain - 2 * self.change.error
        if gain < -2 * self.change.error:
            return self.figures
        if self.share >= 1 or lowest >= -TOLERATED:
            return None
        return (
            f"{self.figures}, and so few queries do not rule out a fall of "
            f"{-100 * lowest:.1f} points"
        )

    @property
    def figures(self) -> str:
        """The change from the old to the new correction: of R@1, else of hubness."""
        if self.change is not None:
            before = 100 * self.change.before
            change = f"from {before:.1f} to {100 * self.change.after:.1f}"
            return f"R@1 of held-out queries goes {change}"
        change = f"from {self.old.skewness:.2f} to {self.new.skewness:.2f}"
        return (
            f"hubness (skewness) of held-out queries goes {change}, where it is "
            f"{self.raw.skewness:.2f} raw"
        )
