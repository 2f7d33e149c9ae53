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
    """The old and the new correction on held-out queries of the new bank: `old` and `new`; `raw` is no correction.

    gain, error: of R@1 of the new one over the old one, 0 to 1, and its standard error; None without known answers.
    queries, share: how many queries of the new bank were held out, and its size as a share of the old one's.
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
        """Compare `old` and `new` by the `margins` of no correction, the old and the new one."""
        change = change_of(margins, 1, 2)
        return cls(
            Figures.of(margins, 0),
            Figures.of(margins, 1, old.method, old.parameters),
            Figures.of(margins, 2, new.name, new.parameters),
            gain=None if change is None else change.change.value,
            error=None if change is None else change.error,
            queries=queries,
            share=queries / len(old.terms[0].bank),
        )

    @property
    def objection(self) -> str | None:
        """The reason why the new correction is worse, with both figures; None if it is not."""
        if self.gain is None or self.error is None:
            rise = self.new.skewness - self.old.skewness
            worse = rise > WORSE * max(self.raw.skewness, 0.0)
            return self.figures if worse else None
        if self.gain < -2 * self.error:
            return self.figures
        lowest = self.gain - 2 * self.error
        if self.share >= 1 or lowest >= -TOLERATED:
            return None
        return (
            f"{self.figures}, and so few queries do not rule out a fall of "
            f"{-100 * lowest:.1f} points; {self._enough(self.gain, self.error):,} would do"
        )

    def _enough(self, gain: float, error: float) -> int:
        """Return how many queries would rule out a fall, at the error of these queries.

        At most as many as the old bank has: a bank of that size need not rule it out.
        """
        as_many_as_old = round(self.queries / self.share)
        margin = gain + TOLERATED
        if margin <= 0:
            return as_many_as_old
        wanted = self.queries * (2 * error / margin) ** 2
        return min(as_many_as_old, round(wanted))

    @property
    def figures(self) -> str:
        """The change from the old to the new correction: of R@1, else of hubness."""
        if self.old.recall is not None and self.new.recall is not None:
            return f"R@1 of held-out queries goes from {100 * self.old.recall:.1f} to {100 * self.new.recall:.1f}"
        return (
            f"hubness (skewness) of held-out queries goes from {self.old.skewness:.2f} to {self.new.skewness:.2f}, "
            f"where it is {self.raw.skewness:.2f} raw"
        )
