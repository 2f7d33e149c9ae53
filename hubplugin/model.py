"""`OffsetModel`: what a fit returns. It turns any targets, old or new, into offsets, and lies in one file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import hubplugin
from hubplugin.errors import InputError, ModelFileError
from hubplugin.metric import Metric
from hubplugin.vectors import Progress, VectorLike, as_vectors

if TYPE_CHECKING:
    from hubplugin.reductions import Compute, Precision

FORMAT = 1
"""Version of the model file. A reader refuses what a newer version wrote."""

LARGEST_OFFSET = 1e38
"""Offsets are stored as float32, which ends at 3.4e38."""


@dataclass(frozen=True)
class LogSumExp:
    """scale * LSE_u( s(b_u, t)/tau + log_weights_u ) over a bank [m, d]; log_weights [m] or None for 0."""

    kind: ClassVar[str] = "log_sum_exp"
    bank: np.ndarray
    tau: float
    scale: float
    log_weights: np.ndarray | None = None


@dataclass(frozen=True)
class TopKMean:
    """scale * mean of the k largest s(b_u, t) over a bank [m, d]."""

    kind: ClassVar[str] = "top_k_mean"
    bank: np.ndarray
    k: int
    scale: float


@dataclass(frozen=True)
class Dot:
    """scale * s(v, t) for one vector v, held as a bank [1, d]."""

    kind: ClassVar[str] = "dot"
    bank: np.ndarray
    scale: float


Term = LogSumExp | TopKMean | Dot
_TERMS: dict[str, Callable[..., Term]] = {term.kind: term for term in (LogSumExp, TopKMean, Dot)}


@dataclass(frozen=True)
class GalleryStatistics:
    """The offsets of the gallery of the fit: how many, and their extremes and spread after centring."""

    count: int
    smallest: float
    largest: float
    deviation: float


@dataclass(frozen=True)
class Activation:
    """The targets that are among the k nearest of at least one bank member: QB-Norm's gallery activation set, the
    potential hubs. Kept as s of each member's k-th nearest target in the gallery of the fit (`thresholds`: one
    array [m] a term), so that a target which arrives later is in the set or not without a refit."""

    k: int
    thresholds: Sequence[np.ndarray]


@dataclass(frozen=True)
class OffsetModel:
    """offset(t) = sum of `terms` at t, less `centre`: one number a target, to be added to s(q, t).

    method, parameters: as given to `fit`. metric: the similarity the offsets belong to. bank_fingerprint: names the
    query bank and the target bank. centre: mean of the raw offsets over the gallery of the fit (0 without one), so
    that 0 is the neutral offset. gallery: None where the fit was given no targets. activation: the activation set,
    which `activation.Dynamic` asks; offsets do not depend on it.
    """

    method: str
    parameters: dict[str, Any]
    metric: Metric
    terms: Sequence[Term]
    bank_fingerprint: str
    centre: float = 0.0
    gallery: GalleryStatistics | None = None
    activation: Activation | None = None

    @property
    def dim(self) -> int:
        return int(self.terms[0].bank.shape[1])

    @cached_property
    def fingerprint(self) -> str:
        """Names this very model, its centre included: the first 16 hex digits of the SHA-256 of its file."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:16]

    def offsets(
        self,
        targets: VectorLike,
        *,
        device: str = "auto",
        memory: int | str = "1GiB",
        progress: Progress | None = None,
        precision: Precision = "float32",
    ) -> np.ndarray:
        """Offsets of `targets` [n, d] (or a store or file of them), seen by the fit or not: float32 [n].

        Raises InputError where `targets` cannot be used or have other dimensions than the bank.
        """
        from hubplugin.reductions import Compute

        return (self.raw_offsets(targets, Compute(device, memory, progress, precision)) - self.centre).astype(
            np.float32
        )

    def centred_on(
        self,
        targets: VectorLike,
        *,
        device: str = "auto",
        memory: int | str = "1GiB",
        progress: Progress | None = None,
    ) -> OffsetModel:
        """This model with offsets of mean 0 over `targets` [n, d], and their statistics."""
        from hubplugin.reductions import Compute

        return self.centred_by(self.raw_offsets(targets, Compute(device, memory, progress)))

    def centred_by(self, raw: np.ndarray) -> OffsetModel:
        """`centred_on` for whoever knows the raw offsets of the targets: float64 [n]."""
        centre = float(self._checked(raw).mean())
        centred = raw - centre
        statistics = GalleryStatistics(len(raw), float(centred.min()), float(centred.max()), float(centred.std()))
        return replace(self, centre=centre, gallery=statistics)

    def with_activation(
        self,
        targets: VectorLike,
        k: int = 1,
        *,
        device: str = "auto",
        memory: int | str = "1GiB",
        progress: Progress | None = None,
    ) -> OffsetModel:
        """This model with the activation set of the gallery `targets` [n, d]: QB-Norm eq. 2, whose k is 1.

        Raises InputError if k is not in 1 ... n, or a term has no bank of examples (`dn`).
        """
        from hubplugin.reductions import Compute, Similarities, kth_largest

        vectors = as_vectors(targets, "targets")
        if not 1 <= k <= vectors.rows:
            raise InputError(f"activation set: k={k} is not between 1 and the {vectors.rows} targets of the gallery")
        if any(isinstance(term, Dot) for term in self.terms):
            raise InputError(f"method {self.method!r} keeps the mean of its bank only, so it has no activation set")
        compute = Compute(device, memory, progress)
        thresholds = [kth_largest(Similarities(term.bank, self.metric, compute), vectors, k) for term in self.terms]
        return replace(self, activation=Activation(k, tuple(thresholds)))

    def activated(
        self,
        targets: VectorLike,
        *,
        device: str = "auto",
        memory: int | str = "1GiB",
        progress: Progress | None = None,
    ) -> np.ndarray:
        """Which of `targets` [n, d] are in the activation set, seen by the fit or not: bool [n]."""
        from hubplugin.reductions import Compute, Similarities, reaches

        if self.activation is None:
            raise InputError("this model has no activation set; give it one with model.with_activation(targets)")
        vectors, compute = as_vectors(targets, "targets"), Compute(device, memory, progress)
        inside = np.zeros(vectors.rows, bool)
        for term, thresholds in zip(self.terms, self.activation.thresholds, strict=True):
            inside |= reaches(Similarities(term.bank, self.metric, compute), vectors, thresholds)
        return inside

    def raw_offsets(self, targets: VectorLike, compute: Compute) -> np.ndarray:
        """The sum of the terms, not centred: float64 [n]. Raises InputError where it is beyond float32."""
        from hubplugin import reductions

        vectors = as_vectors(targets, "targets")
        if vectors.dim != self.dim:
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, the query bank of this model has {self.dim}; "
                "embed both with the same model"
            )
        total = np.zeros(vectors.rows)
        for term in self.terms:
            similarities = compute.similarities(term.bank, self.metric)
            if isinstance(term, LogSumExp):
                value = reductions.log_sum_exp(similarities, vectors, term.tau, term.log_weights, "offsets")
            elif isinstance(term, TopKMean):
                value = reductions.top_k_mean(similarities, vectors, term.k, "offsets")
            else:
                value = reductions.dot(similarities, vectors, "offsets")
            with np.errstate(over="ignore", invalid="ignore"):
                total += term.scale * value
        return self._checked(total)

    def _checked(self, raw: np.ndarray) -> np.ndarray:
        if not np.abs(raw).max() < LARGEST_OFFSET:  # nor is NaN
            raise InputError(
                f"{self._described} gives offsets that are no numbers a search can add: its parameters are out of "
                "proportion to the similarities of these vectors"
            )
        return raw

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model to one safetensors file, whole or not at all (written beside, then renamed)."""
        content, beside = self.to_bytes(), Path(f"{os.fspath(path)}.tmp")
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise ModelFileError(f"cannot write model file {os.fspath(path)!r}: {error.strerror}") from None

    def to_bytes(self) -> bytes:
        """The model as the bytes of a model file: safetensors with a JSON header."""
        from safetensors.numpy import save

        tensors: dict[str, np.ndarray] = {}
        terms = []
        for number, term in enumerate(self.terms):
            fields = {"kind": term.kind}
            for key, value in vars(term).items():
                if isinstance(value, np.ndarray):
                    tensors[f"{number}.{key}"] = np.ascontiguousarray(value)
                elif value is not None:
                    fields[key] = value
            terms.append(fields)
        if self.activation:
            for number, thresholds in enumerate(self.activation.thresholds):
                tensors[f"activation.{number}"] = np.ascontiguousarray(thresholds)
        header = {
            "format": FORMAT,
            "hubplugin": hubplugin.__version__,
            "method": self.method,
            "parameters": self.parameters,
            "metric": self.metric.value,
            "dim": self.dim,
            "bank_fingerprint": self.bank_fingerprint,
            "centre": self.centre,
            "gallery": asdict(self.gallery) if self.gallery else None,
            "activation": self.activation.k if self.activation else None,
            "terms": terms,
            "tensors_sha256": _digest(tensors),
        }
        return save(tensors, metadata={"hubplugin": json.dumps(header)})

    @classmethod
    def from_bytes(cls, content: bytes, name: str = "model") -> OffsetModel:
        """The model in the bytes of a model file. Raises ModelFileError if they are damaged, are no model, or
        come from a newer version; `name` is what the error calls it."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            tensors = load(content)
            length = int.from_bytes(content[:8], "little")
            metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        except (SafetensorError, ValueError) as error:
            raise ModelFileError(f"{name} is damaged or not a hubplugin model: {error}; fit it again") from None
        if "hubplugin" not in metadata:
            raise ModelFileError(f"{name} is a safetensors file, but not a hubplugin model; fit one with hubplugin.fit")
        try:
            header = json.loads(metadata["hubplugin"])
            if header["format"] > FORMAT:
                raise ModelFileError(
                    f"{name} has format {header['format']}, written by hubplugin {header['hubplugin']}; this version "
                    f"({hubplugin.__version__}) reads up to format {FORMAT}: upgrade hubplugin"
                )
            if header["tensors_sha256"] != _digest(tensors):
                raise ModelFileError(f"{name} is damaged: its tensors do not match their checksum; fit it again")
            terms = []
            for number, fields in enumerate(header["terms"]):
                prefix = f"{number}."
                arrays = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
                terms.append(_TERMS[fields.pop("kind")](**fields, **arrays))
            return cls(
                method=header["method"],
                parameters=header["parameters"],
                metric=Metric(header["metric"]),
                terms=tuple(terms),
                bank_fingerprint=header["bank_fingerprint"],
                centre=float(header["centre"]),
                gallery=GalleryStatistics(**header["gallery"]) if header["gallery"] else None,
                activation=_activation(header["activation"], tensors, len(terms)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelFileError(f"{name} is damaged: its header cannot be read ({error!r}); fit it again") from None

    @property
    def _described(self) -> str:
        return f"{self.method}({', '.join(f'{key}={value}' for key, value in self.parameters.items())})"

    def __repr__(self) -> str:
        fitted = f", gallery of {self.gallery.count}" if self.gallery else ""
        return f"OffsetModel({self._described}, {self.metric.value}, bank {self.terms[0].bank.shape}{fitted})"


def load(path: str | os.PathLike[str]) -> OffsetModel:
    """The model that `OffsetModel.save` wrote to `path`.

    Raises ModelFileError if there is no such file, it is damaged, or a newer version wrote it.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot read model file {os.fspath(path)!r}: {error.strerror}") from None
    return OffsetModel.from_bytes(content, f"model file {os.fspath(path)!r}")


def _activation(k: int | None, tensors: dict[str, np.ndarray], terms: int) -> Activation | None:
    return None if k is None else Activation(k, tuple(tensors[f"activation.{number}"] for number in range(terms)))


def _digest(tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(f"{key}{tensors[key].shape}{tensors[key].dtype.str}".encode())
        digest.update(np.ascontiguousarray(tensors[key]).data)
    return digest.hexdigest()
