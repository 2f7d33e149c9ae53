"""`OffsetModel`: what a fit returns. It turns any targets, old or new, into offsets, and lies in one file."""

from __future__ import annotations

import base64
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from hubplugin.compute import Compute
from hubplugin.errors import EmptyInput, InputError, ModelFileError, ZeroVector
from hubplugin.metric import Metric
from hubplugin.model import file
from hubplugin.model.file import LARGEST, Header
from hubplugin.model.query_map import QueryMap
from hubplugin.vectors import Directed, VectorLike, Vectors, as_vectors, prepare

if TYPE_CHECKING:
    from hubplugin.compute import LogSum, MeanOfLargest

ROUNDING = 1e-6
"""By how much float32 products of one pair differ, beside the larger of 1 and the similarity."""

PART_BYTES = 3 << 20
"""Of a model in each of its `to_texts`, 4 MiB as base64: servers accept requests of some 32 MB."""


@dataclass(frozen=True)
class LogSumExp:
    """scale * LSE_u( s(b_u, t)/tau + log_weights_u ) over a bank [m, d]; log_weights [m] or None for 0.

    answers: [m], the similarity from which on a target counts as the answer of bank query u; its entry, and then the
    target's largest, are left out of the sum. None leaves nothing out.
    """

    kind: ClassVar[str] = "log_sum_exp"
    bank: np.ndarray
    tau: float
    scale: float
    log_weights: np.ndarray | None = None
    answers: np.ndarray | None = None


@dataclass(frozen=True)
class TopKMean:
    """scale * mean of the k largest s(b_u, t) over a bank [m, d]. answers: as in `LogSumExp`."""

    kind: ClassVar[str] = "top_k_mean"
    bank: np.ndarray
    k: int
    scale: float
    answers: np.ndarray | None = None


@dataclass(frozen=True)
class Dot:
    """scale * s(v, t) for one vector v, held as a bank [1, d]."""

    kind: ClassVar[str] = "dot"
    bank: np.ndarray
    scale: float


Term = LogSumExp | TopKMean | Dot
TERMS: dict[str, Callable[..., Term]] = {
    term.kind: term for term in (LogSumExp, TopKMean, Dot)
}


def group_by_bank(terms: Sequence[Term]) -> list[list[Term]]:
    """Return `terms` in lists, each of which one pass serves.

    A log-sum-exp and the mean of the largest share it, if they share a bank and its
    answers."""
    lists: list[list[Term]] = []
    for term in terms:
        first = lists[-1][0] if lists else None
        if (
            isinstance(term, TopKMean)
            and isinstance(first, LogSumExp)
            and term.bank is first.bank
            and term.answers is first.answers
        ):
            lists[-1].append(term)
        else:
            lists.append([term])
    return lists


def reduction_of(term: Term) -> LogSum | MeanOfLargest:
    """Return the reduction that computes a term; the one vector of a `Dot` has one similarity."""
    from hubplugin.compute import LogSum, MeanOfLargest

    if isinstance(term, LogSumExp):
        return LogSum(term.tau, term.log_weights)
    return MeanOfLargest(term.k if isinstance(term, TopKMean) else 1)


def pack(terms: Sequence[Term]) -> tuple[list[Header], dict[str, np.ndarray]]:
    """`terms` as headers of a file, and the arrays in them by name. An array that several terms share is held once."""
    headers, tensors = [], {}
    names: dict[int, str] = {}
    for number, term in enumerate(terms):
        header: Header = {"kind": term.kind}
        for key, value in vars(term).items():
            if isinstance(value, np.ndarray):
                name = names.setdefault(id(value), f"{number}.{key}")
                if name == f"{number}.{key}":
                    tensors[name] = np.ascontiguousarray(value)
                else:
                    header[key] = {"as": name}
            elif value is not None:
                header[key] = value
        headers.append(header)
    return headers, tensors


def unpack(
    headers: Sequence[Header], tensors: dict[str, np.ndarray]
) -> tuple[Term, ...]:
    """The terms of which `pack` made `headers` and `tensors`."""
    terms = []
    for number, header in enumerate(headers):
        prefix = f"{number}."
        fields: Header = {
            key.removeprefix(prefix): value
            for key, value in tensors.items()
            if key.startswith(prefix)
        }
        fields |= {
            key: tensors[value["as"]] if isinstance(value, dict) else value
            for key, value in header.items()
        }
        terms.append(TERMS[fields.pop("kind")](**fields))
    return tuple(terms)


@dataclass(frozen=True)
class HubnessAtFit:
    """The 10-occurrence of the gallery of the fit over `queries` queries of the bank.

    raw, corrected, chance: its skewness. largest: the share of the queries that found the
    target found most often, corrected. right: R@1 of held-out queries raw and corrected,
    its change, and the interval of this; None where no answers were known.
    """

    queries: int
    raw: float
    corrected: float
    chance: float
    largest: float
    right: Sequence[float] | None = None


Setting: TypeAlias = int | float | str | None
"""The value of a parameter of a method: a number or a name; None where the fit finds it."""

Value: TypeAlias = str | int | None
"""A value in a field of a target: a text, a number or a truth value. None: nothing is there."""


@dataclass(frozen=True)
class GalleryStatistics:
    """The offsets of the gallery of the fit: how many, and their extremes and spread after centring."""

    count: int
    smallest: float
    largest: float
    deviation: float

    @property
    def cap(self) -> float:
        """The largest offset that a later target may get: the largest of the gallery as it is stored, a float32."""
        return float(np.float32(self.largest))


@dataclass(frozen=True)
class Activation:
    """The targets that are among the k nearest of at least one bank member: QB-Norm's gallery activation set, the
    potential hubs. Kept as s of each member's k-th nearest target in the gallery of the fit (`thresholds`: one
    array [m] a term), so that a target which arrives later is in the set or not without a refit."""

    k: int
    thresholds: Sequence[np.ndarray]


@dataclass(frozen=True)
class ModelFacts:
    """A model in the JSON of results: its method, and the fingerprints that name it and its banks."""

    method: str
    parameters: dict[str, Setting]
    fingerprint: str
    bank_fingerprint: str


@dataclass(frozen=True)
class OffsetModel:
    """offset(t) = sum of `terms` at t, less `centre`: one number a target, to be added to s(q, t).

    method, parameters: as given to `fit`. metric: the similarity the offsets belong to. bank_fingerprint: names the
    query bank and the target bank. centre: mean of the raw offsets over the gallery of the fit (0 without one), so
    that 0 is the neutral offset. gallery: None where the fit was given no targets. activation: the activation set,
    which `rerank.Dynamic` and `DualDynamic` ask; offsets do not depend on it.
    hubness_at_fit: counted by `apply` and `refit`, for `inspect`; it makes no other model.
    query_map: what known answers taught, None where nothing was to be learned from them. Banks lie here as they were
    given, and are mapped as all queries are: offsets belong to what is searched with.
    fitted: what `offsets` would give the gallery of the fit, in its order: float32 [n]. None in a model that was read
    from a file, or fitted without a gallery or by the workers of an executor. Whoever replaces terms takes it out.
    """

    method: str
    parameters: dict[str, Setting]
    metric: Metric
    terms: Sequence[Term]
    bank_fingerprint: str
    centre: float = 0.0
    gallery: GalleryStatistics | None = None
    activation: Activation | None = None
    hubness_at_fit: HubnessAtFit | None = None
    query_map: QueryMap | None = None
    fitted: np.ndarray | None = field(default=None, compare=False, repr=False)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def facts(model: OffsetModel) -> ModelFacts:
            return ModelFacts(
                model.method,
                model.parameters,
                model.fingerprint,
                model.bank_fingerprint,
            )

        schema = handler.generate_schema(ModelFacts)
        as_facts = core_schema.plain_serializer_function_ser_schema(
            facts, return_schema=schema
        )
        return core_schema.is_instance_schema(cls, serialization=as_facts)

    @property
    def dim(self) -> int:
        return int(self.terms[0].bank.shape[1])

    @cached_property
    def fingerprint(self) -> str:
        """Names this very model, its centre included, whatever version of hubplugin wrote it: the first 16 hex digits
        of the SHA-256 of what its file holds, but for `hubness_at_fit`."""
        return file.digest(*replace(self, hubness_at_fit=None)._content())[:16]

    def offsets(
        self,
        targets: VectorLike,
        *,
        compute: Compute = Compute(),
    ) -> np.ndarray:
        """Return the offsets of targets, seen by the fit or not.

        No offset is above the cap, the largest of the gallery of the fit: a vector that is far from the whole bank
        would otherwise get more than any target has, and rank above them. Targets of the fit keep theirs. A model that
        was fitted without a gallery has no cap.

        Under cosine a zero vector, which has no direction, has the neutral offset 0.

        Args:
            targets: [n, d], or a store or a file of them.
            compute: Device, memory and progress.

        Returns:
            float32 [n].

        Raises:
            InputError: The targets cannot be used, or have other dimensions than the bank.
        """
        vectors = as_vectors(targets, "targets")
        products = vectors.rows * sum(term.bank.size for term in self.terms)
        compute = compute.for_products(products)
        if not compute.library().is_on_cpu:
            # A card is through before they are looked through for zero vectors.
            try:
                return self._capped(self.raw_offsets(vectors, compute) - self.centre)
            except ZeroVector:
                pass
        try:
            directed = Directed.of(vectors, self.metric)
        except EmptyInput:
            return np.zeros(vectors.rows, np.float32)
        offsets = self._capped(self.raw_offsets(directed, compute) - self.centre)
        if isinstance(directed, Directed) and directed is not vectors:
            return directed.of_source(offsets)
        return offsets

    def _capped(self, offsets: np.ndarray) -> np.ndarray:
        """Return centred `offsets`, none above the cap of the gallery: float32 [n]."""
        if self.gallery is not None:
            offsets = np.minimum(offsets, self.gallery.cap)
        return offsets.astype(np.float32)

    def _search_vectors(self, term: Term) -> np.ndarray:
        """Return the bank [m, d] of `term` as it is searched with."""
        if self.query_map is None:
            return term.bank
        return self.query_map.of_bank(term.bank)

    def queries(self, queries: VectorLike) -> np.ndarray:
        """Return the vectors to search with in the place of `queries` [m, d]: float32 [m, d].

        The score of the target t is its inner product with them, plus its offset.

        Where the metric is cosine, queries come to unit length before the map; what is mapped has its own length. A
        model without a query map returns the queries. Raises InputError where they cannot be used.
        """
        vectors = as_vectors(queries, "queries")
        if vectors.dim != self.dim:
            raise InputError(
                f"queries have {vectors.dim} dimensions, the query bank of this model has {self.dim}"
            )
        searched = prepare(vectors, self.metric)
        return searched if self.query_map is None else self.query_map(searched)

    def centre_on(
        self, targets: VectorLike, *, compute: Compute = Compute()
    ) -> OffsetModel:
        """Return this model with offsets of mean 0 over a gallery, and their statistics.

        Args:
            targets: The gallery [n, d].
            compute: Device, memory and progress.
        """
        vectors = Directed.of(as_vectors(targets, "targets"), self.metric)
        return self.centre_by(self.raw_offsets(vectors, compute), vectors)

    def centre_by(self, raw: np.ndarray, targets: Vectors) -> OffsetModel:
        """Do as `centre_on`, for callers who know the offsets before they are centred.

        Args:
            raw: These offsets, float64 [n].
            targets: The gallery [n, d].
        """
        centre = float(self._check_finite(raw).mean())
        centred = raw - centre
        statistics = GalleryStatistics(
            len(raw), float(centred.min()), float(centred.max()), float(centred.std())
        )
        model = replace(self, centre=centre, gallery=statistics)
        fitted = model._capped(centred)
        if isinstance(targets, Directed):
            fitted = targets.of_source(fitted)
        fitted.flags.writeable = False
        return replace(model, fitted=fitted)

    def with_activation(
        self, targets: VectorLike, k: int = 1, *, compute: Compute = Compute()
    ) -> OffsetModel:
        """Return this model with the activation set of a gallery: QB-Norm eq. 2.

        Args:
            targets: The gallery [n, d].
            k: How many of the nearest of each bank query are in the set; the paper's is 1.
            compute: Device, memory and progress.

        Raises:
            InputError: k is not in 1 ... n, or a term has no bank of examples (`dn`).
        """
        from hubplugin.compute import TopK, search

        vectors = as_vectors(targets, "targets")
        if not 1 <= k <= vectors.rows:
            raise InputError(
                f"activation set: k={k} is not between 1 and the {vectors.rows} targets of the gallery"
            )
        if any(isinstance(term, Dot) for term in self.terms):
            raise InputError(
                f"method {self.method!r} keeps the mean of its bank only, so it has no activation set"
            )
        thresholds = []
        for term in self.terms:
            nearest = TopK(k)
            bank = self._search_vectors(term)
            search(bank, vectors, self.metric, compute, nearest, label="activation set")
            thresholds.append(nearest.scores[0, :, -1])
        return replace(self, activation=Activation(k, tuple(thresholds)))

    def is_activated(
        self, targets: VectorLike, *, compute: Compute = Compute()
    ) -> np.ndarray:
        """Tell which targets are in the activation set, seen by the fit or not.

        Args:
            targets: [n, d].
            compute: Device, memory and progress.

        Returns:
            bool [n].

        Raises:
            InputError: The model has no activation set.
        """
        from hubplugin.compute import Similarities
        from hubplugin.compute.device import to_host

        if self.activation is None:
            raise InputError(
                "this model has no activation set; give it one with model.with_activation(targets)"
            )
        vectors = as_vectors(targets, "targets")
        inside = np.zeros(vectors.rows, bool)
        for term, thresholds in zip(
            self.terms, self.activation.thresholds, strict=True
        ):
            similarities = Similarities(
                self._search_vectors(term), self.metric, compute
            )
            least = similarities.library.like(
                thresholds - ROUNDING * max(1.0, float(np.abs(thresholds).max()))
            )
            for tile in similarities.tiles(vectors, "activation set"):
                inside[tile.rows] |= to_host((tile.s >= least(tile.s)).any(1))
        return inside

    def raw_offsets(self, targets: VectorLike, compute: Compute) -> np.ndarray:
        """Return the sum of the terms, not centred, not capped.

        Args:
            targets: Any targets [n, d].
            compute: Device, memory and progress.

        Returns:
            float64 [n].

        Raises:
            InputError: It is beyond float32.
        """
        from hubplugin.compute import AnswerMask, Similarities, reduce

        vectors = as_vectors(targets, "targets")
        if vectors.dim != self.dim:
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, the query bank of this model has {self.dim}; "
                "embed both with the same model"
            )
        total = np.zeros(vectors.rows)
        for terms in group_by_bank(self.terms):
            first = terms[0]
            mask = None
            if not isinstance(first, Dot) and first.answers is not None:
                mask = AnswerMask(first.answers)
            bank = self._search_vectors(first)
            similarities = Similarities(bank, self.metric, compute)
            reductions = [reduction_of(term) for term in terms]
            values = reduce(similarities, vectors, reductions, mask)
            with np.errstate(over="ignore", invalid="ignore"):
                for term, value in zip(terms, values, strict=True):
                    total += term.scale * value
        return self._check_finite(total)

    def _check_finite(self, raw: np.ndarray) -> np.ndarray:
        if not max(raw.max(), -raw.min()) < LARGEST:  # nor is NaN
            method = describe_method(self.method, self.parameters)
            raise InputError(
                f"{method} gives offsets that are no numbers a search can add: its parameters are out of "
                "proportion to the similarities of these vectors"
            )
        return raw

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one safetensors file, whole or not at all.

        Raises ModelFileError if it cannot; the file that was there before is then untouched.
        """
        file.write(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the model as the bytes of a model file: safetensors with a JSON header."""
        return file.to_bytes(*self._content())

    @staticmethod
    def from_bytes(content: bytes, name: str = "model") -> OffsetModel:
        """Return the model in the bytes of a model file.

        Args:
            content: What `to_bytes` gave.
            name: What errors call it.

        Raises:
            ModelFileError: The bytes are damaged, are no model, or come from another version.
        """
        return file.from_bytes(content, name, _build)

    def to_texts(self) -> list[str]:
        """Return `to_bytes` in base64, in parts, for a store that holds texts."""
        content = self.to_bytes()
        parts = range(0, len(content), PART_BYTES)
        return [
            base64.b64encode(content[start : start + PART_BYTES]).decode()
            for start in parts
        ]

    @staticmethod
    def from_texts(texts: Iterable[str], name: str = "model") -> OffsetModel:
        """Return the model in the texts that `to_texts` gave.

        Args:
            texts: All of them, in order.
            name: What errors call the model.

        Raises:
            ModelFileError: As `from_bytes`.
        """
        try:
            content = b"".join(map(base64.b64decode, texts))
        except (ValueError, TypeError) as error:
            raise ModelFileError(f"{name} is damaged: {error}; fit it again") from None
        return OffsetModel.from_bytes(content, name)

    def _content(self) -> tuple[Header, dict[str, np.ndarray]]:
        """Return header and tensors of the model file."""
        terms, tensors = pack(self.terms)
        if self.activation:
            for number, thresholds in enumerate(self.activation.thresholds):
                tensors[f"activation.{number}"] = np.ascontiguousarray(thresholds)
        header = {
            "format": file.FORMAT,
            "method": self.method,
            "parameters": self.parameters,
            "metric": self.metric.value,
            "dim": self.dim,
            "bank_fingerprint": self.bank_fingerprint,
            "centre": self.centre,
            "gallery": asdict(self.gallery) if self.gallery else None,
            "activation": self.activation.k if self.activation else None,
            "terms": terms,
        }
        if self.hubness_at_fit is not None:
            header["finds"] = asdict(self.hubness_at_fit)
        if self.query_map is not None:
            header["query_map"] = {
                name: getattr(self.query_map, name)
                for name in ("strength", "pairs", "whitened")
            }
            tensors["query_map.step"] = np.ascontiguousarray(self.query_map.step)
        return header, tensors

    def __repr__(self) -> str:
        method = describe_method(self.method, self.parameters)
        parts = [method, self.metric.value, f"bank {self.terms[0].bank.shape}"]
        if self.gallery is not None:
            parts.append(f"gallery of {self.gallery.count}")
        if self.query_map is not None:
            parts.append(f"queries mapped by {self.query_map.pairs} pairs")
        return f"OffsetModel({', '.join(parts)})"


def _build(header: Header, tensors: dict[str, np.ndarray]) -> OffsetModel:
    """Return the model whose `_content` was `header` and `tensors`."""
    terms = unpack(header["terms"], tensors)
    k = header["activation"]
    activation = None
    if k:
        thresholds = [tensors[f"activation.{number}"] for number in range(len(terms))]
        activation = Activation(k, tuple(thresholds))
    gallery = header["gallery"]
    finds = header.get("finds")
    query_map = header.get("query_map")
    return OffsetModel(
        header["method"],
        header["parameters"],
        Metric(header["metric"]),
        terms,
        header["bank_fingerprint"],
        float(header["centre"]),
        GalleryStatistics(**gallery) if gallery else None,
        activation,
        HubnessAtFit(**finds) if finds else None,
        QueryMap(tensors["query_map.step"], **query_map) if query_map else None,
    )


def describe_method(method: str, parameters: Mapping[str, Setting]) -> str:
    """Return a method with its parameters in one line."""
    settings = []
    for key, value in parameters.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        settings.append(f"{key}={shown}")
    return f"{method}({', '.join(settings)})"


def load(path: str | os.PathLike[str]) -> OffsetModel:
    """Return the model that `OffsetModel.save` wrote to `path`.

    Raises ModelFileError if there is no such file, it is damaged, or another version wrote it.
    """
    return OffsetModel.from_bytes(file.read(path), f"model file {os.fspath(path)!r}")


def warn_if_swapped(model: OffsetModel, count: int) -> None:
    """Warns where `fit` was probably given the gallery as its query bank: `model` goes to `count` targets, as many as
    its bank has queries, and was fitted on another number of targets."""
    queries = len(model.terms[0].bank)
    if (
        model.gallery is not None
        and queries == count != model.gallery.count
        and count > 1
    ):
        warnings.warn(
            f"the model was fitted on a query bank of {queries} and {model.gallery.count} targets, and is given to a "
            f"gallery of {count}: if the two were swapped, it is fit(gallery, bank)",
            stacklevel=3,
        )
