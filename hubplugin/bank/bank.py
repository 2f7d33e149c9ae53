"""`Bank`: example queries and their known answers, as a user passes them."""

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
"""The most titles kept from a store; from more, a random sample is drawn."""

FEWEST_PAIRS = 10
"""The fewest queries from which pairs can be recognised."""

MOST_COMPARED = 1_000
"""The most queries that are compared with answers to recognise pairs."""

PAIRED = 0.75
"""Queries and answers are pairs if more than this share of the queries are nearer to
their own answer than to another query's. By chance the share is 0.5."""

CLICKS = (".csv", ".tsv")
"""The suffixes of files of clicks."""

AnswersLike: TypeAlias = VectorLike | Sequence[int | str] | None
"""The answers to queries, see `Bank`."""


@runtime_checkable
class HasFields(Protocol):
    """A store whose targets have fields besides vectors, see `hubplugin.store`."""

    url: str

    def scan(self, field: str | None = None) -> Iterator[Any]: ...

    def fields(self) -> Sequence[str]: ...


@dataclass(frozen=True, eq=False, repr=False)
class Bank:
    """Example queries and their known answers.

    Every function that takes a bank also takes the queries alone. Files are read and
    texts embedded when the bank is used; if that fails, InputError is raised then.

    queries: The queries [m, d] as an array, a tensor, a memory map, nested lists or a
        path (.npy, .parquet). With `embed`, texts or a file of texts (.txt, .jsonl,
        .csv, .tsv, .parquet). None stands for the queries recorded from a store.
    answers: The known answers in one of two forms, each as a value or as a file.
        Vectors [p, d] are the *target bank*: examples of answers to such queries, which
        need not be in the gallery. dualis needs it; blend and dbsn use it. The file is
        a file of vectors, as above. If there are as many answers as queries, row i may
        answer query i: the rows are *pairs* if queries are nearer to their own answers
        than to others'. Equal answers then count as one target.
        Ids in a store or rows of a gallery, one for each query and -1 for none, are
        *clicks*. The file is an .npy file [m], or a .csv or .tsv file with the columns
        query (the text of a query, or its row counted from 0) and target.
    embed: The model that embeds texts: a function from texts [b] to vectors [b, d], or
        a name, sentence-transformers:NAME or module:function.
    name: The name of the queries in error messages.
    """

    queries: VectorLike | Sequence[str] | None = None
    answers: AnswersLike = None
    _: KW_ONLY
    embed: Embed = None
    name: str = "query bank"

    def __repr__(self) -> str:
        queries = _describe(self.queries)
        return f"<Bank: queries {queries}, answers {_describe(self.answers)}>"

    @classmethod
    def of(cls, bank: BankLike, name: str = "query bank") -> Bank:
        """Return `bank` itself if it is a `Bank`, else a bank of these queries.

        Args:
            bank: A `Bank`, or queries.
            name: The name of the queries in error messages.
        """
        return bank if isinstance(bank, Bank) else cls(bank, name=name)

    @classmethod
    def from_field(
        cls, store: HasFields, field: str, embed: Embed, name: str = "pairs"
    ) -> Bank:
        """Read pairs from a store: each target's title is a query that it answers.

        Args:
            store: A store whose targets have fields.
            field: The key or column of titles, names or questions. Targets without a
                text in this field are left out. The whole store is read once, with its
                vectors.
            embed: The model that embeds queries, as for a bank.
            name: The name of the pairs in error messages.

        Returns:
            A bank of at most `MOST_PAIRS` pairs, drawn at random, for the parameter
            `learn` of `hubplugin.apply`.

        Raises:
            InputError: No target has a text in this field, or an argument cannot be
                used.
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
                # Reservoir sampling: every pair is kept with the same probability.
                place = int(rng.integers(seen))
                if place < MOST_PAIRS:
                    pairs[place] = (text, id)
        if not pairs:
            fields = ", ".join(store.fields()) or "no fields"
            raise InputError(
                f"{store.url}: no target has a text in {field!r}; the store has "
                f"{fields}"
            )
        texts, ids = zip(*pairs, strict=True)
        return cls(texts, np.array(ids, object), embed=embed, name=name)

    @cached_property
    def texts(self) -> Texts | None:
        """The queries as texts; None if they are vectors."""
        if self.embed is None:
            return None
        queries: Any = () if self.queries is None else self.queries
        if isinstance(queries, (str, os.PathLike)):
            return read_texts(queries, self.name)
        lines = list(queries)
        if not lines or not all(isinstance(line, str) for line in lines):
            raise InputError(
                f"{self.name}: with ",
                Parameter("embed"),
                ", queries must be texts; to pass vectors, leave it out",
            )
        return Texts(lines, range(len(lines)), self.name)

    @cached_property
    def known(self) -> Vectors | np.ndarray | Path:
        """The answers as vectors [p, d], as ids [m], or as a file of clicks."""
        answers: Any = self.answers
        if isinstance(answers, (str, os.PathLike)):
            path = Path(answers)
            if holds_texts(path):
                require_file(path, "answers")
                if path.suffix in CLICKS:
                    return path
                raise InputError(
                    f"answers: {path.name!r} is not a file of answers; expected .csv, "
                    ".tsv or .npy, or vectors"
                )
            if path.suffix == ".npy":
                answers = open_npy(path, "answers")
        ids = _ids_or_none(answers)
        if ids is not None:
            return ids
        return as_vectors(self.answers, "target bank")  # type: ignore[arg-type]

    def look(self) -> Bank:
        """Check this bank and return it, without embedding anything.

        Raises InputError if a file does not exist or cannot be read.
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
            gallery: The gallery. The queries must have the dimensions of a store.
            progress: Called while texts are embedded.

        Raises:
            InputError: The queries cannot be read or embedded, or their dimensions are
                not those of the store.
        """
        dim = getattr(gallery, "dim", None)
        queries: Any = self.queries
        name = self.name
        if self.embed is not None and self.texts is not None:
            name = self.texts.name
            queries = embed_texts(self.texts.texts, self.embed, name, progress, dim)
        if queries is None:
            raise InputError(
                f"{name}: no queries were given, and only a store has recorded "
                "ones; pass queries"
            )
        vectors = as_vectors(queries, name)
        if dim is not None and vectors.dim != dim:
            searched = getattr(gallery, "url", "targets")
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, {searched} has {dim}; "
                "embed the queries with the gallery's model"
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
            InputError: The bank cannot be used, for instance because it has a zero
                vector under cosine.
        """
        metric = Metric(metric)
        compute = replace(compute, memory=compute.bytes())  # one amount for a whole fit
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
        # Equal answers become one target.
        distinct, pairs = np.unique(number_rows(answers), return_inverse=True)
        return replace(bank, target_bank=answers[distinct], pairs=pairs)


BankLike: TypeAlias = Bank | VectorLike | Sequence[str]
"""A bank, or its queries alone."""


def _describe(part: Any) -> str:
    """Return the path of a part of a bank, or its size."""
    if part is None:
        return "none"
    if isinstance(part, (str, os.PathLike)):
        return os.fspath(part)
    shape = np.shape(part)
    if isinstance(part, Vectors):
        shape = (part.rows, part.dim)
    return " x ".join(f"{size:,}" for size in shape)


def _ids_or_none(answers: Any) -> np.ndarray | None:
    """Return `answers` as an array [m] if they are ids; None for vectors.

    Ids are numbers or texts.
    """
    try:
        array = np.asarray(answers)
    except Exception:  # a foreign object may raise anything; `as_vectors` reports it
        return None
    if array.ndim != 1:
        return None
    # A column of a table is an array of vectors, whose dtype is object.
    holds_vectors = array.dtype.kind == "O" and not isinstance(
        array[0], (int, str, np.integer)
    )
    return None if holds_vectors else array


def _look_like_pairs(bank: PreparedBank, answers: np.ndarray) -> bool:
    """Return True if row i of `answers` seems to belong to query i.

    More than `PAIRED` of a sample of the queries must be nearer to their own answer
    than to the answer of one other query. Return False for fewer than `FEWEST_PAIRS`
    answers.
    """
    if len(answers) < FEWEST_PAIRS:
        return False
    rows = np.random.default_rng(0).permutation(len(answers))[:MOST_COMPARED]
    queries = bank.query_bank[rows]
    similarities = compare(queries, answers[rows], bank.metric, bank.compute)
    own = similarities.diagonal()
    # The other query is the one before in the sample.
    other = np.roll(similarities, 1, axis=1).diagonal()
    return bool((own > other).mean() > PAIRED)
