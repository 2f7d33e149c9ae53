"""Whether a new correction may take the place of the old one."""

from __future__ import annotations

from dataclasses import dataclass

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

    gain, error: of R@1 of the new one over the old one, 0 to 1, and its standard error;
        None without known answers.
    queries, share: how many queries of the new bank were held out, and its size as a share
        of the old one's.
    """

    raw: Figures
    old: Figures
    new: Figures
    gain: float | None
    error: float | None
    queries: int = 0
    share: float = 1.0

    @classmethod
    def of(
        cls, margins: Margins, old: OffsetModel, new: Method, queries: int
    ) -> OldVersusNew:
        """Compare by the `margins` of no correction, the old and the new one."""
        gain = error = None
        change = change_of(margins, 1, 2)
        if change is not None:
            gain = change.change.value
            error = change.error
        return cls(
            Figures.of(margins, 0),
            Figures.of(margins, 1, old.method, old.parameters),
            Figures.of(margins, 2, new.name, new.parameters),
            gain,
            error,
            queries,
            queries / len(old.terms[0].bank),
        )

    @property
    def objection(self) -> str | None:
        """The reason why the new correction is worse, with both figures; None if it is not."""
        if self.gain is None or self.error is None:
            rise = self.new.skewness - self.old.skewness
            worse = rise > WORSE * max(self.raw.skewness, 0.0)
            return self.figures if worse else None
        lowest = self.gain - 2 * self.error
        if self.gain < -2 * self.error:
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
        before = self.old.recall
        after = self.new.recall
        if before is not None and after is not None:
            change = f"from {100 * before:.1f} to {100 * after:.1f}"
            return f"R@1 of held-out queries goes {change}"
        change = f"from {self.old.skewness:.2f} to {self.new.skewness:.2f}"
        return (
            f"hubness (skewness) of held-out queries goes {change}, where it is "
            f"{self.raw.skewness:.2f} raw"
        )
