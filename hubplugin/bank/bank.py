"""`Bank`: example queries, and what is known of their answers, as a user gives them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hubplugin.bank.embedding import Embed, embed_texts
from hubplugin.bank.prepared import PreparedBank, require_rows
from hubplugin.bank.texts import Texts, holds_texts, read_clicks, read_texts
from hubplugin.compute import Compute, Similarities, dense
from hubplugin.errors import EmptyInput, InputError, Parameter
from hubplugin.metric import Metric, normalise
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
"""Titles that are taken of a store at most, drawn at random."""

LOOKED_AT, FEWEST = 1_000, 10
"""Bank queries that tell whether banks are pairs, at most and at least."""

Answers: TypeAlias = VectorLike | Sequence[int | str] | None
"""What queries ask for, see `Bank`."""

Pairs: TypeAlias = Sequence[int] | np.ndarray | None
"""Which vector among the answers belongs to each query, see `Bank`."""


@dataclass(frozen=True, eq=False, repr=False)
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
        """Read titles as pairs: texts that targets of a store have in a field, as queries for their own targets.

        Args:
            store: A store whose targets have fields.
            field: The key, or the column, of titles, names or questions. Targets without a text there are left out.
                The store is read once for them, vectors and all.
            embed: The model that embeds queries, as for a bank.
            name: What errors call the pairs.

        Returns:
            A bank of at most `MOST_PAIRS` of them, drawn at random, for `learn` of `hubplugin.apply`.

        Raises:
            InputError: No target has a text there, or an argument cannot be used.
            StoreError: The store has no such field.
        """
        url = getattr(store, "url", None)
        if url is None:
            raise InputError(
                f"expected a store, got {type(store).__name__}; open one: hubplugin.open_store(URL)"
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
                elif (place := int(rng.integers(seen))) < MOST_PAIRS:
                    pairs[place] = (text, id)
        if not pairs:
            raise InputError(
                f"{url}: no target has a text in {field!r}; name a field whose values are texts"
            )
        texts, ids = zip(*pairs, strict=True)
        return cls(texts, np.array(ids, object), embed=embed, name=name)

    @cached_property
    def texts(self) -> Texts | None:
        """The queries as texts, None where they are vectors."""
        if isinstance(self.queries, (str, os.PathLike)):
            if self.embed is None and not holds_texts(os.fspath(self.queries)):
                return None
            texts_of_file = read_texts(os.fspath(self.queries), self.name)
            if self.embed is None:
                raise InputError(
                    f"{texts_of_file.name} has texts; name the model that embeds queries: ",
                    Parameter("embed", "sentence-transformers:NAME"),
                    ", fastembed:NAME or module:function",
                )
            return texts_of_file
        if self.embed is None:
            return None
        if self.queries is None:
            where = "bank" if self.name == "query bank" else self.name
            raise InputError(
                Parameter("embed", self.embed),
                " is for texts; pass them as ",
                Parameter(where),
            )
        texts: list[Any] = list(self.queries)  # type: ignore[arg-type]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InputError(
                f"{self.name}: embed= is for texts; vectors are passed without it"
            )
        return Texts(texts, list(range(len(texts))), self.name)

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
                "pairs are of answers that are vectors; ids and rows belong to the queries one by one"
            )
        return known

    def look(self) -> Bank:
        """Return this bank if its files are there and of a kind that can be read; nothing is computed."""
        if self.texts is None and self.queries is not None:
            as_vectors(self.queries, self.name)  # type: ignore[arg-type]
        if self.answers is not None:
            _ = self.known
        return self

    def clicks(self, count: int) -> np.ndarray:
        """Return answers that are ids or rows, one for each of the `count` queries: [m], -1 for none."""
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
            gallery: A store, whose dimensions they must have.
            progress: Told while texts are embedded.

        Raises:
            InputError: They cannot be read or embedded, or have other dimensions.
        """
        dim = getattr(gallery, "dim", None)
        texts = self.texts
        if texts is not None and self.embed is not None:
            embedded = embed_texts(texts.texts, self.embed, texts.name, progress, dim)
            vectors = as_vectors(embedded, texts.name)
        elif self.queries is None:
            raise InputError(
                f"{self.name}: no queries were given, and recorded ones are those of a store"
            )
        else:
            vectors = as_vectors(self.queries, self.name)  # type: ignore[arg-type]
        if dim is not None and vectors.dim != dim:
            name = getattr(gallery, "url", "targets")
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, {name} has {dim}; embed the queries with its model"
            )
        return vectors

    def prepare(
        self, metric: Metric | str, compute: Compute, gallery: object = None
    ) -> PreparedBank:
        """Read and check this bank.

        Zero vectors are left out where the metric is cosine, and queries whose answer is one.

        Args:
            metric: As in `hubplugin.fit`, like `compute`.
            compute: Device, memory and progress.
            gallery: As in `vectors`.

        Raises:
            InputError: It cannot be used.
        """
        metric = Metric.parse(metric)
        compute = compute.settled()
        vectors = self.vectors(gallery, compute.progress)
        queries, rows = _read(vectors, metric)
        if self.answers is None and self.pairs is None:
            return PreparedBank(queries, metric, compute, rows=rows)
        if not isinstance(self.known, Vectors):
            clicks = self.clicks(vectors.rows)[rows]
            return PreparedBank(queries, metric, compute, clicks=clicks, rows=rows)
        answers, answer_rows = _read(self.known, metric)
        if vectors.dim != self.known.dim:
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, {self.known.name} has {self.known.dim}; embed both with "
                "the same model"
            )
        place = np.full(self.known.rows, -1)
        place[answer_rows] = np.arange(len(answers))
        pairs = None
        if self.pairs is not None:
            what = "row of the target bank"
            given = _one_each(self.pairs, vectors.rows, what, "pairs", "iu")
            require_rows(given, 0, self.known.rows, "pairs", "target bank")
            pairs = place[given[rows]]
        elif self.known.rows == vectors.rows:
            pairs = place[rows]
        if pairs is not None:
            if not (pairs >= 0).any():
                raise InputError(
                    f"{vectors.name}: no query has an answer that is no zero vector"
                )
            queries = queries[pairs >= 0]
            rows = rows[pairs >= 0]
            pairs = pairs[pairs >= 0]
        if self.pairs is None and pairs is not None:
            answers = answers[pairs]
            are_pairs = _look_like_pairs(queries, answers, metric, compute)
            pairs = np.arange(len(answers)) if are_pairs else None
        return PreparedBank(queries, metric, compute, answers, pairs, rows=rows)


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
    """Return the prepared vectors [r, d] that have a direction, where the metric needs one, and their rows [r]."""
    array = vectors.array()
    if metric is not Metric.COSINE:
        return array, np.arange(len(array))
    rows = np.flatnonzero(array.any(axis=1))
    left_out = len(array) - len(rows)
    if not len(rows):
        raise EmptyInput(
            f"{vectors.name}: all {left_out} rows are zero vectors, which have no cosine similarity"
        )
    if left_out:
        message = "%s: %d zero vectors, which have no direction, are left out"
        logger.warning(message, vectors.name, left_out)
    return normalise(array[rows], vectors.name, rows), rows


CLICKS = (".csv", ".tsv")
NO_ANSWERS = (".json", ".jsonl", ".md", ".txt")


def _open_answers(answers: Any) -> Vectors | np.ndarray | Path:
    """Return answers as vectors [p, d], as ids [m], or as a file of clicks."""
    if isinstance(answers, (str, os.PathLike)):
        path = Path(answers)
        if path.suffix in CLICKS + NO_ANSWERS:
            require_file(path, "answers")
        if path.suffix in NO_ANSWERS:
            raise InputError(
                f"answers: {path.name!r} is no file of answers; expected .csv, .tsv or .npy, or vectors"
            )
        if path.suffix in CLICKS:
            return path
        if path.suffix == ".npy":
            array = open_npy(path, "answers")
            if array.ndim == 1:
                return np.array(array)
    else:
        ids = _one_dimensional(answers)
        if ids is not None:
            return ids
    return as_vectors(answers, "target bank")


def _one_dimensional(answers: Any) -> np.ndarray | None:
    """Return `answers` as an array [m]. None where they are no numbers and texts one by one but vectors."""
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


def _one_each(
    values: Any, count: int, kind_of_value: str, name: str, kinds: str
) -> np.ndarray:
    """Return `values` as an array [count] of numbers or texts. Raises InputError where it is none."""
    array = np.asarray(values)
    if array.shape != (count,) or array.dtype.kind not in kinds:
        raise InputError(
            f"{name} must hold one {kind_of_value} for each of the {count} bank queries; "
            f"given: {' x '.join(map(str, array.shape))} of type {array.dtype}"
        )
    return array


def _look_like_pairs(
    queries: np.ndarray, answers: np.ndarray, metric: Metric, compute: Compute
) -> bool:
    """Return True if most queries are nearer to their own answer than to the next row's: half are by chance."""
    if len(queries) < FEWEST:
        return False
    rows = np.random.default_rng(0).permutation(len(queries))[:LOOKED_AT]
    columns = as_vectors(answers[rows], "target bank")
    similarities = dense(Similarities(queries[rows], metric, compute), columns)
    own = similarities.diagonal()
    next_row = np.roll(similarities, 1, axis=1).diagonal()
    return bool((own > next_row).mean() > 0.75)
