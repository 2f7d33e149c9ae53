"""`Bank`: example queries, and what is known of their answers, as a user gives them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hubplugin.bank.embedding import Embed, embed_texts
from hubplugin.bank.prepared import PreparedBank, require_rows
from hubplugin.bank.texts import Texts, read_clicks, read_texts
from hubplugin.compute import Compute, Similarities, dense
from hubplugin.errors import EmptyInput, InputError, Parameter
from hubplugin.metric import Metric, unit_or_zero
from hubplugin.vectors import (
    Progress,
    Scannable,
    VectorLike,
    Vectors,
    as_vectors,
    open_npy,
    require_file,
)

logger = logging.getLogger(__name__)

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
NO_ANSWERS = (".json", ".jsonl", ".md", ".txt")

Answers: TypeAlias = VectorLike | Sequence[int | str] | None
"""What queries ask for, see `Bank`."""

Pairs: TypeAlias = Sequence[int] | np.ndarray | None
"""The row of each query's vector among the answers, see `Bank`."""


@dataclass(frozen=True, eq=False, repr=False)
class Bank:
    """Example queries, and what is known of their answers.

    Wherever a bank is taken, the queries alone will do. Files are read, and texts
    embedded, where the bank is used; InputError says there what cannot be.

    queries: [m, d]; numpy, torch, memory map, nested lists, or a path (.npy, .npz,
        .safetensors, .parquet). With `embed`, texts or a file of texts (.txt, .jsonl,
        .csv, .tsv, .parquet). None: those recorded of a store.
    answers: What is known of what they ask for, in one of two forms, each as a value or
        as a file.
        Vectors [p, d], the *target bank*: examples of what such queries ask for, which
        need not be in the gallery. dualis needs it, blend and dbsn use it. A file is
        one of vectors, as above.
        Ids in a store or rows of a gallery, one for each query, -1 for none: *clicks*.
        A file is .npy [m], or .csv or .tsv with the columns query (its text, or its row
        from 0) and target.
    pairs: Which row of the answers' vectors belongs to each query, [m]. None looks:
        banks of equal length are pairs, row i to row i, if their own targets are nearer
        than others'.
    embed: The model that embeds texts, as a function from texts [b] to vectors [b, d],
        or as its name, sentence-transformers:NAME or module:function.
    name: What errors call the queries.
    """

    queries: VectorLike | Sequence[str] | None = None
    answers: Answers = None
    _: KW_ONLY
    pairs: Pairs = None
    embed: Embed = None
    name: str = "query bank"

    def __repr__(self) -> str:
        asked = _describe(self.queries)
        return f"<Bank: queries {asked}, answers {_describe(self.answers)}>"

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
        cls, store: Scannable, field: str, embed: Embed, name: str = "pairs"
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
        url = getattr(store, "url", None)
        if url is None:
            raise InputError(
                f"expected a store, got {type(store).__name__}; open one: "
                "hubplugin.open_store(URL)"
            )
        if not isinstance(field, str) or not field:
            raise InputError(f"expected the name of a field of {url}, got {field!r}")
        if embed is None:
            raise InputError(
                f"texts of {field!r} need the model that embeds queries: pass ",
                Parameter("embed"),
            )
        rng = np.random.default_rng(0)
        pairs = list[tuple[str, int | str]]()
        seen = 0
        for batch in store.scan(field):  # type: ignore[call-arg]
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
            fields = ", ".join(getattr(store, "fields", list)()) or "no fields"
            raise InputError(
                f"{url}: no target has a text in {field!r}; there are {fields}"
            )
        texts, ids = zip(*pairs, strict=True)
        return cls(texts, np.array(ids, object), embed=embed, name=name)

    @cached_property
    def texts(self) -> Texts | None:
        """The queries as texts, None if they are vectors."""
        if self.embed is None:
            return None
        queries: Any = self.queries
        if queries is None:
            where = "bank" if self.name == "query bank" else self.name
            embed = Parameter("embed", self.embed)
            raise InputError(embed, " is for texts; pass them as ", Parameter(where))
        if isinstance(queries, (str, os.PathLike)):
            return read_texts(queries, self.name)
        lines = list(queries)
        if not lines or not all(isinstance(line, str) for line in lines):
            raise InputError(
                f"{self.name}: embed= is for texts; vectors are passed without it"
            )
        return Texts(lines, range(len(lines)), self.name)

    @cached_property
    def known(self) -> Vectors | np.ndarray | Path:
        """The answers as vectors, as ids, or as a file of clicks."""
        if self.answers is None:
            raise InputError(
                "pairs were given without answers; pass ", Parameter("answers")
            )
        known = _open_answers(self.answers)
        if self.pairs is not None and not isinstance(known, Vectors):
            raise InputError(
                "pairs are of answers that are vectors; ids and rows belong to the "
                "queries one by one"
            )
        return known

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
        if not isinstance(self.known, Path):
            what = "id or row of the gallery"
            return _one_each(self.known, count, what, "answers", "iuUO")
        if self.texts is not None:
            return read_clicks(self.known, count, self.texts.texts, self.texts.rows)
        return read_clicks(self.known, count, getattr(self.queries, "texts", None))

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

        If the metric is cosine, zero vectors are left out, and so are queries whose
        answer is a zero vector.

        Args:
            metric, compute: As in `hubplugin.fit`.
            gallery: As in `vectors`.

        Raises:
            InputError: The bank cannot be used.
        """
        metric = Metric.parse(metric)
        compute = compute.settled()
        vectors = self.vectors(gallery, compute.progress)
        queries, rows = _read(vectors, metric)
        bank = PreparedBank(queries, metric, compute, rows=rows)
        if self.answers is None and self.pairs is None:
            return bank
        known = self.known
        if not isinstance(known, Vectors):
            return replace(bank, clicks=self.clicks(vectors.rows)[rows])
        if vectors.dim != known.dim:
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, {known.name} has "
                f"{known.dim}; embed both with the same model"
            )
        answers, answer_rows = _read(known, metric)
        own = rows  # the row of each query's answer, as it was given
        if self.pairs is not None:
            what = "row of the target bank"
            given = _one_each(self.pairs, vectors.rows, what, "pairs", "iu")
            require_rows(given, 0, known.rows, "pairs", "target bank")
            own = given[rows]
        elif known.rows != vectors.rows:
            return replace(bank, target_bank=answers)
        # Rows move up where zero vectors were left out; these have the place -1.
        place = np.full(known.rows, -1)
        place[answer_rows] = np.arange(len(answers))
        pairs = place[own]
        is_known = pairs >= 0
        if not is_known.any():
            raise InputError(
                f"{vectors.name}: no query has an answer that is no zero vector"
            )
        bank = bank.take(np.flatnonzero(is_known))
        rows = rows[is_known]
        pairs = pairs[is_known]
        if self.pairs is None:
            answers = answers[pairs]
            pairs = np.arange(len(answers))
        bank = replace(bank, target_bank=answers, pairs=pairs, rows=rows)
        if self.pairs is None and not _look_like_pairs(bank, answers):
            return replace(bank, pairs=None)
        return bank


def _describe(part: Any) -> str:
    """Return the file of `part`, or its size."""
    if part is None:
        return "none"
    if isinstance(part, (str, os.PathLike)):
        return os.fspath(part)
    if isinstance(part, Vectors):
        return f"{part.rows:,} x {part.dim}"
    shape = getattr(part, "shape", None) or (len(part),)
    return " x ".join(f"{size:,}" for size in shape)


BankLike: TypeAlias = Bank | VectorLike | Sequence[str]
"""A bank, or its queries alone."""


def _read(vectors: Vectors, metric: Metric) -> tuple[np.ndarray, np.ndarray]:
    """Return the prepared vectors [r, d], and their rows in `vectors` [r].

    If the metric is cosine they have unit length, and zero vectors are left out. Raises
    EmptyInput if none is left.
    """
    array = vectors.array()
    if metric is not Metric.COSINE:
        return array, np.arange(len(array))
    unit = unit_or_zero(array)
    rows = np.flatnonzero(unit.any(axis=1))
    left_out = len(array) - len(rows)
    if not len(rows):
        raise EmptyInput(
            f"{vectors.name}: all {left_out} rows are zero vectors, which have no "
            "cosine similarity"
        )
    if left_out:
        message = "%s: %d zero vectors, which have no direction, are left out"
        logger.warning(message, vectors.name, left_out)
        unit = unit[rows]
    return unit, rows


def _open_answers(answers: Any) -> Vectors | np.ndarray | Path:
    """Return answers as vectors [p, d], as ids [m], or as the path of a file of clicks.

    Raises InputError for a file that holds no answers.
    """
    if not isinstance(answers, (str, os.PathLike)):
        ids = _one_dimensional(answers)
        if ids is not None:
            return ids
        return as_vectors(answers, "target bank")
    path = Path(answers)
    if path.suffix in CLICKS + NO_ANSWERS:
        require_file(path, "answers")
    if path.suffix in CLICKS:
        return path
    if path.suffix in NO_ANSWERS:
        raise InputError(
            f"answers: {path.name!r} is no file of answers; expected .csv, .tsv or .npy, "
            "or vectors"
        )
    if path.suffix == ".npy":
        array = open_npy(path, "answers")
        if array.ndim == 1:
            return np.array(array)
    return as_vectors(answers, "target bank")


def _one_dimensional(answers: Any) -> np.ndarray | None:
    """Return `answers` as an array [m] if they are numbers or texts; None for vectors."""
    if isinstance(answers, (Vectors, Scannable)) or getattr(answers, "ndim", 1) != 1:
        return None
    try:
        array = np.asarray(answers)
    except Exception:  # whatever a foreign object raises: `as_vectors` tells of it
        return None
    if array.ndim != 1:
        return None
    is_of_objects = array.dtype.kind == "O" and len(array) > 0
    if is_of_objects and not isinstance(array[0], (int, str, np.integer)):
        return None
    return array


def _one_each(values: Any, count: int, what: str, name: str, kinds: str) -> np.ndarray:
    """Return `values` as an array [count] of numbers or texts.

    Raises InputError for another length, or a dtype that is not among `kinds`. Errors call
    the array `name` and each entry a `what`.
    """
    array = np.asarray(values)
    expected = f"expected one {what} for each of the {count} bank queries"
    if array.shape != (count,):
        raise InputError(f"{name}: {len(array)} were given; {expected}")
    if array.dtype.kind not in kinds:
        raise InputError(f"{name} are {array.dtype}; {expected}")
    return array


def _look_like_pairs(bank: PreparedBank, answers: np.ndarray) -> bool:
    """Return True if `PAIRED` of the queries are nearer to their own answer than to another.

    Row i of `answers` belongs to query i. Return False for fewer than `FEWEST`.
    """
    if len(answers) < FEWEST:
        return False
    rows = np.random.default_rng(0).permutation(len(answers))[:LOOKED_AT]
    columns = as_vectors(answers[rows], "target bank")
    queries = Similarities(bank.query_bank[rows], bank.metric, bank.compute)
    similarities = dense(queries, columns)
    own = similarities.diagonal()
    next_row = np.roll(similarities, 1, axis=1).diagonal()
    return bool((own > next_row).mean() > PAIRED)
