"""Choosing a method and its parameters: the default, unless pairs speak for another."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import product

import numpy as np

from hubplugin.methods import Method
from hubplugin.methods.blend import Blend
from hubplugin.metric import Metric
from hubplugin.reductions import Compute, Precision
from hubplugin.selection.banks import Banks, Pairs
from hubplugin.selection.experiment import Experiment, configuration_name, standard_error
from hubplugin.vectors import Progress, VectorLike

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


@dataclass(frozen=True)
class Compared:
    """One candidate beside the default, on held-out bank queries.

    recall: R@1, 0 to 1. score: R@1 with a soft edge, by which is chosen. gain, error: of the score over the default's,
    and its standard error, both 0 for the default itself.
    """

    configuration: Method
    recall: float
    score: float
    gain: float
    error: float

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
    query_bank: VectorLike,
    targets: VectorLike,
    target_bank: VectorLike | None = None,
    *,
    pairs: Pairs = None,
    metric: Metric | str = "cosine",
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
    precision: Precision = "float32",
    seed: int = 0,
) -> Choice:
    """The configuration that `fit(method="auto")` fits: the default, `blend`, unless pairs speak clearly for another.

    query_bank [m, d], targets [n, d], target_bank [p, d], precision: as in `hubplugin.fit`. pairs: see `Pairs`.

    With pairs, blends of other temperature, strength and share (dbsn alone and nnn alone among them) are tried on
    held-out bank queries. The best is chosen if it is ahead of the default by more than `CLEAR` standard errors. What
    the default takes from bank and gallery is taken from the whole of them, so that a fold fits what the fit will.
    Where the pairs' targets are in the gallery, the bank is a log: held-out queries show what becomes of targets that
    were not asked for only, so the default is chosen, and leaves the answers out.

    Without pairs it is the default, at no cost: no measure without pairs was found that does better.

    Raises InputError for anything that cannot be used, and for pairs of less than two held-out queries a fold.
    """
    compute = Compute(device, memory, progress, precision)
    banks = Banks.read(query_bank, target_bank, pairs, metric, compute).against(targets)
    with closing(Experiment(banks, seed)) as experiment:
        return choose_by(experiment)


def choose_by(experiment: Experiment) -> Choice:
    """`choose`, by an experiment that others ask too."""
    default = Blend.model_validate({})
    if experiment.banks.pairs is None:
        return Choice(default, "the default, since there are no pairs to choose by", [], 0)
    if experiment.answered > 0.5:
        log = Blend.model_validate({"answers": "left out"})
        return Choice(log, "the default for a log, since the pairs' targets are in the gallery", [], 0)
    return _compare(experiment, default.resolved(experiment.given))


def _compare(experiment: Experiment, default: Blend) -> Choice:
    """The best of the candidates around a resolved `default`, or the default."""
    assert default.tau is not None
    tried = [default, *_candidates(default)]
    margins = experiment.margins(tried)
    scores = 1 / (1 + np.exp(-margins / (EDGE * default.tau)))
    compared = []
    for configuration, margin, score in zip(tried, margins, scores, strict=True):
        ahead = score - scores[0]
        compared.append(
            Compared(
                configuration=configuration,
                recall=float((margin > 0).mean()),
                score=float(score.mean()),
                gain=float(ahead.mean()),
                error=standard_error(ahead),
            )
        )
    compared.sort(key=lambda candidate: -candidate.score)
    best, probes = compared[0], margins.shape[1]
    if best.gain > CLEAR * best.error:
        return Choice(best.configuration, f"the best on {probes} held-out bank queries", compared, probes)
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
