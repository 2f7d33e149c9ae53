"""Choosing a method and its parameters from the bank alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from hubplugin.errors import InputError, Parameter
from hubplugin.experiment import (
    FOLDS,
    Candidate,
    Experiment,
    Trial,
    distinct_rows,
    require_enough,
    standard_error,
)
from hubplugin.methods import FitInput, Method, configure
from hubplugin.metric import Metric
from hubplugin.reductions import Compute, Precision, Similarities, dense
from hubplugin.vectors import Progress, VectorLike, as_vectors

Pairs: TypeAlias = bool | Sequence[int] | np.ndarray | None
"""Which target of the target bank belongs to each bank query: True for row i to row i, an array of rows [m], False
for none. None looks: banks of equal length are pairs if their own targets are nearer than others'."""

COST = 0.5
"""The most that a correction may cost a query in similarity where there are no pairs, as a share of the distance
between the two nearest targets: beyond it, hubness goes on falling while recall does too."""


@dataclass(frozen=True)
class Choice:
    """What `choose` found: the winner, every candidate (the best first), what no correction does, and on what basis
    ("pairs" or "hubness") and how many `probes` it was chosen."""

    winner: Candidate
    candidates: list[Candidate]
    uncorrected: Candidate
    basis: str
    probes: int

    def __str__(self) -> str:
        lines = [f"chosen by {self.basis} of {self.probes} held-out bank queries: {self.winner.name}"]
        return "\n".join([*lines, f"  {self.uncorrected}", *(f"  {candidate}" for candidate in self.candidates)])


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
    """The method and parameters that do best on held-out bank queries; `fit(method="auto")` uses them.

    query_bank [m, d], targets [n, d], target_bank [p, d], precision: as in `hubplugin.fit`. pairs: see `Pairs`.

    With pairs: among the candidates whose R@1 is within two standard errors of the best, the one with the smallest
    geometric mean rank, which hears every probe and not only those at the top. Without: the lowest sum of skewness
    (at least 0) and cost among those whose cost is at most `COST`, `dbsn` in place of `sn` where there is a target
    bank. Searched on a coarse grid, temperatures in steps of 2 around the spread of the similarities; then half a step
    to either side of the best.

    Raises InputError for anything that cannot be used, and for a bank of less than two probe queries a fold.
    """
    compute = Compute(device, memory, progress, precision)
    given, mapping = read_banks(query_bank, targets, target_bank, pairs, metric, compute)
    experiment = Experiment(given, mapping, seed)
    uncorrected, *tried = experiment.run([None, *_coarse(experiment.spread, given.target_bank is not None)])
    ranked = _ranked(tried)
    known = {trial.method for trial in tried}
    finer = [near for near in _neighbours(ranked[0].method) if near not in known]
    ranked = _ranked(tried + experiment.run(finer))
    candidates = [trial.candidate(uncorrected) for trial in ranked]
    return Choice(
        winner=candidates[0],
        candidates=candidates,
        uncorrected=uncorrected.candidate(uncorrected),
        basis="hubness" if mapping is None else "pairs",
        probes=experiment.probes,
    )


def require_choosable(
    query_bank: VectorLike, target_bank: VectorLike | None, pairs: Pairs, metric: Metric | str, compute: Compute
) -> None:
    """Raises InputError for banks on which nothing can be chosen, whatever the gallery."""
    given, _ = read_banks(query_bank, None, target_bank, pairs, metric, compute)
    require_enough(len(distinct_rows(given.query_bank)))


def read_banks(
    query_bank: VectorLike,
    targets: VectorLike | None,
    target_bank: VectorLike | None,
    pairs: Pairs,
    metric: Metric | str,
    compute: Compute,
) -> tuple[FitInput, np.ndarray | None]:
    """The checked input, and the row of the target bank that belongs to each bank query, or None."""
    given = FitInput.read(query_bank, targets, target_bank, Metric.parse(metric), compute)
    queries, second = given.query_bank, given.target_bank
    if pairs is None:
        if second is None or len(second) != len(queries) or not _look_paired(queries, second, given):
            return given, None
        return given, np.arange(len(queries))
    if pairs is False:
        return given, None
    if second is None:
        raise InputError("pairs were given without a target bank; pass ", Parameter("target_bank"))
    if pairs is True:
        if len(second) != len(queries):
            raise InputError(
                Parameter("pairs", True),
                f" needs banks of equal length, row i to row i; there are {len(queries)} bank queries and "
                f"{len(second)} bank targets",
            )
        return given, np.arange(len(queries))
    mapping = np.asarray(pairs)
    if mapping.shape != (len(queries),) or mapping.dtype.kind not in "iu":
        raise InputError(f"pairs must hold one row of the target bank for each of the {len(queries)} bank queries")
    outside = np.flatnonzero((mapping < 0) | (mapping >= len(second)))
    if outside.size:
        raise InputError(
            f"pairs: bank query {outside[0]} belongs to row {mapping[outside[0]]}, which is outside the target bank "
            f"of {len(second)} rows"
        )
    return given, mapping


def _look_paired(queries: np.ndarray, second: np.ndarray, given: FitInput) -> bool:
    """Whether most queries are nearer to their own target than to the next row's: half are by chance."""
    rows = np.random.default_rng(0).permutation(len(queries))[:1_000]
    if len(rows) < 2 * FOLDS:
        return False
    similarities = dense(
        Similarities(queries[rows], given.metric, given.compute), as_vectors(second[rows], "target bank")
    )
    own = similarities.diagonal()
    return bool((own > similarities.roll(1, dims=1).diagonal()).double().mean() > 0.75)


def _coarse(spread: float, dual: bool) -> list[Method]:
    """The first grid. Temperatures are the powers of 2 around the spread of the similarities, so that it fits any
    metric."""
    taus = [2.0 ** (round(math.log2(spread)) + step) for step in (-3, -2, -1, 0, 1)]
    tried = [configure("blend"), *(configure(method, tau=tau) for method in ("is", "sn") for tau in taus)]
    if dual:
        tried += [configure("dbsn", tau=tau) for tau in taus]
        tried += [configure("dualis", tau_query=first, tau_target=second) for first in taus[1:4] for second in taus[1:]]
    tried += [configure("nnn", k=k, alpha=alpha) for k in (1, 4, 16, 64) for alpha in (0.25, 0.5, 0.75)]
    tried += [configure("csls"), *(configure("dn", lam=lam) for lam in (0.25, 0.5, 1.0))]
    return tried


def _neighbours(configuration: Method) -> list[Method]:
    """Half a step of the first grid to either side, one parameter at a time."""
    given, near = configuration.parameters, []
    for name, value in given.items():
        if configuration.name == "blend" or name == "iterations":
            continue
        if name == "k":
            steps = {max(1, value // 2), value * 2}
        elif name == "alpha":
            steps = {value - 0.125, value + 0.125}
        else:
            steps = {value * 2**-0.5, value * 2**0.5}
        near += [configure(configuration.name, **{**given, name: step}) for step in sorted(steps)]
    return near


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The best first: see `choose`."""
    if trials[0].hits is None:
        found = [trial.candidate(trial) for trial in trials]
        order = sorted(range(len(trials)), key=lambda i: (found[i].cost > COST, found[i].worth))
        ranked = [trials[i] for i in order]
        first = ranked[0].method
        if first.name == "sn":
            # It evens out the very k-occurrence that is measured here, so it looks better than it is beside `dbsn`,
            # which spreads the same bank over the target bank too, and which finds more (docs/choosing.md).
            twin = configure("dbsn", **first.parameters)
            ranked.sort(key=lambda trial: trial.method != twin or trial.candidate(trial).cost > COST)
        return ranked
    hits = np.stack([np.asarray(trial.hits) for trial in trials])
    ranks = np.array([np.mean(np.asarray(trial.log_ranks)) for trial in trials])
    best = int(hits.mean(axis=1).argmax())
    behind = [float((hits[best] - row).mean()) > 2 * standard_error(hits[best] - row) for row in hits]
    order = sorted(range(len(trials)), key=lambda i: (behind[i], ranks[i] if not behind[i] else -hits[i].mean()))
    return [trials[i] for i in order]
