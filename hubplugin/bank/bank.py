"""`Bank`: example queries, and what is known of their answers, as given; `PreparedBank`: the same, checked."""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hubplugin.bank.embedding import Embed, embed_texts
from hubplugin.bank.texts import (
    Texts,
    holds_texts,
    is_number,
    list_first,
    read_clicks,
    read_texts,
)
from hubplugin.compute import Compute, Similarities, dense
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
    locate_rows,
    open_npy,
    original_rows,
    require_file,
    to_tempfile,
)

logger = logging.getLogger(__name__)

MOST_PAIRS = 10_000
"""Titles that are taken of a store at most, drawn at random."""

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
        """A bank of what may be queries alone.

        Args:
            bank: A `Bank`, which is returned as it is, or queries.
            name: What errors call these queries.
        """
        return bank if isinstance(bank, Bank) else cls(bank, name=name)

    @classmethod
    def from_field(
        cls, store: Scannable, field: str, embed: Embed, name: str = "pairs"
    ) -> Bank:
        """Titles as pairs: the texts that targets of a store have in a field, as queries for their own targets.

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
        rng, pairs, seen = np.random.default_rng(0), list[tuple[str, int | str]](), 0
        for batch in store.scan(field):  # type: ignore[call-arg]
            for id, text in zip(batch.ids, batch.values, strict=True):
                pair = (text.strip() if isinstance(text, str) else "", id)
                if not pair[0]:
                    continue
                seen += 1
                if len(pairs) < MOST_PAIRS:
                    pairs.append(pair)
                elif (place := int(rng.integers(seen))) < MOST_PAIRS:
                    pairs[place] = pair
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
    def _vectors(self) -> Vectors:
        if self.queries is None:
            raise InputError(
                f"{self.name}: no queries were given, and recorded ones are those of a store"
            )
        return as_vectors(self.queries, self.name)  # type: ignore[arg-type]

    @cached_property
    def _known(self) -> Vectors | np.ndarray | Path | None:
        """The answers as vectors, as ids, or as a file of clicks."""
        if self.answers is None:
            return None
        ids_or_file: np.ndarray | Path | None = None
        if not isinstance(self.answers, (str, os.PathLike)):
            ids_or_file = _one_dimensional(self.answers)
        elif (path := Path(self.answers)).suffix in (
            ".csv",
            ".tsv",
            ".json",
            ".jsonl",
            ".md",
            ".txt",
        ):
            require_file(path, "answers")
            if path.suffix not in (".csv", ".tsv"):
                raise InputError(
                    f"answers: {path.name!r} is no file of answers; expected .csv, .tsv or .npy, or vectors"
                )
            ids_or_file = path
        elif path.suffix == ".npy" and (array := open_npy(path, "answers")).ndim == 1:
            ids_or_file = np.array(array)
        if ids_or_file is None:
            return as_vectors(self.answers, "target bank")  # type: ignore[arg-type]
        if self.pairs is not None:
            raise InputError(
                "pairs are of answers that are vectors; ids and rows belong to the queries one by one"
            )
        return ids_or_file

    def look(self) -> Bank:
        """This bank, whose files are there and of a kind that can be read; nothing is computed."""
        if self.texts is None and self.queries is not None:
            _ = self._vectors
        _ = self._known
        return self

    @property
    def target_bank(self) -> Vectors | None:
        """The answers where they are vectors [p, d]."""
        return self._known if isinstance(self._known, Vectors) else None

    def clicks(self, count: int) -> np.ndarray | None:
        """The answers where they are ids or rows, one for each of the `count` queries: [m], -1 for none."""
        if isinstance(self._known, Path):
            if self.texts is not None:
                return read_clicks(
                    self._known, count, self.texts.texts, self.texts.rows
                )
            return read_clicks(self._known, count, getattr(self.queries, "texts", None))
        if isinstance(self._known, np.ndarray):
            return _one_each(
                self._known, count, "id or row of the gallery", "answers", "iuUO"
            )
        return None

    def vectors(
        self, gallery: object = None, progress: Progress | None = None
    ) -> Vectors:
        """The queries [m, d].

        Args:
            gallery: A store, whose dimensions they must have.
            progress: Told while texts are embedded.

        Raises:
            InputError: They cannot be read or embedded, or have other dimensions.
        """
        dim, name = getattr(gallery, "dim", None), getattr(gallery, "url", "targets")
        if self.texts is None or self.embed is None:
            vectors = self._vectors
        else:
            texts = self.texts
            vectors = as_vectors(
                embed_texts(texts.texts, self.embed, texts.name, progress, dim),
                texts.name,
            )
        if dim is not None and vectors.dim != dim:
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, {name} has {dim}; embed the queries with its model"
            )
        return vectors

    def read(
        self, metric: Metric | str, compute: Compute, targets: VectorLike | None = None
    ) -> FitInput:
        """What a fit reads of the bank.

        Args:
            metric: As in `hubplugin.fit`, like `compute`.
            compute: Device, memory and progress.
            targets: The gallery [n, d], where a fit needs it.

        Returns:
            The vectors, checked.

        Raises:
            InputError: They cannot be used.
        """
        queries = self.vectors(progress=compute.progress)
        return FitInput.read(
            queries, targets, self.target_bank, Metric.parse(metric), compute
        )

    def prepare(
        self, metric: Metric | str, compute: Compute, gallery: object = None
    ) -> PreparedBank:
        """This bank as corrections are tried and fitted on it.

        Args:
            metric: As in `hubplugin.fit`, like `compute`.
            compute: Device, memory and progress.
            gallery: As in `vectors`.

        Raises:
            InputError: It cannot be used.
        """
        metric, vectors, target_bank = (
            Metric.parse(metric),
            self.vectors(gallery, compute.progress),
            self.target_bank,
        )
        queries, answers = Directed.load(vectors, metric), None
        if target_bank is not None:
            answers = Directed.load(target_bank, metric)
        rows, pairs, clicks = original_rows(queries), None, self.clicks(vectors.rows)
        if self.pairs is not None:
            if target_bank is None:
                raise InputError(
                    "pairs were given without answers; pass ", Parameter("answers")
                )
            pairs = _one_each(
                self.pairs, vectors.rows, "row of the target bank", "pairs", "iu"
            )
            _require_rows(pairs, 0, target_bank.rows, "pairs", "target bank")
            pairs = locate_rows(answers, pairs)
            rows = rows[pairs[rows] >= 0]
        elif (
            answers is not None
            and target_bank is not None
            and target_bank.rows == vectors.rows
        ):  # they may be pairs
            rows = np.intersect1d(rows, original_rows(answers))
            answers = _only(answers, rows)
        prepared = PreparedBank.read(
            _only(queries, rows), None, answers, metric, compute
        )
        if pairs is not None:
            pairs = pairs[rows]
        elif _look_like_pairs(prepared):
            pairs = np.arange(len(rows))
        return replace(
            prepared, pairs=pairs, clicks=None if clicks is None else clicks[rows]
        )


BankLike: TypeAlias = Bank | VectorLike | Sequence[str]
"""A bank, or its queries alone."""


def _only(vectors: Vectors, rows: np.ndarray) -> Vectors:
    """Those of `vectors` that had the numbers `rows` before zero vectors were left out."""
    return (
        vectors
        if len(rows) == vectors.rows
        else Directed(vectors, locate_rows(vectors, rows))
    )


def _one_dimensional(answers: Any) -> np.ndarray | None:
    """`answers` as an array [m], None where they are no numbers and texts one by one but vectors."""
    if isinstance(answers, (Vectors, Scannable)) or getattr(answers, "ndim", 1) != 1:
        return None
    try:
        array = np.asarray(answers)
    except Exception:  # whatever a foreign object raises: `as_vectors` tells of it
        return None
    if array.ndim != 1 or (
        array.dtype.kind == "O"
        and len(array)
        and not isinstance(array[0], (int, str, np.integer))
    ):
        return None
    return array


def _one_each(
    values: Any, count: int, kind_of_value: str, name: str, kinds: str
) -> np.ndarray:
    """`values` as an array [count] of numbers or texts; raises InputError where it is none."""
    array = np.asarray(values)
    if array.shape != (count,) or array.dtype.kind not in kinds:
        raise InputError(
            f"{name} must hold one {kind_of_value} for each of the {count} bank queries"
        )
    return array


def _require_rows(
    rows: np.ndarray, lowest: int, count: int, name: str, where: str
) -> None:
    outside = np.flatnonzero((rows < lowest) | (rows >= count))
    if outside.size:
        raise InputError(
            f"{name}: bank query {outside[0]} belongs to row {rows[outside[0]]}, which is outside the {where} of "
            f"{count} rows"
        )


@dataclass(frozen=True)
class PreparedBank(FitInput):
    """A bank, and the gallery once it is known, on which a correction is chosen, tried and fitted.

    pairs: the row of the target bank that belongs to each bank query, int [m], or None. clicks: the row of the gallery,
    likewise, or the id in a store; -1 for none.
    """

    pairs: np.ndarray | None = None
    clicks: np.ndarray | None = None

    def against(
        self, targets: VectorLike, ids: Mapping[int | str, int] | None = None
    ) -> PreparedBank:
        """This bank with the gallery `targets`; `ids` gives the row of each id, where a store was read.

        Raises InputError where the gallery has other dimensions, or lacks what was clicked.
        """
        if self.clicks is None:
            return super().against(targets)
        if ids is None and isinstance(targets, Scannable):
            targets, ids = read_store(targets, self.clicks)
        prepared = super().against(targets)
        assert prepared.targets is not None
        clicks = _rows_of(self.clicks, prepared.targets.rows, ids)
        if not (clicks >= 0).any():
            name = prepared.targets.name
            raise InputError(
                f"answers: none of what they name is in {name}; one for each query, they are ids"
            )
        return replace(
            prepared,
            targets=prepared.gallery,
            clicks=locate_rows(prepared.gallery, clicks),
        )

    def with_pairs(self, pairs: PreparedBank) -> PreparedBank:
        """This bank with the queries of `pairs` and their rows of the gallery behind its own."""
        parts = [
            np.full(len(part.query_bank), -1) if part.clicks is None else part.clicks
            for part in (self, pairs)
        ]
        queries = np.concatenate([self.query_bank, pairs.query_bank])
        return replace(self, query_bank=queries, clicks=np.concatenate(parts))

    @property
    def clicked_rows(self) -> np.ndarray | None:
        """`clicks` as rows of the gallery with its zero vectors, which `targets` lack."""
        if self.clicks is None or not isinstance(self.targets, Directed):
            return self.clicks
        return np.where(self.clicks < 0, -1, self.targets.numbers[self.clicks])

    @property
    def known_answers(self) -> np.ndarray | None:
        """What each bank query asks for, as far as it is known: a row of target bank or gallery, or -1."""
        return self.clicks if self.pairs is None else self.pairs


def _rows_of(
    clicks: np.ndarray, count: int, ids: Mapping[int | str, int] | None
) -> np.ndarray:
    """The rows [m] of what was clicked, -1 for nothing. Ids that are not in the store are counted and named in the
    log."""
    if ids is None:
        if clicks.dtype.kind not in "iu":
            raise InputError(
                "answers must be rows of the gallery, which are numbers, or vectors; -1 for none"
            )
        _require_rows(clicks, -1, count, "answers", "gallery")
        return clicks.astype(np.int64)
    clicked = [
        id for id in clicks.tolist() if id not in (-1, "-1")
    ]  # numpy makes a text of it beside texts
    unknown = [id for id in clicked if id not in ids]
    if unknown:
        message = "%d of %d clicked ids are not in the store, and are left out: %s"
        logger.warning(message, len(unknown), len(clicked), list_first(unknown))
    return np.array([ids.get(id, -1) for id in clicks.tolist()], np.int64)


def places(
    ids: Sequence[int | str], first: int, clicked: Container[int | str]
) -> dict[int | str, int]:
    """The rows of the `ids` that were `clicked`; the `first` row is that of the first id. Clicks have digits as a
    number, a store of texts has them as a text."""
    rows = {id: first + row for row, id in enumerate(ids) if id in clicked}
    digits = (
        (int(id), row)
        for row, id in enumerate(ids)
        if isinstance(id, str) and is_number(id)
    )
    return rows | {id: first + row for id, row in digits if id in clicked}


def read_store(
    store: Scannable, clicks: np.ndarray
) -> tuple[Vectors, dict[int | str, int]]:
    """What `store` holds, read once, and the rows of the ids in `clicks` [m]."""
    rows: dict[int | str, int] = {}
    wanted = set(clicks.tolist())

    def read() -> Iterator[np.ndarray]:
        first = 0
        for batch in store.scan():
            rows.update(places(batch.ids, first, wanted))
            first += len(batch.ids)
            yield batch.vectors

    return to_tempfile(read(), "targets"), rows


LOOKED_AT, FEWEST = 1_000, 10
"""Bank queries that tell whether banks are pairs, at most and at least."""


def _look_like_pairs(fit_input: FitInput) -> bool:
    """Whether most queries are nearer to their own row of the target bank than to the next row's: half are by
    chance."""
    count = len(fit_input.query_bank)
    if (
        fit_input.target_bank is None
        or len(fit_input.target_bank) != count
        or count < FEWEST
    ):
        return False
    rows = np.random.default_rng(0).permutation(count)[:LOOKED_AT]
    answers = as_vectors(fit_input.target_bank[rows], "target bank")
    similarities = dense(
        Similarities(fit_input.query_bank[rows], fit_input.metric, fit_input.compute),
        answers,
    )
    return bool(
        (similarities.diagonal() > np.roll(similarities, 1, axis=1).diagonal()).mean()
        > 0.75
    )
