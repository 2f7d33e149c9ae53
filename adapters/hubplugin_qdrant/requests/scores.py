"""Scores: the formulas that correct them, and corrected similarities as distances and back.

A formula ranks descending, so under Euclidean distance it yields the similarity S = offset - distance^2 / 2, which is
turned back into a distance: sqrt(distance^2 - 2 offset), negative where the offset is the larger of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from pydantic import BaseModel
from qdrant_client import models

from hubplugin.metric import Metric
from hubplugin_qdrant.manifest import Version
from hubplugin_qdrant.requests.selectors import has_vector

FORGED = 1e-5
"""By how much an offset may lie above the ceiling and still be ours: float32 rounding."""

Points: TypeAlias = list[models.ScoredPoint]


def formula(version: Version) -> models.FormulaQuery:
    """The corrected similarity of what a prefetch finds; see `hubplugin_qdrant.requests.trees`."""
    if version.storage == "vector":
        return _sum_by_either_vector(version.metric, version.ceiling, version.augmented_vector)
    return _sum_with_key(version.key, version.metric, version.missing, version.ceiling)


@lru_cache
def _sum_by_either_vector(metric: Metric, ceiling: float, augmented_vector: str) -> models.FormulaQuery:
    """The corrected similarity of a point that is found by its augmented vector or, if it lacks that one, by its own.

    A point that is found by both counts by the augmented one: a re-scoring ranks all that it is given by either.
    """
    lacking: models.Condition = models.Filter(must_not=has_vector(augmented_vector))
    if metric is not Metric.EUCLIDEAN:
        own = models.MultExpression(mult=["$score[1]", lacking])
        return models.FormulaQuery(
            formula=models.SumExpression(sum=["$score[0]", own]), defaults={"$score[0]": 0.0, "$score[1]": 0.0}
        )
    # The score of the prefetch that lacks the point is such that its share comes to 0.
    augmented = models.MultExpression(mult=[-0.5, "$score[0]", "$score[0]"])
    own = models.MultExpression(mult=[-0.5, "$score[1]", "$score[1]", lacking])
    return models.FormulaQuery(
        formula=models.SumExpression(sum=[augmented, ceiling, own]),
        defaults={"$score[0]": math.sqrt(2 * max(ceiling, 0.0)), "$score[1]": 0.0},
    )


@lru_cache
def _sum_with_key(key: str, metric: Metric, missing: float, ceiling: float) -> models.FormulaQuery:
    """The corrected similarity of a candidate: its score plus its offset, `missing` for a point that has none. Under a
    robust model, which has such a number, an offset above the ceiling is forged and counts as none."""
    offset: list[models.Expression] = [key]
    if missing:
        room = models.Range(lte=ceiling + FORGED * max(1.0, abs(ceiling)))
        given = models.FieldCondition(key=key, range=room)
        offset = [
            models.MultExpression(mult=[key, given]),
            models.MultExpression(mult=[missing, models.Filter(must_not=given)]),
        ]
    return models.FormulaQuery.model_construct(
        formula=models.SumExpression.model_construct(sum=[_similarity(metric), *offset]), defaults={key: 0.0}
    )


def _similarity(metric: Metric) -> models.Expression:
    if metric is not Metric.EUCLIDEAN:
        return "$score"
    return models.MultExpression.model_construct(mult=[-0.5, "$score", "$score"])


def similarity_threshold(threshold: float | None, metric: Metric) -> float | None:
    """A threshold on the collection's own scale as one on the corrected similarity."""
    if threshold is None or metric is not Metric.EUCLIDEAN:
        return threshold
    return -0.5 * threshold * abs(threshold)


def distance(similarity: float) -> float:
    """The corrected distance sqrt(distance^2 - 2 offset) of a corrected similarity; negative where that is."""
    return math.copysign(math.sqrt(2.0 * abs(similarity)), -similarity)


def finishing(metric: Metric, threshold: float | None) -> Callable[[Points], Points] | None:
    """What makes of the points that a formula found those that were asked for, with scores on the collection's scale.

    threshold: on the corrected similarity. A server holds a formula to it from 1.17 on; older ones ignore it.
    """
    if threshold is None:
        return with_distances if metric is Metric.EUCLIDEAN else None
    least = np.float32(threshold)

    def finish(points: Points) -> Points:
        kept = [point for point in points if np.float32(point.score) >= least]
        return with_distances(kept) if metric is Metric.EUCLIDEAN else kept

    return finish


def with_distances(points: Points) -> Points:
    """`points` with their corrected similarities as corrected distances."""
    return [point.model_copy(update={"score": distance(point.score)}) for point in points]


def over_similarities(query: models.FormulaQuery, similarities: Iterable[int]) -> models.FormulaQuery:
    """A user's formula `query` over prefetches, of which those numbered `similarities` now yield similarities where
    they yielded distances."""
    names = {f"$score[{number}]" for number in similarities}
    if "$score[0]" in names:
        names.add("$score")
    if not names:
        return query
    defaults = {
        name: similarity_threshold(value, Metric.EUCLIDEAN) if name in names else value
        for name, value in (query.defaults or {}).items()
    }
    return models.FormulaQuery.model_construct(formula=_as_distances(query.formula, names), defaults=defaults)


def _as_distances(expression: models.Expression, names: set[str]) -> models.Expression:
    """`expression` with the similarities called `names` turned into distances: x / sqrt(|x|), x = -2 S."""
    if isinstance(expression, str) and expression in names:
        squared = models.MultExpression(mult=[-2.0, expression])
        root = models.SqrtExpression(sqrt=models.AbsExpression(abs=squared))
        return models.DivExpression(div=models.DivParams(left=squared, right=root, by_zero_default=0.0))
    if isinstance(expression, list):
        return [_as_distances(part, names) for part in expression]
    if not isinstance(expression, BaseModel) or isinstance(expression, models.Filter):
        return expression
    parts = {name: _as_distances(getattr(expression, name), names) for name in type(expression).model_fields}
    return expression.model_copy(update=parts)
