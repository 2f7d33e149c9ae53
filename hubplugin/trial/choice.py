"""Choosing a method and its parameters: the default, unless known answers speak for another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from hubplugin.measures.significance import standard_error
from hubplugin.methods import Method
from hubplugin.methods.blend import Blend
from hubplugin.trial.experiment import Experiment, Trial

TEMPERATURES, STRENGTHS = (0.7, 1.0, 1.4), (0.6, 1.0, 1.4)
"""Multiples of the default's temperature and strength that are tried."""

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of `dbsn` in the blend that are tried. Other `k` of `nnn` add candidates and no recall."""

EDGE = 0.4
"""How soft R@1 is made for the choice, in default temperatures: an answer that is ahead of the next target by so much
counts 0.73, one that is as far behind 0.27. A hard edge chooses by few queries, and 0.2 points worse."""

CLEAR = 1.5
"""Standard errors by which a candidate must be ahead of the default: 1 loses up to 0.4 points of R@1 with small banks,
2 gives gains away."""

FEWEST_AGAIN = 200
"""Held-out wordings of targets that stay asked for, below which a log is not chosen on."""


def choose_by(experiment: Experiment) -> list[Trial]:
    """The candidates of `method="auto"`, the one that is fitted first and the others from the best on.

    It is the default, `blend`, unless known answers speak clearly for another. Blends of other temperature, strength
    and share (dbsn alone and nnn alone among them) are then tried on held-out bank queries. The best is chosen if it is
    ahead of the default by more than `CLEAR` standard errors. What the default takes from bank and gallery is taken
    from the whole of them, so that a fold fits what the fit will.

    Where the answers are in the gallery, the bank is a log, and answers are left out. Targets that it asks for and
    others are tried alike, and a winner may not be behind on either side. With less than `FEWEST_AGAIN` held-out
    wordings of targets that stay asked for, it is the default.

    Without known answers it is the default, at no cost: no measure without them was found that does better.
    Raises InputError for answers that leave less than two held-out queries a fold.
    """
    default = Blend.model_validate({})
    if experiment.bank.known is None:
        return [Trial(default, 0, reason="the default, since nothing says what the queries ask for")]
    if experiment.answered <= 0.5:
        return _compare([experiment], default.resolved(experiment.bank))
    log = Blend.model_validate({"answers": "left out"})
    if experiment.again.held_out < FEWEST_AGAIN:
        return [Trial(log, 0, reason="the default for a log, since it has too few other wordings to tell both sides")]
    return _compare([experiment, experiment.again], log.resolved(experiment.bank))


def chosen_by(experiment: Experiment) -> Method:
    """What `method="auto"` fits."""
    return choose_by(experiment)[0].tried_method


def _compare(sides: Sequence[Experiment], default: Blend) -> list[Trial]:
    """The candidates around a resolved `default`, and that itself. What was asked for before and what was not count
    alike, however many queries try them, and a winner may not be behind on either side."""
    assert default.tau is not None
    blends = [default, *_candidates(default)]
    margins = [side.margins(blends) for side in sides]
    scores = [1 / (1 + np.exp(-each / (EDGE * default.tau))) for each in margins]
    queries, tried = sum(each.shape[1] for each in margins), list[Trial]()
    for number, configuration in enumerate(blends):
        gains = [each[number] - each[0] for each in scores]
        trial = Trial(
            configuration,
            queries,
            recall=float(np.mean([(each[number] > 0).mean() for each in margins])),
            score=float(np.mean([each[number].mean() for each in scores])),
            ahead=float(np.mean([each.mean() for each in gains])),
            ahead_error=float(np.sqrt(sum(standard_error(each) ** 2 for each in gains)) / len(gains)),
            worst=float(min(each.mean() for each in gains)),
        )
        tried.append(trial)
    tried.sort(key=lambda trial: -(trial.score or 0.0))
    winner = next((trial for trial in tried if (trial.worst or 0.0) > 0), None)
    if winner is not None and (winner.ahead or 0.0) > CLEAR * (winner.ahead_error or 0.0):
        reason = f"the best on {queries} held-out bank queries"
    else:
        winner = next(trial for trial in tried if trial.configuration == default)
        reason = f"the default; none is clearly better on {queries} held-out bank queries"
    return [replace(winner, reason=reason), *(trial for trial in tried if trial is not winner)]


def _candidates(default: Blend) -> list[Blend]:
    """Blends around the resolved `default`, without itself."""
    assert default.tau is not None
    assert default.strength is not None
    found = []
    for factor, share in product(STRENGTHS, SHARES):
        for tau in TEMPERATURES if share > 0 else (1.0,):
            changes = {"tau": tau * default.tau, "share": share, "strength": factor * default.strength}
            found.append(default.model_copy(update=changes))
    return [candidate for candidate in found if candidate != default]
