"""Choosing a method and its parameters: the default, unless pairs speak for another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product

import numpy as np

from hubplugin.bank import Bank, BankLike
from hubplugin.methods import Method
from hubplugin.methods.blend import Blend
from hubplugin.metric import Metric
from hubplugin.resources import Compute
from hubplugin.trial.experiment import Experiment, configuration_name, standard_error
from hubplugin.vectors import VectorLike

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


@dataclass(frozen=True)
class Compared:
    """One candidate beside the default, on held-out bank queries.

    recall: R@1, 0 to 1. score: R@1 with a soft edge, by which is chosen. gain, error: of the score over the default's,
    and its standard error, both 0 for the default itself. worst: the gain on the side where it is less, of a log.
    """

    configuration: Method
    recall: float
    score: float
    gain: float
    error: float
    worst: float

    def __str__(self) -> str:
        name = configuration_name(self.configuration.name, self.configuration.parameters)
        return (
            f"{name}: R@1 {100 * self.recall:.1f}, with a soft edge {100 * self.score:.1f} "
            f"({100 * self.gain:+.1f} +- {196 * self.error:.1f} beside the default)"
        )


@dataclass(frozen=True)
class Choice:
    """What `choose` found: the winner, why, and the candidates, the best first: none where nothing was tried."""

    winner: Method
    reason: str
    candidates: list[Compared]
    probes: int

    def __str__(self) -> str:
        name = configuration_name(self.winner.name, self.winner.parameters)
        return "\n".join([f"{name}: {self.reason}", *(f"  {candidate}" for candidate in self.candidates)])


def choose(
    targets: VectorLike,
    bank: BankLike,
    *,
    metric: Metric | str = "cosine",
    compute: Compute = Compute(),
    seed: int = 0,
) -> Choice:
    """The configuration that `fit(method="auto")` fits: the default, `blend`, unless pairs speak clearly for another.

    targets [n, d], bank, precision: as in `hubplugin.fit`.

    With pairs, blends of other temperature, strength and share (dbsn alone and nnn alone among them) are tried on
    held-out bank queries. The best is chosen if it is ahead of the default by more than `CLEAR` standard errors. What
    the default takes from bank and gallery is taken from the whole of them, so that a fold fits what the fit will.
    With clicks, or where the pairs' targets are in the gallery, the bank is a log, and answers are left out. Targets
    that it asks for and others are tried alike, and a winner may not be behind on either side; with less than
    `FEWEST_AGAIN` held-out wordings of targets that stay asked for, it is the default.

    Without pairs or clicks it is the default, at no cost: no measure without them was found that does better.

    Raises InputError for anything that cannot be used, and for pairs of less than two held-out queries a fold.
    """
    prepared = Bank.of(bank).prepare(metric, compute).against(targets)
    with closing(Experiment(prepared, seed)) as experiment:
        return choose_by(experiment)


def choose_by(experiment: Experiment) -> Choice:
    """`choose`, by an experiment that others ask too."""
    default = Blend.model_validate({})
    if experiment.bank.known is None:
        return Choice(default, "the default, since nothing says what the queries ask for", [], 0)
    if experiment.answered <= 0.5:
        return _compare([experiment], default.resolved(experiment.bank))
    log = Blend.model_validate({"answers": "left out"})
    if experiment.again.probes < FEWEST_AGAIN:
        return Choice(log, "the default for a log, since it has too few other wordings to tell both sides", [], 0)
    return _compare([experiment, experiment.again], log.resolved(experiment.bank))


def _compare(sides: Sequence[Experiment], default: Blend) -> Choice:
    """The best of the candidates around a resolved `default`, or the default. What was asked for before and what was
    not count alike, however many queries try them, and a winner may not be behind on either side."""
    assert default.tau is not None
    tried = [default, *_candidates(default)]
    margins = [side.margins(tried) for side in sides]
    scores = [1 / (1 + np.exp(-each / (EDGE * default.tau))) for each in margins]
    compared = []
    for number, configuration in enumerate(tried):
        gains = [each[number] - each[0] for each in scores]
        compared.append(
            Compared(
                configuration=configuration,
                recall=float(np.mean([(each[number] > 0).mean() for each in margins])),
                score=float(np.mean([each[number].mean() for each in scores])),
                gain=float(np.mean([each.mean() for each in gains])),
                error=float(np.sqrt(sum(standard_error(each) ** 2 for each in gains)) / len(gains)),
                worst=float(min(each.mean() for each in gains)),
            )
        )
    compared.sort(key=lambda candidate: -candidate.score)
    probes = sum(each.shape[1] for each in margins)
    ahead = [candidate for candidate in compared if candidate.worst > 0]
    if ahead and ahead[0].gain > CLEAR * ahead[0].error:
        return Choice(ahead[0].configuration, f"the best on {probes} held-out bank queries", compared, probes)
    return Choice(default, f"the default; none is clearly better on {probes} held-out bank queries", compared, probes)


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
