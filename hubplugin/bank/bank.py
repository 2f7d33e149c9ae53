"""`Bank`: example queries, and what is known of their answers, as a user has them: arrays, files, texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hubplugin.bank.embedding import Embed, embedded
from hubplugin.bank.prepared import PreparedBank, require_pairs
from hubplugin.bank.texts import Texts, holds_texts, read_clicks, read_texts
from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter
from hubplugin.methods import FitInput
from hubplugin.metric import Metric
from hubplugin.vectors import (
    Directed,
    Progress,
    Scannable,
    VectorLike,
    Vectors,
    as_vectors,
    numbers_of,
    opened_npy,
    places_in,
    require_file,
)

Answers: TypeAlias = VectorLike | Sequence[int | str] | None
"""What queries ask for, see `Bank`."""

Pairs: TypeAlias = Sequence[int] | np.ndarray | None
"""Which vector among the answers belongs to each query, see `Bank`."""


@dataclass(frozen=True, eq=False)
class Bank:
    """Example queries, and what is known of their answers. Wherever a bank is taken, the queries alone will do.

    queries: [m, d]; numpy, torch, memory map, nested lists, or a path (.npy, .npz, .safetensors, .parquet). With
        `embed`, texts or a file of texts (.txt, .jsonl, .csv, .tsv, .parquet). None: those recorded of a store.
    answers: what is known of what they ask for, in one of two forms, each as a value or as a file.
        Vectors [p, d], the *target bank*: examples of what such queries ask for, which need not be in the gallery.
        dualis needs it, blend and dbsn use it. A file is one of vectors, as above.
        Ids in a store or rows of a gallery, one for each query, -1 for none: *clicks*. A file is .npy [m], or .csv or
        .tsv with the columns query (its text, or its row from 0) and target.
    pairs: which row of the answers' vectors belongs to each query, [m]. None looks: banks of equal length are pairs,
        row i to row i, if their own targets are nearer than others'.
    embed: the model that embeds texts, as a function from texts [b] to vectors [b, d], or as its name,
        sentence-transformers:NAME, fastembed:NAME or module:function.
    name: what errors call the queries.

    Files are read, and texts embedded, where the bank is used; InputError says there what cannot be.
    """

    queries: VectorLike | Sequence[str] | None = None
    answers: Answers = None
    _: KW_ONLY
    pairs: Pairs = None
    embed: Embed = None
    name: str = "query bank"

    @classmethod
    def of(cls, bank: BankLike, name: str = "query bank") -> Bank:
        """`bank`, or a bank of these queries."""
        return bank if isinstance(bank, Bank) else cls(bank, name=name)

    @cached_property
    def texts(self) -> Texts | None:
        """The queries as texts, None where they are vectors."""
        path = self.queries if isinstance(self.queries, (str, os.PathLike)) else None
        if path is not None and (self.embed is not None or holds_texts(os.fspath(path))):
            found = read_texts(os.fspath(path), self.name)
            if self.embed is None:
                raise InputError(
                    f"{found.name} has texts; name the model that embeds queries: ",
                    Parameter("embed", "sentence-transformers:NAME"),
                    ", fastembed:NAME or module:function",
                )
            return found
        if path is None and self.embed is not None and self.queries is not None:
            texts: list[Any] = list(self.queries)  # type: ignore[arg-type]
            if not texts or not all(isinstance(text, str) for text in texts):
                raise InputError(f"{self.name}: embed= is for texts; vectors are passed without it")
            return Texts(texts, list(range(len(texts))), self.name)
        if self.embed is not None:
            where = "bank" if self.name == "query bank" else self.name
            raise InputError(Parameter("embed", self.embed), " is for texts; pass them as ", Parameter(where))
        return None

    @cached_property
    def _vectors(self) -> Vectors:
        if self.queries is None:
            raise InputError(f"{self.name}: no queries were given, and recorded ones are those of a store")
        return as_vectors(self.queries, self.name)  # type: ignore[arg-type]

    def look(self) -> Bank:
        """This bank, whose files are there and of a kind that can be read; nothing is computed."""
        if self.texts is None and self.queries is not None:
            _ = self._vectors
        _ = self._known
        return self

    def vectors(self, gallery: object = None, progress: Progress | None = None) -> Vectors:
        """The queries [m, d]. gallery: what they ask, whose dimensions they must have where it tells them."""
        dim, name = getattr(gallery, "dim", None), getattr(gallery, "url", "targets")
        if self.texts is None or self.embed is None:
            vectors = self._vectors
        else:
            texts = self.texts
            vectors = as_vectors(embedded(texts.texts, self.embed, texts.name, progress, dim), texts.name)
        if dim is not None and vectors.dim != dim:
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, {name} has {dim}; embed the queries with its model"
            )
        return vectors

    def read(
        self, metric: Metric | str, compute: Compute, gallery: object = None, targets: VectorLike | None = None
    ) -> FitInput:
        """The vectors, checked, and `targets` where a fit needs them. gallery: as for `vectors`."""
        second = self.target_bank
        return FitInput.read(self.vectors(gallery, compute.progress), targets, second, Metric.parse(metric), compute)

    def prepare(self, metric: Metric | str, compute: Compute, gallery: object = None) -> PreparedBank:
        """This bank as corrections are tried and fitted on it; raises InputError where it cannot be used."""
        metric, vectors, second = Metric.parse(metric), self.vectors(gallery, compute.progress), self.target_bank
        count, queries = vectors.rows, Directed.held(vectors, metric)
        answers = None if second is None else Directed.held(second, metric)
        pairs = None if self.pairs is None else one_each(self.pairs, count, "row of the target bank", "pairs")
        clicks = None if self.answers is None else self.clicks(count)
        rows = numbers_of(queries)
        if pairs is not None:
            require_pairs(pairs, count, second)
            pairs = places_in(answers, pairs)
            rows = rows[pairs[rows] >= 0]
        elif second is not None and second.rows == count:  # they may be pairs, row to row
            rows = np.intersect1d(rows, numbers_of(answers))  # type: ignore[arg-type]
            answers = _only(answers, rows)  # type: ignore[arg-type]
        queries = _only(queries, rows)
        fit_input = FitInput.read(queries, None, answers, metric, compute)
        return PreparedBank.of(
            fit_input, None if clicks is None else clicks[rows], None if pairs is None else pairs[rows]
        )

    @cached_property
    def _known(self) -> Vectors | np.ndarray | Path | None:
        """The answers as vectors, as ids, or as a file of clicks."""
        if self.answers is None:
            return None
        found: Vectors | np.ndarray | Path | None = None
        if isinstance(self.answers, (str, os.PathLike)):
            path = Path(self.answers)
            if path.suffix in (".csv", ".tsv"):
                require_file(path, "answers")
                found = path
            elif path.suffix in (".json", ".jsonl", ".md", ".txt"):
                require_file(path, "answers")
                raise InputError(
                    f"answers: {path.name!r} is of an unknown kind; expected .csv, .tsv or .npy, or vectors"
                )
            elif path.suffix == ".npy" and (ids := opened_npy(path, "answers")).ndim == 1:
                found = np.array(ids)
        else:
            found = _one_dimensional(self.answers)
        if found is None:
            return as_vectors(self.answers, "target bank")  # type: ignore[arg-type]
        if self.pairs is not None:
            raise InputError("pairs are of answers that are vectors; ids and rows belong to the queries one by one")
        return found

    @property
    def target_bank(self) -> Vectors | None:
        """The answers where they are vectors [p, d]."""
        return self._known if isinstance(self._known, Vectors) else None

    def clicks(self, count: int) -> np.ndarray | None:
        """The answers where they are ids or rows, one for each of the `count` queries: [m], -1 for none."""
        known = self._known
        if known is None or isinstance(known, Vectors):
            return None
        if isinstance(known, Path):
            if self.texts is not None:
                return read_clicks(known, count, self.texts.texts, self.texts.rows)
            return read_clicks(known, count, getattr(self.queries, "texts", None))
        return one_each(known, count, "id or row of the gallery", "answers")


def _only(vectors: Vectors, rows: np.ndarray) -> Vectors:
    """Those of `vectors` that had the numbers `rows` before zero vectors were left out."""
    return vectors if len(rows) == vectors.rows else Directed(vectors, places_in(vectors, rows))


BankLike: TypeAlias = Bank | VectorLike | Sequence[str]
"""A bank, or its queries alone."""


def _one_dimensional(answers: Any) -> np.ndarray | None:
    """`answers` as an array [m], None where they are no numbers and texts one by one but vectors."""
    if isinstance(answers, (Vectors, Scannable)) or getattr(answers, "ndim", 1) != 1:
        return None
    try:
        array = np.asarray(answers)
    except Exception:  # whatever a foreign object raises: `as_vectors` tells of it
        return None
    if array.ndim != 1 or (array.dtype.kind == "O" and len(array) and not isinstance(array[0], (int, str, np.integer))):
        return None
    return array


def one_each(known: Sequence[Any] | np.ndarray, count: int, what: str, name: str) -> np.ndarray:
    """`known` as an array [count] of numbers or texts; raises InputError where it is none."""
    array = np.asarray(known)
    if array.shape != (count,) or array.dtype.kind not in "iuUO":
        raise InputError(f"{name} must hold one {what} for each of the {count} bank queries")
    return array
