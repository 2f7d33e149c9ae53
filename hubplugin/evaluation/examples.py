"""Queries that a correction won and lost, with both answers: drawn at random, as many of the one as of the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

EACH = 3
"""Examples of won and of lost queries."""


class Answer(BaseModel):
    """One place of an answer: what the target is called, and whether it is a true one."""

    model_config = ConfigDict(frozen=True)

    name: str
    true: bool


class Example(BaseModel):
    """A query whose true target came first by one search only, and what both found."""

    model_config = ConfigDict(frozen=True)

    outcome: Literal["won", "lost"]
    query: str
    truth: list[str]
    raw: list[Answer]
    corrected: list[Answer]


def drawn(raw_ranks: np.ndarray, ranks: np.ndarray, seed: int) -> list[tuple[Literal["won", "lost"], int]]:
    """The places of some queries, among those with ranks [j], that were won, and of some that were lost."""
    rng, before, after = np.random.default_rng(seed), raw_ranks <= 1, ranks <= 1
    outcomes: tuple[tuple[Literal["won", "lost"], np.ndarray], ...] = (
        ("won", after & ~before),
        ("lost", before & ~after),
    )
    return [
        (outcome, int(place))
        for outcome, happened in outcomes
        for place in rng.permutation(np.flatnonzero(happened))[:EACH]
    ]


def answers(found: Sequence[object], truth: set[str], called: Callable[[object], str]) -> list[Answer]:
    return [Answer(name=called(each), true=str(each) in truth) for each in found]
