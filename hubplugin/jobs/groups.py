"""Offsets fitted within groups of the targets: hubs are relative to what a search can return, and one that is filtered
returns the targets of its group only.

Offsets depend on bank and target, not on the other targets, but for two things: the centre, which is the group's
own, and under `sn` and `dbsn` log alpha. So all groups share one bank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from hubplugin.errors import CorrectionRefused
from hubplugin.jobs.spooled_gallery import Members
from hubplugin.methods import Method
from hubplugin.model import Dot, GalleryStatistics, Group, GroupedModel, LogSumExp, OffsetModel, Value
from hubplugin.selection import Banks, Experiment, check_by

SMALLEST_GROUP = 100
"""Targets below which a group has no hubs to speak of: the 10 best of it are a tenth of it."""


Tried: TypeAlias = Callable[[Value, Experiment], None]
"""Is shown the experiment of each group that is large enough, before the guard is."""


def fit_within(
    banks: Banks,
    configuration: Method,
    key: str,
    groups: Sequence[tuple[Value, Members]],
    force: bool,
    tried: Tried | None = None,
) -> tuple[GroupedModel, dict[Value, str]]:
    """A fit on each of `groups` that has `SMALLEST_GROUP` targets and that the guard lets pass on its own gallery,
    and why the others, whose targets stay neutral, have none. What the method takes from the gallery, such as the
    temperature of `blend`, it takes from the whole gallery of `banks`, and has it in common for all groups.

    Raises CorrectionRefused if no group is left.
    """
    given, method = banks.given, configuration.resolved(banks.given)
    fitted: dict[Value, OffsetModel] = {}
    neutral: dict[Value, str] = {}
    for number, (value, members) in enumerate(groups):
        try:
            among = banks.among(members, members.numbers)
            _require_usable(among, method, force, None if tried is None else partial(tried, value))
            fitted[value] = method.fit(among.given)
        except CorrectionRefused as refusal:
            neutral[value] = str(refusal).partition("; nothing was changed")[0]  # which holds for all of it or none
        given.compute.report(f"fitting within each {key!r}", number + 1, len(groups))
    if not fitted:
        first = "; ".join(f"{value!r}: {reason}" for value, reason in list(neutral.items())[:1])
        raise CorrectionRefused(
            f"no value of {key!r} can be corrected by itself ({len(neutral)} tried; {first or 'no target has one'})"
        )
    return _together(key, fitted, given.require_targets(method.name).rows), neutral


def _require_usable(banks: Banks, method: Method, force: bool, tried: Callable[[Experiment], None] | None) -> None:
    """Raises CorrectionRefused for a group that stays neutral."""
    members = banks.given.require_targets(method.name)
    if members.rows < SMALLEST_GROUP:
        raise CorrectionRefused(f"{members.rows} targets, {SMALLEST_GROUP} are needed")
    with closing(Experiment(banks)) as experiment:  # computes nothing until it is asked
        if tried is not None:
            tried(experiment)
        if not force:
            check_by(experiment, method)


def _together(key: str, models: Mapping[Value, OffsetModel], count: int) -> GroupedModel:
    """One model of those of all groups, which share bank and method, for `count` targets in groups or not."""
    first = next(iter(models.values()))
    groups = {value: _group(model) for value, model in models.items()}
    return GroupedModel(
        method=first.method,
        parameters=first.parameters,
        metric=first.metric,
        terms=tuple(replace(t, log_weights=None) if isinstance(t, LogSumExp) else t for t in first.terms),
        bank_fingerprint=first.bank_fingerprint,
        gallery=_statistics([group.gallery for group in groups.values()], count),
        key=key,
        groups=groups,
    )


def _group(model: OffsetModel) -> Group:
    assert model.gallery is not None
    weights = next((term.log_weights for term in model.terms if isinstance(term, LogSumExp)), None)
    answers = next((term.answers for term in model.terms if not isinstance(term, Dot)), None)
    return Group(model.centre, model.gallery, weights, answers)


def _statistics(parts: list[GalleryStatistics], count: int) -> GalleryStatistics:
    """Of `count` targets, of which those outside of `parts` have the offset 0."""
    return GalleryStatistics(
        count,
        min(0.0, *(part.smallest for part in parts)),
        max(0.0, *(part.largest for part in parts)),
        math.sqrt(sum(part.count * part.deviation**2 for part in parts) / count),
    )
