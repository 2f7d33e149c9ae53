"""Offsets fitted within groups of the targets: hubs are relative to what a search can return, and one that is filtered
returns the targets of its group only.

Offsets depend on bank and target, not on the other targets, but for two things: the centre, which is the group's
own, and under `sn` and `dbsn` log alpha. So all groups share one bank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hubplugin.errors import CorrectionRefused
from hubplugin.guard import check
from hubplugin.jobs.spooled_gallery import Members
from hubplugin.methods import FitInput, Method
from hubplugin.model import Dot, GalleryStatistics, Group, GroupedModel, LogSumExp, Term, Value
from hubplugin.tuning import Pairs
from hubplugin.vectors import VectorLike

SMALLEST_GROUP = 100
"""Targets below which a group has no hubs to speak of: the 10 best of it are a tenth of it."""


def fit_within(
    key: str,
    groups: Sequence[tuple[Value, Members]],
    count: int,
    query_bank: VectorLike,
    method: Method,
    given: FitInput,
    target_bank: VectorLike | None,
    pairs: Pairs,
    same_kind: bool,
    force: bool,
) -> tuple[GroupedModel, dict[Value, str]]:
    """A fit on each of `groups` that has `SMALLEST_GROUP` targets and that the guard lets pass on its own gallery,
    and why the others, whose targets stay neutral, have none. count: of all targets, in groups or not. What the method
    takes from the gallery, such as the temperature of `blend`, it takes from the targets of `given`, and has it in
    common for all groups.

    Raises CorrectionRefused if no group is left.
    """
    fitted: dict[Value, Group] = {}
    neutral: dict[Value, str] = {}
    terms: tuple[Term, ...] = ()
    parameters: dict[str, Any] = {}
    compute, method = given.compute, method.resolved(given)
    for number, (value, members) in enumerate(groups):
        try:
            if members.rows < SMALLEST_GROUP:
                raise CorrectionRefused(f"{members.rows} targets, {SMALLEST_GROUP} are needed")
            if not force:
                check(
                    query_bank, members, method.name, target_bank,
                    pairs=pairs, same_kind=same_kind, metric=given.metric, device=compute.device, memory=compute.memory,
                    **method.parameters,
                )  # fmt: skip
        except CorrectionRefused as refusal:
            neutral[value] = str(refusal).partition("; nothing was changed")[0]  # which holds for all of it or none
        else:
            model = method.fit(replace(given, targets=members))
            assert model.gallery is not None
            weights = next((term.log_weights for term in model.terms if isinstance(term, LogSumExp)), None)
            answers = next((term.answers for term in model.terms if not isinstance(term, Dot)), None)
            fitted[value] = Group(model.centre, model.gallery, weights, answers)
            parameters = model.parameters
            terms = tuple(replace(t, log_weights=None) if isinstance(t, LogSumExp) else t for t in model.terms)
        compute.report(f"fitting within each {key!r}", number + 1, len(groups))
    if not fitted:
        first = "; ".join(f"{value!r}: {reason}" for value, reason in list(neutral.items())[:1])
        raise CorrectionRefused(
            f"no value of {key!r} can be corrected by itself ({len(neutral)} tried; {first or 'no target has one'})"
        )
    return GroupedModel(
        method=method.name,
        parameters=parameters,
        metric=given.metric,
        terms=terms,
        bank_fingerprint=given.fingerprint,
        gallery=_together([group.gallery for group in fitted.values()], count),
        key=key,
        groups=fitted,
    ), neutral


def _together(parts: list[GalleryStatistics], count: int) -> GalleryStatistics:
    """Of `count` targets, of which those outside of `parts` have the offset 0."""
    return GalleryStatistics(
        count,
        min(0.0, *(part.smallest for part in parts)),
        max(0.0, *(part.largest for part in parts)),
        math.sqrt(sum(part.count * part.deviation**2 for part in parts) / count),
    )
