"""Define `OffsetModel`, the result of a fit: it computes the offset of any target."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

import numpy as np
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from hubplugin.compute import Compute, Similarities, reduce
from hubplugin.compute.device import Library
from hubplugin.errors import EmptyInput, InputError, ModelFileError, ZeroVector
from hubplugin.metric import Metric
from hubplugin.model import file
from hubplugin.model.file import LARGEST, Header
from hubplugin.model.query_map import QueryMap
from hubplugin.model.terms import Term, pack, unpack
from hubplugin.vectors import Directed, VectorLike, Vectors, as_vectors, prepare

PART_BYTES = 3 << 20
"""Bytes of a model in each text: 4 MiB as base64. Servers accept requests of some 32
MB."""

FEW_PRODUCTS = 1e10
"""Multiplications that numpy completes while torch is being imported, some 3 s. An
upsert of 1,000 vectors of 384 dimensions against a bank of 15,000 takes 6e9
(benchmarks/serving.py)."""

Setting: TypeAlias = int | float | str | None
"""A parameter of a method: a number or a name; None if the fit determines it."""

Value: TypeAlias = str | int | None
"""A value in a field of a target: a text, a number or a boolean; None if missing."""


@dataclass(frozen=True)
class HubnessAtFit:
    """The 10-occurrence in the gallery of the fit, over `queries` queries of the bank.

    raw, corrected, chance: The skewness of the raw and of the corrected search, and by
        chance.
    largest: The share of the queries that find the worst hub in the corrected search.
    right: R@1 of held-out queries, raw and corrected, the change, and the interval of
        the change. None if no answers were known.
    """

    queries: int
    raw: float
    corrected: float
    chance: float
    largest: float
    right: Sequence[float] | None = None


@dataclass(frozen=True)
class GalleryStatistics:
    """Statistics of the centred offsets of the gallery of the fit.

    largest: The largest offset, in float32. No later target gets a larger one.
    """

    count: int
    smallest: float
    largest: float
    deviation: float


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model in JSON results: its method and fingerprints."""

    method: str
    parameters: dict[str, Setting]
    fingerprint: str
    bank_fingerprint: str

    @classmethod
    def of(cls, model: OffsetModel) -> ModelFacts:
        """Return the facts about a model."""
        return cls(
            model.method, model.parameters, model.fingerprint, model.bank_fingerprint
        )


class ShownByFacts:
    """A model that JSON results show by its `ModelFacts`."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        as_facts = core_schema.plain_serializer_function_ser_schema(
            ModelFacts.of, return_schema=handler.generate_schema(ModelFacts)
        )
        return core_schema.is_instance_schema(cls, serialization=as_facts)


@dataclass(frozen=True)
class OffsetModel(ShownByFacts):
    """The result of `fit`, which computes the offset of any target.

    A target ranks by s(q, t) + offset(t), where offset(t) is the sum of `terms` at t,
    minus `centre`.

    method, parameters: As given to `fit`.
    metric: The similarity that the offsets belong to.
    terms: The terms of the offset. Their banks are stored as given, and are mapped as
        all queries are.
    bank_fingerprint: A hash of query bank and target bank.
    centre: The mean of the raw offsets over the gallery of the fit (0 without one), so
        that 0 is the neutral offset.
    gallery: The offsets of the gallery in figures. None if the fit had no targets.
    hubness_at_fit: The hubness that `apply` or `refit` measured, for `inspect`.
        `fingerprint` ignores it.
    query_map: The map learned from known answers, or None.
    fitted: The `offsets` of the gallery of the fit: float32 [n]. None if the model was
        loaded from a file, was fitted without a gallery or by workers, or if its terms
        were replaced.
    """

    method: str
    parameters: dict[str, Setting]
    metric: Metric
    terms: Sequence[Term]
    bank_fingerprint: str
    centre: float = 0.0
    gallery: GalleryStatistics | None = None
    hubness_at_fit: HubnessAtFit | None = None
    query_map: QueryMap | None = None
    fitted: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def dim(self) -> int:
        """The number of dimensions of the bank and of all targets."""
        return int(self.terms[0].bank.shape[1])

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the model, the same for every version of hubplugin.

        It is the first 16 hex digits of the SHA-256 of the content of the model file,
        without `hubness_at_fit`.
        """
        return file.digest(*_content(replace(self, hubness_at_fit=None)))[:16]

    def offsets(
        self, targets: VectorLike, *, compute: Compute = Compute()
    ) -> np.ndarray:
        """Return the offsets of targets, whether the fit saw them or not.

        No offset exceeds the largest one in the gallery of the fit, if there was one:
        a vector far from the whole bank would otherwise rank above every target. By
        cosine, a zero vector has the neutral offset 0.

        Args:
            targets: The targets [n, d], or a store or a file of targets.
            compute: Device, memory and progress.

        Returns:
            The offsets, float32 [n].

        Raises:
            InputError: The targets cannot be used, or differ in dimensions.
        """
        vectors = as_vectors(targets, "targets")
        products = vectors.rows * sum(term.bank.size for term in self.terms)
        if compute.device == "auto" and products <= FEW_PRODUCTS:
            compute = replace(compute, device="numpy")
        directed = vectors
        raw = None
        if not Library(compute).is_on_cpu:
            # On a GPU, computing all offsets is quicker than scanning for zero vectors
            # first, so scan only if a zero vector turns up.
            with suppress(ZeroVector):
                raw = self.raw_offsets(vectors, compute)
        if raw is None:
            try:
                directed = Directed.of(vectors, self.metric)
            except EmptyInput:
                return np.zeros(vectors.rows, np.float32)
            raw = self.raw_offsets(directed, compute)
        offsets = raw - self.centre
        if self.gallery is not None:
            offsets = np.minimum(offsets, self.gallery.largest)
        offsets = offsets.astype(np.float32)
        if isinstance(directed, Directed) and directed is not vectors:
            # This method has left out zero vectors: they get the offset 0.
            return directed.for_source(offsets)
        return offsets

    def similarities(self, term: Term, compute: Compute) -> Similarities:
        """Return the similarities of a term's bank, which is mapped like queries.

        Args:
            term: One of `terms`.
            compute: Device, memory and progress.
        """
        bank = term.bank
        if self.query_map is not None:
            bank = self.query_map.of_bank(bank)
        return Similarities(bank, self.metric, compute)

    def queries(self, queries: VectorLike) -> np.ndarray:
        """Return the vectors to search with instead of `queries`: float32 [m, d].

        The score of a target is the inner product with such a vector, plus the offset
        of the target. By cosine, queries are normalised before the map, but not after
        it. A model without a query map returns the queries unmapped.

        Args:
            queries: The queries [m, d].

        Raises:
            InputError: The queries cannot be used.
        """
        vectors = as_vectors(queries, "queries")
        if vectors.dim != self.dim:
            raise InputError(
                f"queries have {vectors.dim} dimensions, the query bank of this model "
                f"has {self.dim}; embed the queries with the gallery's model"
            )
        searched = prepare(vectors, self.metric)
        return searched if self.query_map is None else self.query_map(searched)

    def centre_on(
        self, targets: VectorLike, *, compute: Compute = Compute()
    ) -> OffsetModel:
        """Return this model, centred so that offsets have mean 0 over a gallery.

        Args:
            targets: The gallery [n, d].
            compute: Device, memory and progress.
        """
        vectors = Directed.of(as_vectors(targets, "targets"), self.metric)
        return self.centre_by(self.raw_offsets(vectors, compute), vectors)

    def centre_by(self, raw: np.ndarray, targets: Vectors) -> OffsetModel:
        """Return the result of `centre_on`, from raw offsets that are already known.

        Args:
            raw: The raw offsets of the targets, float64 [n].
            targets: The gallery [n, d]. If it leaves out zero vectors, `fitted` has 0
                for them.

        Raises:
            InputError: An offset is beyond float32.
        """
        if not np.abs(raw).max() < LARGEST:  # also if one is NaN
            raise _out_of_proportion(self)
        centre = float(raw.mean())
        centred = raw - centre
        fitted = centred.astype(np.float32)
        gallery = GalleryStatistics(
            len(raw), float(centred.min()), float(fitted.max()), float(centred.std())
        )
        if isinstance(targets, Directed):
            fitted = targets.for_source(fitted)
        fitted.flags.writeable = False
        return replace(self, centre=centre, gallery=gallery, fitted=fitted)

    def raw_offsets(self, targets: VectorLike, compute: Compute) -> np.ndarray:
        """Return the sum of the terms, neither centred nor capped: float64 [n].

        Args:
            targets: Any targets [n, d].
            compute: Device, memory and progress.

        Raises:
            InputError: An offset is beyond float32.
        """
        vectors = as_vectors(targets, "targets")
        total = np.zeros(vectors.rows)
        # Successive terms with the same bank and answers share a pass.
        passes = groupby(self.terms, lambda term: (id(term.bank), id(term.answers)))
        for _, group in passes:
            # Methods put a log-sum-exp first, and `reduce` needs it last.
            terms = [*group][::-1]
            similarities = self.similarities(terms[0], compute)
            reductions = [term.reduction for term in terms]
            values = reduce(similarities, vectors, reductions, terms[0].answers)
            with np.errstate(over="ignore", invalid="ignore"):
                for term, value in zip(terms, values, strict=True):
                    total += term.scale * value
        if not np.abs(total).max() < LARGEST:
            raise _out_of_proportion(self)
        return total

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one safetensors file, completely or not at all.

        Raises ModelFileError if writing fails; an existing file then stays unchanged.
        """
        file.write(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the bytes of a model file: safetensors with a JSON header."""
        return file.to_bytes(*_content(self))

    @staticmethod
    def from_bytes(content: bytes, name: str = "model") -> OffsetModel:
        """Return the model in the bytes of a model file.

        Args:
            content: The bytes returned by `to_bytes`.
            name: The name used in error messages.

        Raises:
            ModelFileError: The bytes are damaged, not a model, or of another version.
        """
        return file.from_bytes(content, name, _build)

    def to_texts(self) -> list[str]:
        """Return the model as base64 texts, for a store that holds texts."""
        content = self.to_bytes()
        starts = range(0, len(content), PART_BYTES)
        parts = [content[start : start + PART_BYTES] for start in starts]
        return [base64.b64encode(part).decode() for part in parts]

    @staticmethod
    def from_texts(texts: Iterable[str], name: str = "model") -> OffsetModel:
        """Return the model in the texts from `to_texts`.

        Args:
            texts: All texts, in order.
            name: The name used in error messages.

        Raises:
            ModelFileError: As in `from_bytes`.
        """
        try:
            content = b"".join(map(base64.b64decode, texts))
        except (ValueError, TypeError) as error:
            raise ModelFileError(f"{name} is damaged: {error}; fit it again") from None
        return file.from_bytes(content, name, _build)

    def __repr__(self) -> str:
        method = describe_method(self.method, self.parameters)
        parts = [method, self.metric.value, f"bank {self.terms[0].bank.shape}"]
        if self.gallery is not None:
            parts.append(f"gallery of {self.gallery.count}")
        if self.query_map is not None:
            parts.append(f"query map of {self.query_map.pairs} pairs")
        return f"OffsetModel({', '.join(parts)})"


def _out_of_proportion(model: OffsetModel) -> InputError:
    """Return the error for a model with an offset beyond float32."""
    return InputError(
        f"{describe_method(model.method, model.parameters)} gives offsets that a "
        "search cannot add: its parameters do not suit the similarities of these "
        "vectors"
    )


def _content(model: OffsetModel) -> tuple[Header, dict[str, np.ndarray]]:
    """Return the header and the tensors of the file of `model`."""
    terms, tensors = pack(model.terms)
    header = {
        "format": file.FORMAT,
        "method": model.method,
        "parameters": model.parameters,
        "metric": model.metric.value,
        "dim": model.dim,
        "bank_fingerprint": model.bank_fingerprint,
        "centre": model.centre,
        "gallery": asdict(model.gallery) if model.gallery else None,
        "terms": terms,
    }
    if model.hubness_at_fit is not None:
        header["finds"] = asdict(model.hubness_at_fit)
    learned = model.query_map
    if learned is not None:
        header["query_map"] = {
            "strength": learned.strength,
            "pairs": learned.pairs,
        }
        tensors["query_map.step"] = np.ascontiguousarray(learned.step)
    return header, tensors


def _build(header: Header, tensors: dict[str, np.ndarray]) -> OffsetModel:
    """Build the model from the header and the tensors of its file."""
    gallery = hubness = query_map = None
    if header["gallery"]:
        gallery = GalleryStatistics(**header["gallery"])
    if "finds" in header:
        hubness = HubnessAtFit(**header["finds"])
    if "query_map" in header:
        query_map = QueryMap(tensors["query_map.step"], **header["query_map"])
    return OffsetModel(
        header["method"],
        header["parameters"],
        Metric(header["metric"]),
        unpack(header["terms"], tensors),
        header["bank_fingerprint"],
        header["centre"],
        gallery,
        hubness,
        query_map,
    )


def describe_method(method: str, parameters: Mapping[str, Setting]) -> str:
    """Return a method and its parameters in one line."""
    settings = []
    for key, value in parameters.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        settings.append(f"{key}={shown}")
    return f"{method}({', '.join(settings)})"


def load(path: str | os.PathLike[str]) -> OffsetModel:
    """Load the model that `OffsetModel.save` wrote to `path`.

    Raises:
        ModelFileError: The file is missing, damaged, or written by another version.
    """
    return OffsetModel.from_bytes(file.read(path), f"model file {os.fspath(path)!r}")
