"""What the one method that a report shows beside the raw search does: to whom, by which offsets, for which queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from hubplugin.evaluation.candidates import Candidate
from hubplugin.evaluation.examples import Example, answers, drawn
from hubplugin.evaluation.outcomes import Outcome
from hubplugin.evaluation.result import Histogram, Share
from hubplugin.evaluation.scene import Scene
from hubplugin.search import TopK, search

BINS = 40
"""Of the distribution of offsets."""

Called: TypeAlias = Sequence[object] | None


def details(
    candidate: Candidate, raw: Outcome, shown: Outcome, scene: Scene, names: tuple[Called, Called]
) -> dict[str, Any]:
    """Fields of `Results`. names: of targets and of queries."""
    return {
        **_sides(raw, shown, scene),
        "offsets": None if candidate.offsets is None else histogram(candidate.label, candidate.offsets),
        "examples": _examples(raw, shown, scene, *names),
    }


def histogram(label: str, offsets: np.ndarray) -> Histogram:
    """The distribution of `offsets` [n]."""
    counts, edges = np.histogram(offsets, BINS)
    return Histogram(label=label, edges=edges.tolist(), counts=counts.tolist())


def _sides(raw: Outcome, shown: Outcome, scene: Scene) -> dict[str, Share]:
    """R@1 of queries whose true target the bank asked for, and of the others. A bank query asks for its nearest."""
    if scene.given is None:
        return {}
    nearest, truth = TopK(1), scene.truth
    search(scene.given.query_bank, scene.targets, scene.metric, scene.compute, nearest, what="answers of the bank")
    inside = np.isin(truth.target_rows, nearest.rows)
    asked = np.logical_or.reduceat(inside, truth.starts)
    return {
        name: Share(
            queries=int(part.sum()),
            before=float((raw.ranks.best[part] <= 1).mean()),
            after=float((shown.ranks.best[part] <= 1).mean()),
        )
        for name, part in (("asked", asked), ("not_asked", ~asked))
        if part.any()
    }


def _examples(raw: Outcome, shown: Outcome, scene: Scene, targets: Called, queries: Called) -> list[Example]:
    truth = scene.truth

    def called(row: object) -> str:
        return f"target {row}" if targets is None else str(targets[int(str(row))])

    examples = []
    for outcome, place in drawn(raw.ranks.best, shown.ranks.best, scene.seed):
        row, first = int(truth.judged[place]), truth.starts[place]
        true = truth.target_rows[first : first + truth.counts[place]].tolist()
        known = {str(each) for each in true}
        examples.append(
            Example(
                outcome=outcome,
                query=f"query {row}" if queries is None else str(queries[row]),
                truth=[called(each) for each in true],
                raw=answers(raw.found[row].tolist(), known, called),
                corrected=answers(shown.found[row].tolist(), known, called),
            )
        )
    return examples
