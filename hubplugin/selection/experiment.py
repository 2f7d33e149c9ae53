"""The experiment on which a correction is chosen or refused.

The bank is split into folds; what a fold leaves is fitted, and the fold's own queries probe the result. With pairs, a
probe knows its target, so R@1 can be measured on a gallery that holds the probes' targets too. Without pairs, only the
hubness of what the probes find can be.

It sees at most `FIT_ROWS` of the bank, twice as many targets and `PROBES` probes a fold, drawn at random, so that it
costs the same whatever the size of the gallery.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from hubplugin.errors import InputError, Parameter
from hubplugin.measures.hubness import k_occurrence
from hubplugin.methods import FitInput, Method
from hubplugin.methods.blend import Blend
from hubplugin.methods.robust import bounded
from hubplugin.model import OffsetModel
from hubplugin.reductions import Compute, HoldingCompute, Similarities, dense, sampled, taken
from hubplugin.selection.banks import Banks
from hubplugin.selection.profile import BankProfile, profile
from hubplugin.selection.trials import OCCURRENCE as OCCURRENCE
from hubplugin.selection.trials import Trial
from hubplugin.vectors import as_vectors

FOLDS = 5
"""Each fit keeps 4/5 of the bank, so that what is best for it is best for the whole."""

PROBES = 500
"""Probes a fold: 2,500 in all tell two candidates that differ for 3 % of the queries to 0.35 points of R@1."""

FIT_ROWS = 2_048
"""Bank rows of one fit. The best temperature falls by about half a step of the search from 500 rows to 4,000."""


@dataclass(frozen=True)
class Fold:
    """Fitted on `given`, whose targets are the gallery's and then those probes' own that it lacks; `similarities`
    [p, ...] of the probes to them, and `own` [p], the column of each probe's target, or None."""

    given: FitInput
    similarities: torch.Tensor
    own: torch.Tensor | None

    def smaller(self, count: int) -> Fold:
        """This fold, fitted on `count` of its bank queries and the same share of its target bank, drawn at random:
        those of a smaller count are among those of a larger one."""
        given, rng = self.given, np.random.default_rng(0)
        size, second = len(given.query_bank), given.target_bank
        bank = given.query_bank[np.sort(rng.permutation(size)[:count])]
        if second is not None:
            second = second[np.sort(rng.permutation(len(second))[: math.ceil(len(second) * count / size)])]
        compute = Compute(given.compute.device, given.compute.memory, precision=given.compute.precision)
        return replace(self, given=FitInput(bank, given.targets, second, given.metric, compute))

    def release(self) -> None:
        if isinstance(self.given.compute, HoldingCompute):
            self.given.compute.release()


@dataclass(frozen=True)
class Split:
    """The distinct bank queries `rows` [m] in random order, and the fold that each of them probes, -1 for none."""

    rows: np.ndarray
    fold_of: np.ndarray

    def probes(self, fold: int) -> np.ndarray:
        found: np.ndarray = self.rows[self.fold_of == fold][:PROBES]
        return found

    def fitted(self, fold: int, count: int) -> np.ndarray:
        """At most `count` of the rows that do not probe this fold, ascending."""
        rest = np.sort(self.rows[self.fold_of != fold])
        return np.sort(rest[np.random.default_rng(fold).permutation(len(rest))[:count]])


class Experiment:
    """Of some banks and their gallery: choice and guard ask the same one. Nothing is computed until it is asked for;
    what is asked for then raises InputError for banks of which nothing can be held out.

    again: of a log whose answers are known, hold out single wordings, so that their targets stay asked for by others;
    by default all wordings of a target are held out together. robust: what is fitted is bounded, as it will be.

    Folds are held from one run to the next where half of the memory is enough, so `close` it behind the last.
    """

    def __init__(self, banks: Banks, seed: int = 0, again: bool = False, robust: bool = False):
        if seed < 0:
            raise InputError(Parameter("seed", seed), ": expected 0 or more")
        self.banks, self.seed, self._again, self._robust = banks, seed, again, robust
        self._held: dict[int, Fold] = {}
        # Held at one time: fit x (targets + target bank), target bank x targets, and a Sinkhorn fit's exponentials.
        self._fit_rows = min(FIT_ROWS, max(math.isqrt(self.given.compute.bytes() // 32), 2 * FOLDS))

    @property
    def given(self) -> FitInput:
        return self.banks.given

    @property
    def distinct(self) -> int:
        return len(self.given.distinct)

    @cached_property
    def again(self) -> Experiment:
        """The same experiment, in which the targets of the probes stay asked for."""
        return Experiment(self.banks, self.seed, again=True, robust=self._robust)

    @cached_property
    def split(self) -> Split:
        # A text that is there twice would probe the fit that saw it.
        distinct, known = self.given.distinct, self.banks.known
        require_enough(len(distinct))
        rng = np.random.default_rng(self.seed)
        if known is None:
            order = rng.permutation(len(distinct))
            return Split(distinct[order], np.arange(len(distinct)) % FOLDS)
        if self._again:
            order = rng.permutation(len(distinct))
            return Split(distinct[order], folds_within(known[distinct[order]]))
        # Queries of one target stay together: they would give it away to each other.
        asked = distinct[known[distinct] >= 0]
        groups = np.unique(known[asked], return_inverse=True)[1].reshape(-1)
        count = int(groups.max()) + 1 if len(groups) else 0
        if count < 2 * FOLDS:
            raise InputError(f"pairs name {count} targets; holding some of them out needs at least {2 * FOLDS}")
        place = np.argsort(rng.permutation(count))[groups]
        rows, fold_of = asked[np.argsort(place, kind="stable")], np.sort(place) % FOLDS
        others = np.setdiff1d(distinct, asked)
        return Split(np.concatenate([rows, others]), np.concatenate([fold_of, np.full(len(others), -1)]))

    @cached_property
    def targets(self) -> np.ndarray:
        """A sample of the gallery: [n, d]."""
        gallery = self.given.require_targets("auto")
        if gallery.rows < 2:
            raise InputError(f"{gallery.name} has one row; hubness needs at least 2 targets")
        return sampled(gallery, 2 * self._fit_rows, self.given.metric, np.random.default_rng([self.seed, 1]))

    def answers(self, rows: np.ndarray) -> np.ndarray:
        """The targets that bank queries `rows` [p], all of which are known, ask for: [p, d]."""
        if self.banks.pairs is not None:
            own: np.ndarray = self.given.require_target_bank("auto")[self.banks.pairs[rows]]
            return own
        assert self.banks.clicks is not None
        clicked, place = np.unique(self.banks.clicks[rows], return_inverse=True)
        vectors = taken(self.given.require_targets("auto"), clicked, self.given.metric)
        return vectors[place.reshape(-1)]

    @property
    def probes(self) -> int:
        return sum(len(self.split.probes(fold)) for fold in range(FOLDS))

    @cached_property
    def profile(self) -> BankProfile:
        """What kind of bank it is. Pairs and clicks tell what each query asks for, so documents may ask by them."""
        queries = self.given.query_bank[self.split.rows[: 2 * self._fit_rows]]
        same_kind = self.banks.same_kind or self.banks.known is not None
        return profile(self.given, queries, self.targets, same_kind, self.seed)

    def close(self) -> None:
        """Lets go of what is held."""
        for fold in self._held.values():
            fold.release()
        self._held.clear()
        if "again" in vars(self):
            self.again.close()

    def _folds(self) -> Iterator[Fold]:
        for number in range(FOLDS):
            fold = self._held.get(number) or self._fold(number)
            if self._room_for(fold):
                self._held[number] = fold
            try:
                yield fold
            finally:
                if number not in self._held:
                    fold.release()

    def _fold(self, number: int) -> Fold:
        given, banks = self.given, self.banks
        probes, fitted = self.split.probes(number), self.split.fitted(number, self._fit_rows)
        targets, second, own = self.targets, given.target_bank, None
        if banks.known is not None:
            targets, columns = with_rows(targets, self.answers(probes))
            own = torch.from_numpy(columns)
        if second is not None and banks.pairs is not None:
            second = second[np.unique(banks.pairs[fitted])]
        elif second is not None:
            second = second[np.random.default_rng(number).permutation(len(second))[: self._fit_rows]]
        compute = HoldingCompute(given.compute.device, given.compute.memory, precision=given.compute.precision)
        vectors = as_vectors(targets, "targets")
        return Fold(
            FitInput(given.query_bank[fitted], vectors, second, given.metric, compute),
            dense(Similarities(given.query_bank[probes], given.metric, compute), vectors),
            own,
        )

    def _room_for(self, fold: Fold) -> bool:
        """Whether all folds and the products of their fits take half of the memory at most."""
        second = 0 if fold.given.target_bank is None else len(fold.given.target_bank)
        products = len(fold.given.query_bank) * (fold.given.require_targets("auto").rows + second)
        return FOLDS * (4 * products + 8 * fold.similarities.numel()) <= self.given.compute.bytes() // 2

    @property
    def fitted(self) -> int:
        """The bank queries that each fold leaves to a fit."""
        return min(len(self.split.fitted(fold, self._fit_rows)) for fold in range(FOLDS))

    def run(self, configurations: Sequence[Method | OffsetModel | None], fitted: int | None = None) -> list[Trial]:
        """Each configuration over all folds; the folds are the outer loop, so that each is multiplied once. A model
        is tried as it is. fitted: the bank queries of each fit; all that a fold leaves by default."""
        if not configurations:
            return []
        n, total = len(self.targets), FOLDS * len(configurations)
        found: list[list[tuple[np.ndarray, ...]]] = [[] for _ in configurations]
        gaps = []
        for number, fold in enumerate(self._folds()):
            nearest = fold.similarities[:, :n].topk(min(2, n), dim=1).values
            gaps.append(float((nearest[:, 0] - nearest[:, -1]).mean()))
            tried = fold if fitted is None else fold.smaller(fitted)
            for place, configuration in enumerate(configurations):
                found[place].append(self._probe(tried, configuration, nearest[:, 0]))
                self.given.compute.report("trying candidates", number * len(configurations) + place + 1, total)
        gap = max(float(np.mean(gaps)), 1e-12)
        trials = []
        for configuration, parts in zip(configurations, found, strict=True):
            occurrence = np.sum([part[0] for part in parts], axis=0)
            costs, *paired = (np.concatenate(column) for column in list(zip(*parts, strict=True))[1:])
            hits, log_ranks = paired or (None, None)
            trials.append(Trial(configuration, occurrence, costs, gap, hits, log_ranks))
        return trials

    def _probe(
        self, fold: Fold, configuration: Method | OffsetModel | None, nearest: torch.Tensor
    ) -> tuple[np.ndarray, ...]:
        """k-occurrence [n], costs [p] and, with pairs, hits and log ranks [p] of one fold's probes."""
        n, scores = len(self.targets), fold.similarities
        if configuration is not None:
            scores = scores + torch.from_numpy(_offsets(configuration, fold.given, self._robust))
        found = scores[:, :n].topk(min(OCCURRENCE, max(n // 4, 1)), dim=1).indices
        costs = nearest - fold.similarities.gather(1, found[:, :1])[:, 0]
        occurrence = k_occurrence(found.numpy(), n)
        if fold.own is None:
            return occurrence, costs.numpy()
        own = scores.gather(1, fold.own[:, None])
        greater, equal = (scores > own).sum(dim=1), (scores == own).sum(dim=1)
        hits = (greater == 0) / equal
        ranks = greater + (equal + 1) / 2  # the expected rank among equals
        return occurrence, costs.numpy(), hits.double().numpy(), ranks.double().log().numpy()

    @property
    def answered(self) -> float:
        """Share of the bank queries whose own target is in the gallery, seen on its sample: 1 with clicks, 0 where
        nothing says."""
        if self.banks.pairs is None:
            return 0.0 if self.banks.clicks is None else 1.0
        _, columns = with_rows(self.targets, self.answers(self.split.rows))
        share = float((columns < len(self.targets)).mean())
        return min(share * self.given.require_targets("auto").rows / len(self.targets), 1.0)

    def margins(self, blends: Sequence[Blend]) -> np.ndarray:
        """How far the own target of each held-out query is ahead of the next one: [configurations, queries]. With pairs
        only. What two blends share is fitted once a fold."""
        columns: list[np.ndarray] = []
        for number, fold in enumerate(self._folds()):
            assert fold.own is not None
            place, fitted = fold.own[:, None], dict[Method, torch.Tensor]()
            own = fold.similarities.gather(1, place)[:, 0].float()
            others = fold.similarities.float().scatter_(1, place, -math.inf)
            rows = []
            for blend in blends:
                offsets = torch.zeros(others.shape[1])
                for weight, part in blend.parts:
                    if part not in fitted:
                        raw = part.raw_offsets(fold.given)
                        fitted[part] = torch.from_numpy(raw - raw.mean()).float()
                    offsets += weight * fitted[part]
                rows.append((own + offsets[fold.own] - (others + offsets).max(dim=1).values).numpy())
                self.given.compute.report("trying candidates", number * len(blends) + len(rows), FOLDS * len(blends))
            columns.append(np.stack(rows))
        return np.concatenate(columns, axis=1).astype(np.float64)


def _offsets(configuration: Method | OffsetModel, given: FitInput, robust: bool) -> np.ndarray:
    """Offsets [n] of the targets of `given`, by a fit on its bank, which is bounded if it is to be `robust`, or by a
    model."""
    if isinstance(configuration, Method):
        if not robust:
            return configuration.raw_offsets(given)
        configuration = bounded(configuration.fit(given), given)
    targets, compute = given.require_targets(configuration.method), given.compute
    if configuration.bound is None:
        return configuration.raw_offsets(targets, compute)
    return configuration.members.offsets(targets, device=compute.device, memory=compute.memory)


class TooSmall(InputError):
    """A bank of which nothing can be held out."""


def require_enough(distinct: int) -> None:
    """Raises TooSmall where of so many bank queries none can be held out."""
    if distinct < 2 * FOLDS:
        raise TooSmall(
            f"query bank has {distinct} distinct queries; holding some of them out needs at least {2 * FOLDS}, so that "
            f"each of {FOLDS} folds has 2 of them"
        )


def with_rows(targets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`targets` [n, d] with those of `rows` [p, d] that are not among them, once each; and the place of each: [p]."""
    places = {row.tobytes(): place for place, row in enumerate(targets)}
    known = len(places)
    columns = np.array([places.setdefault(row.tobytes(), len(targets) + len(places) - known) for row in rows])
    new = np.unique(columns, return_index=True)[1][np.unique(columns) >= len(targets)]
    return np.concatenate([targets, rows[new]]), columns


def folds_within(asked: np.ndarray) -> np.ndarray:
    """The fold of each query, of those for what was asked [m] more than once; -1 for others and where it is -1. The
    wordings of one target are spread over the folds, so that each fold leaves some of them."""
    by_target = np.argsort(asked, kind="stable")
    _, first, group, count = np.unique(asked[by_target], return_index=True, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    fold_of = np.empty(len(asked), np.int64)
    fold_of[by_target] = (np.arange(len(asked)) - first[group] + group) % FOLDS
    fold_of[by_target[count[group] < 2]] = -1
    fold_of[asked < 0] = -1
    return fold_of
