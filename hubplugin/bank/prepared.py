"""A bank as it is tried and fitted on: read once, checked, at unit length, and against a gallery."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from hubplugin.bank.texts import is_number
from hubplugin.compute import Similarities, dense
from hubplugin.errors import InputError, Parameter
from hubplugin.methods import FitInput
from hubplugin.vectors import Directed, Scannable, VectorLike, Vectors, as_vectors, places_in, spool

logger = logging.getLogger(__name__)

NAMED = 5
"""How many clicked ids that the store lacks are named."""

LOOKED_AT, FEWEST = 1_000, 10
"""Bank queries that tell whether banks are pairs, at most and at least."""


@dataclass(frozen=True)
class PreparedBank(FitInput):
    """A bank, and the gallery once it is known, on which a correction is chosen, tried and fitted.

    pairs: the row of the target bank that belongs to each bank query, int [m], or None. clicks: the row of the gallery,
    likewise, or the id in a store; -1 for none.
    """

    pairs: np.ndarray | None = None
    clicks: np.ndarray | None = None

    @classmethod
    def of(cls, fit_input: FitInput, clicks: np.ndarray | None, pairs: np.ndarray | None) -> PreparedBank:
        """pairs: as of `Bank`, with rows of the target bank of `fit_input`."""
        read = {each.name: getattr(fit_input, each.name) for each in fields(fit_input)}
        return cls(**read, pairs=_mapping(pairs, fit_input), clicks=clicks)

    def against(self, targets: VectorLike, ids: Mapping[int | str, int] | None = None) -> PreparedBank:
        """This bank with a gallery; raises InputError where it has other dimensions, or lacks what was clicked.

        ids: the rows of what was clicked, by its id, where `targets` were read from a store.
        """
        if self.clicks is not None and ids is None and isinstance(targets, Scannable):
            targets, ids = _spooled(targets, self.clicks)
        whole = as_vectors(targets, "targets")
        if self.clicks is None:
            return replace(self, targets=super().against(whole).targets)
        gallery = super().against(whole).gallery
        clicks = _rows_of(self.clicks, whole.rows, ids)
        if not (clicks >= 0).any():
            raise InputError(f"answers: none of what they name is in {whole.name}; one for each query, they are ids")
        return replace(self, targets=gallery, clicks=places_in(gallery, clicks))

    def among(self, members: Vectors, numbers: np.ndarray) -> PreparedBank:
        """This bank with a part of its gallery: the rows `numbers`, which ascend."""
        clicks, gallery = self.clicked_rows, super().against(members).gallery
        if clicks is not None:
            place = np.minimum(np.searchsorted(numbers, clicks), len(numbers) - 1)
            clicks = places_in(gallery, np.where(numbers[place] == clicks, place, -1))
            clicks = clicks if len(np.unique(clicks)) > FEWEST else None  # too few to hold any out
        return replace(self, targets=gallery, clicks=clicks)

    @property
    def clicked_rows(self) -> np.ndarray | None:
        """`clicks` as rows of the gallery with its zero vectors, which `targets` lack."""
        if self.clicks is None or not isinstance(self.targets, Directed):
            return self.clicks
        return np.where(self.clicks < 0, -1, self.targets.numbers[self.clicks])

    @property
    def known(self) -> np.ndarray | None:
        """What each bank query asks for, as far as it is known: a row of target bank or gallery, or -1."""
        return self.clicks if self.pairs is None else self.pairs


def _rows_of(clicks: np.ndarray, count: int, ids: Mapping[int | str, int] | None) -> np.ndarray:
    """The rows [m] of what was clicked, -1 for nothing."""
    if ids is not None:
        rows = np.array([ids.get(each, -1) for each in clicks.tolist()], np.int64)
        _tell_of_unknown(clicks, rows)
        return rows
    if clicks.dtype.kind not in "iu":
        raise InputError("answers must be rows of the gallery, which are numbers, or vectors; -1 for none")
    outside = np.flatnonzero((clicks < -1) | (clicks >= count))
    if outside.size:
        raise InputError(
            f"answers: bank query {outside[0]} belongs to row {clicks[outside[0]]}, which is outside the gallery of "
            f"{count} rows"
        )
    return clicks.astype(np.int64)


def _tell_of_unknown(clicks: np.ndarray, rows: np.ndarray) -> None:
    """Counts in the log the `clicks` on what is not in the gallery, for which `rows` have -1, and names some."""
    clicked = [each for each in clicks.tolist() if each != -1]
    unknown = list(
        dict.fromkeys(each for each, row in zip(clicks.tolist(), rows, strict=True) if each != -1 and row < 0)
    )
    if unknown:
        named = ", ".join(map(repr, unknown[:NAMED])) + (", ..." if len(unknown) > NAMED else "")
        lost = sum(row < 0 for row in rows) - (len(rows) - len(clicked))
        logger.warning("%d of %d clicked ids are not in the store, and are left out: %s", lost, len(clicked), named)


def _mapping(pairs: np.ndarray | None, fit_input: FitInput) -> np.ndarray | None:
    """The row of the target bank that belongs to each bank query, or None."""
    queries, second = fit_input.query_bank, fit_input.target_bank
    if pairs is not None:
        return pairs
    if second is None or len(second) != len(queries) or not _look_paired(queries, second, fit_input):
        return None
    return np.arange(len(queries))


def require_pairs(pairs: np.ndarray, count: int, answers: Vectors | None) -> None:
    """Raises InputError where `pairs` are no rows of `answers`, the target bank of `count` bank queries."""
    if answers is None:
        raise InputError("pairs were given without answers; pass ", Parameter("answers"))
    if pairs.dtype.kind not in "iu":
        raise InputError(f"pairs must hold one row of the target bank for each of the {count} bank queries")
    outside = np.flatnonzero((pairs < 0) | (pairs >= answers.rows))
    if outside.size:
        raise InputError(
            f"pairs: bank query {outside[0]} belongs to row {pairs[outside[0]]}, which is outside the target bank "
            f"of {answers.rows} rows"
        )


def places(ids: Sequence[int | str], first: int, wanted: Container[int | str]) -> dict[int | str, int]:
    """The rows of those of `ids` that are wanted, of which the first is in row `first`. Clicks have digits as a number,
    a store of texts has them as a text."""
    rows = {each: first + row for row, each in enumerate(ids) if each in wanted}
    digits = ((int(each), row) for row, each in enumerate(ids) if isinstance(each, str) and is_number(each))
    return rows | {each: first + row for each, row in digits if each in wanted}


def _spooled(store: Scannable, clicks: np.ndarray) -> tuple[Vectors, dict[int | str, int]]:
    """What a store holds, read once, and the rows of what was clicked."""
    rows: dict[int | str, int] = {}
    wanted = set(clicks.tolist())

    def read() -> Iterator[np.ndarray]:
        first = 0
        for batch in store.scan():
            rows.update(places(batch.ids, first, wanted))
            first += len(batch.ids)
            yield batch.vectors

    return spool(read(), "targets"), rows


def _look_paired(queries: np.ndarray, second: np.ndarray, fit_input: FitInput) -> bool:
    """Whether most queries are nearer to their own target than to the next row's: half are by chance."""
    rows = np.random.default_rng(0).permutation(len(queries))[:LOOKED_AT]
    if len(rows) < FEWEST:
        return False
    similarities = dense(
        Similarities(queries[rows], fit_input.metric, fit_input.compute), as_vectors(second[rows], "target bank")
    )
    return bool((similarities.diagonal() > np.roll(similarities, 1, axis=1).diagonal()).mean() > 0.75)
