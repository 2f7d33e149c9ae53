"""What `evaluate_store` found, as a value."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from hubplugin.evaluation.examples import Example
from hubplugin.evaluation.result import Share
from hubplugin.measures.significance import Comparison, Figure


class Ranking(BaseModel):
    """What one ranking does for all queries. Shares are 0 to 1.

    recall: R@k by k. worst: share of the queries that find the worst hub. most_found: share of all places that the most
    found 1 % of the targets take; never: of the targets, the share that no query finds; skewness: of the k-occurrence.
    They are None under a filter, which leaves nobody knows how many targets. occurrences: how many targets have the
    k-occurrence N, by N.
    """

    model_config = ConfigDict(frozen=True)

    recall: dict[int, Figure]
    worst: float
    most_found: float | None
    never: float | None
    skewness: float | None
    occurrences: dict[int, int]


class StoreHub(BaseModel):
    """A target that the raw search finds for too many queries, and how many find it."""

    model_config = ConfigDict(frozen=True)

    id: int | str
    name: str
    raw: int
    corrected: int | None


class StoreEvaluation(BaseModel):
    """A store searched raw and corrected for the same queries; corrected is None without an active correction.

    judged: how many queries have a true target. versus: R@1 of the corrected ranking against the raw one. asked,
    not_asked: queries whose true target is, or is not, the nearest of a query of the bank.
    """

    model_config = ConfigDict(frozen=True)

    store: str
    method: str | None
    condition: str | None
    queries: int
    judged: int
    targets: int
    k: int
    raw: Ranking
    corrected: Ranking | None
    versus: Comparison | None
    asked: Share | None = None
    not_asked: Share | None = None
    hubs: list[StoreHub]
    examples: list[Example]

    def __str__(self) -> str:
        named = [hub.name + " by " + moved(hub.raw, hub.corrected) for hub in self.hubs[:10]]
        lines = [
            f"{self.store}: {self.targets:,} targets, {self.queries:,} queries, {self.judged:,} with a known target",
            *([f"filter: {self.condition}"] if self.condition else []),
            self.method or "no active correction: the raw search alone",
            *self.sentences(),
            f"hubs: {', '.join(named)}",
        ]
        return "\n".join(lines)

    def sentences(self) -> list[str]:
        """What was measured, a line each."""
        lines = []
        for k, figure in self.raw.recall.items():
            after = None if self.corrected is None else self.corrected.recall[k]
            lines.append(f"R@{k}: {_interval(figure)}" + (f" -> {_interval(after)}" if after else ""))
        if self.versus is not None:
            change, won, lost = self.versus.difference, self.versus.won, self.versus.lost
            lines.append(
                f"R@1 changes by {100 * change.value:+.1f} points (95 % interval {100 * change.low:+.1f} to "
                f"{100 * change.high:+.1f}): {won} queries won, {lost} lost (p {self.versus.p:.3g})"
            )
        for label, share in (("asked before", self.asked), ("not asked before", self.not_asked)):
            if share is not None:
                lines.append(
                    f"{label}: R@1 {100 * share.before:.1f} -> {100 * share.after:.1f} ({share.queries} queries)"
                )
        return [*lines, *self._hubness()]

    def _hubness(self) -> list[str]:
        told = (
            (f"queries that find the worst hub in the top {self.k}", "worst", 100, " %"),
            ("places that the most found 1 % of the targets take", "most_found", 100, " %"),
            ("targets that no query finds", "never", 100, " %"),
            (f"skewness of the {self.k}-occurrence", "skewness", 1, ""),
        )
        lines = []
        for says, name, scale, unit in told:
            before, after = (None if part is None else getattr(part, name) for part in (self.raw, self.corrected))
            if before is not None:
                moved = "" if after is None else f" -> {scale * after:.2f}{unit}"
                lines.append(f"{says}: {scale * before:.2f}{unit}{moved}")
        return lines


def moved(before: int, after: int | None) -> str:
    return f"{before}" if after is None else f"{before} -> {after}"


def _interval(figure: Figure) -> str:
    return f"{100 * figure.value:.1f} ({100 * figure.low:.1f} to {100 * figure.high:.1f})"
