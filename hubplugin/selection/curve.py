"""By how much which size of bank helps, seen on the bank itself."""

from __future__ import annotations

from dataclasses import dataclass

from hubplugin.methods.blend import Blend
from hubplugin.selection.experiment import Experiment

SMALLEST, MOST = 25, 7
"""Where the curve begins, and its points at most: each has twice the queries of the one before."""


@dataclass(frozen=True)
class CurvePoint:
    """A fit on `queries` bank queries, tried on others. skewness: of the k-occurrence. recall: R@1, 0 to 1; gain,
    error: its gain over no correction and the standard error of that; all None without pairs."""

    queries: int
    skewness: float
    recall: float | None = None
    gain: float | None = None
    error: float | None = None

    def __str__(self) -> str:
        if self.gain is None or self.error is None:
            return f"{self.queries} queries: skewness {self.skewness:.2f}"
        return f"{self.queries} queries: R@1 {100 * self.gain:+.1f} points (+-{196 * self.error:.1f})"


def curve_by(experiment: Experiment) -> list[CurvePoint]:
    """What the default method does if it is fitted on ever more of the bank: no bank first, all that can be held out of
    last. Each fit is tried on the same held-out queries. A method that was chosen on the whole bank is chosen for its
    size; the default makes itself weaker where the bank is small."""
    configuration = Blend.model_validate({})
    (uncorrected,) = experiment.run([None])
    before = uncorrected.candidate(uncorrected)
    found = [CurvePoint(0, before.skewness, before.recall, before.gain, before.error)]
    for size in sizes(experiment.fitted):
        (trial,) = experiment.run([configuration], size)
        after = trial.candidate(uncorrected)
        found.append(CurvePoint(size, after.skewness, after.recall, after.gain, after.error))
    return found


def sizes(fitted: int) -> list[int]:
    """The sizes that are tried, ascending: `fitted`, and halves of it."""
    halves = [fitted >> step for step in range(MOST)]
    return sorted({size for size in halves if size >= min(SMALLEST, fitted)})
