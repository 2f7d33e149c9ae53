"""`Bank`: example queries, and what is known of their answers, as a user gives them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from hubplugin.bank.embedding import Embed, embed_texts
from hubplugin.bank.prepared import PreparedBank, compare, number_rows
from hubplugin.bank.texts import Texts, as_ids, holds_texts, read_clicks, read_texts
from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter
from hubplugin.metric import Metric
from hubplugin.vectors import (
    Progress,
    VectorLike,
    Vectors,
    as_vectors,
    open_npy,
    prepare,
    require_file,
)

MOST_PAIRS = 10_000
"""The most titles that are read from a store; more are sampled at random."""

FEWEST = 10
"""The fewest queries from which to tell whether banks of equal length are pairs."""

LOOKED_AT = 1_000
"""The most queries that are looked at to tell whether banks are pairs."""

PAIRED = 0.75
"""The share of queries nearer to their own answer than to another's from which on banks
are pairs. By chance it is 0.5."""

CLICKS = (".csv", ".tsv")
"""What the names of files of clicks end with."""

Answers: TypeAlias = VectorLike | Sequence[int | str] | None
"""What queries ask for, see `Bank`."""


@runtime_checkable
class HasFields(Protocol):
    """A store whose targets have fields beside their vectors, see `hubplugin.store`."""

    url: str

    def scan(self, field: str | None = None) -> Iterator[Any]: ...

    def fields(self) -> Sequence[str]: ...


@dataclass(frozen=True, eq=False, repr=False)
class Bank:
    """Example queries, and what is known of their answers.

    Wherever a bank is taken, the queries alone will do. Files are read, and texts
    embedded, where the bank is used; InputError says there what cannot be.

    queries: [m, d]; numpy, torch, memory map, nested lists, or a path (.npy, .parquet).
        With `embed`, texts or a file of texts (.txt, .jsonl, .csv, .tsv, .parquet).
        None: those recorded of a store.
    answers: What is known of what they ask for, in one of two forms, each as a value or
        as a file.
        Vectors [p, d], the *target bank*: examples of what such queries ask for, which
        need not be in the gallery. dualis needs it, blend and dbsn use it. A file is
        one of vectors, as above. If there is one for each query, row i may answer query
        i: they are *pairs* if queries are nearer to their own than to others'. Equal
        answers are then one target.
        Ids in a store or rows of a gallery, one for each query, -1 for none: *clicks*.
        A file is .npy [m], or .csv or .tsv with the columns query (its text, or its row
        from 0) and target.
    embed: The model that embeds texts, as a function from texts [b] to vectors [b, d],
        or as its name, sentence-transformers:NAME or module:function.
    name: What errors call the queries.
    """

    queries: VectorLike | Sequence[str] | None = None
    answers: Answers = None
    _: KW_ONLY
    embed: Embed = None
    name: str = "query bank"

    @classmethod
    def of(cls, bank: BankLike, name: str = "query bank") -> Bank:
        """Return a bank as it is, and queries as a bank.

        Args:
            bank: A `Bank`, or queries.
            name: What errors call these queries.
        """
        return bank if isinstance(bank, Bank) else cls(bank, name=name)

    @classmethod
    def from_field(
        cls, store: HasFields, field: str, embed: Embed, name: str = "pairs"
    ) -> Bank:
        """Read titles as pairs: texts in a field of targets, as queries for these.

        Args:
            store: A store whose targets have fields.
            field: The key, or the column, of titles, names or questions. Targets without
                a text there are left out. The store is read once for them, vectors and
                all.
            embed: The model that embeds queries, as for a bank.
            name: What errors call the pairs.

        Returns:
            A bank of at most `MOST_PAIRS` of them, drawn at random, for `learn` of
            `hubplugin.apply`.

        Raises:
            InputError: No target has a text there, or an argument cannot be used.
            StoreError: The store has no such field.
        """
        if not isinstance(store, HasFields):
            raise InputError(
                f"expected a store, got {type(store).__name__}; open one: "
                "hubplugin.open_store(URL)"
            )
        if not field:
            raise InputError(
                f"expected the name of a field of {store.url}, got {field!r}"
            )
        if embed is None:
            raise InputError(
                f"texts of {field!r} need the model that embeds queries: pass ",
                Parameter("embed"),
            )
        rng = np.random.default_rng(0)
        pairs = list[tuple[str, int | str]]()
        seen = 0
        for batch in store.scan(field):
            for id, value in zip(batch.ids, batch.values, strict=True):
                text = value.strip() if isinstance(value, str) else ""
                if not text:
                    continue
                seen += 1
                if len(pairs) < MOST_PAIRS:
                    pairs.append((text, id))
                    continue
                place = int(rng.integers(seen))
                if place < MOST_PAIRS:
                    pairs[place] = (text, id)
        if not pairs:
            fields = ", ".join(store.fields()) or "no fields"
            raise InputError(
                f"{store.url}: no target has a text in {field!r}; there are {fields}"
            )
        texts, ids = zip(*pairs, strict=True)
        return cls(texts, np.array(ids, object), embed=embed, name=name)

    @cached_property
    def texts(self) -> Texts | None:
        """The queries as texts, None if they are vectors."""
        if self.embed is None:
            return None
        queries: Any = () if self.queries is None else self.queries
        if isinstance(queries, (str, os.PathLike)):
            return read_texts(queries, self.name)
        lines = list(queries)
        if not lines or not all(isinstance(line, str) for line in lines):
            raise InputError(
                f"{self.name}: expected texts beside ",
                Parameter("embed"),
                "; vectors are passed without it",
            )
        return Texts(lines, range(len(lines)), self.name)

    @cached_property
    def known(self) -> Vectors | np.ndarray | Path:
        """The answers as vectors [p, d], as ids [m], or as a file of clicks."""
        answers: Any = self.answers
        ids = answers
        if isinstance(answers, (str, os.PathLike)):
            path = Path(answers)
            if holds_texts(path):
                require_file(path, "answers")
                if path.suffix not in CLICKS:
                    raise InputError(
                        f"answers: {path.name!r} is no file of answers; expected .csv, "
                        ".tsv or .npy, or vectors"
                    )
                return path
            if path.suffix == ".npy":
                ids = open_npy(path, "answers")
        ids = _as_ids(ids)
        return as_vectors(answers, "target bank") if ids is None else ids

    def look(self) -> Bank:
        """Return this bank. Raises InputError if a file is not there or cannot be read.

        Nothing is embedded.
        """
        if self.texts is None and self.queries is not None:
            as_vectors(self.queries, self.name)  # type: ignore[arg-type]
        if self.answers is not None:
            _ = self.known
        return self

    def clicks(self, count: int) -> np.ndarray:
        """Return the answers of `count` queries as ids or rows: [m], -1 for none."""
        known = self.known
        if isinstance(known, Path):
            texts = self.texts
            if texts is not None:
                return read_clicks(known, count, texts.texts, texts.rows)
            return read_clicks(known, count, getattr(self.queries, "texts", None))
        array = np.asarray(known)
        expected = f"one id or row of the gallery for each of the {count} bank queries"
        if array.shape != (count,):
            raise InputError(f"answers: {len(array)} were given; expected {expected}")
        if array.dtype.kind not in "iuUO":
            raise InputError(f"answers are {array.dtype}; expected {expected}")
        return as_ids(array.tolist())

    def vectors(
        self, gallery: object = None, progress: Progress | None = None
    ) -> Vectors:
        """Return the queries [m, d].

        Args:
            gallery: If it is a store, queries must have its dimensions.
            progress: Told while texts are embedded.

        Raises:
            InputError: The queries cannot be read or embedded, or have other dimensions.
        """
        dim = getattr(gallery, "dim", None)
        queries: Any = self.queries
        name = self.name
        texts = self.texts
        if texts is not None and self.embed is not None:
            name = texts.name
            queries = embed_texts(texts.texts, self.embed, name, progress, dim)
        if queries is None:
            raise InputError(
                f"{name}: no queries were given, and recorded ones are those of a store"
            )
        vectors = as_vectors(queries, name)
        if dim is not None and vectors.dim != dim:
            searched = getattr(gallery, "url", "targets")
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, {searched} has {dim}; "
                "embed the queries with its model"
            )
        return vectors

    def prepare(
        self, metric: Metric | str, compute: Compute, gallery: object = None
    ) -> PreparedBank:
        """Read and check this bank.

        Args:
            metric, compute: As in `hubplugin.fit`.
            gallery: As in `vectors`.

        Raises:
            InputError: The bank cannot be used, such as for a zero vector under cosine.
        """
        metric = Metric.parse(metric)
        compute = compute.settled()
        vectors = self.vectors(gallery, compute.progress)
        bank = PreparedBank(prepare(vectors, metric), metric, compute)
        if self.answers is None:
            return bank
        known = self.known
        if not isinstance(known, Vectors):
            return replace(bank, clicks=self.clicks(vectors.rows))
        if vectors.dim != known.dim:
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, {known.name} has "
                f"{known.dim}; embed both with the same model"
            )
        answers = prepare(known, metric)
        bank = replace(bank, target_bank=answers)
        if vectors.rows != known.rows or not _look_like_pairs(bank, answers):
            return bank
        distinct, pairs = np.unique(number_rows(answers), return_inverse=True)
        return replace(bank, target_bank=answers[distinct], pairs=pairs)


BankLike: TypeAlias = Bank | VectorLike | Sequence[str]
"""A bank, or its queries alone."""


def _as_ids(answers: Any) -> np.ndarray | None:
    """Return `answers` as an array [m] if they are numbers or texts; None for vectors."""
    try:
        array = np.asarray(answers)
    except Exception:  # whatever a foreign object raises: `as_vectors` tells of it
        return None
    if array.ndim != 1:
        return None
    is_column = array.dtype.kind == "O" and not isinstance(
        array[0], (int, str, np.integer)
    )
    return None if is_column else array


def _look_like_pairs(bank: PreparedBank, answers: np.ndarray) -> bool:
    """Return True if `PAIRED` of the queries are nearer to their own answer than to another.

    Row i of `answers` belongs to query i. Return False for fewer than `FEWEST`.
    """
    if len(answers) < FEWEST:
        return False
    rows = np.random.default_rng(0).permutation(len(answers))[:LOOKED_AT]
    queries = bank.query_bank[rows]
    similarities = compare(queries, answers[rows], bank.metric, bank.compute)
    is_nearer = similarities > np.roll(similarities, 1, axis=1)
    return bool(is_nearer.diagonal().mean() > PAIRED)
