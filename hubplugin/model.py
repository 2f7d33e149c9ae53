"""`OffsetModel`: what a fit returns. It turns any targets, old or new, into offsets, and lies in one file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import hubplugin
from hubplugin.errors import InputError, ModelFileError
from hubplugin.metric import Metric
from hubplugin.vectors import Progress, VectorLike, as_vectors

FORMAT = 1
"""Version of the model file. A reader refuses what a newer version wrote."""


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
class OffsetModel:
    """offset(t) = sum of `terms` at t, less `centre`: one number a target, to be added to s(q, t).

    method, parameters: as given to `fit`. metric: the similarity the offsets belong to. bank_fingerprint: names the
    query bank and the target bank. centre: mean of the raw offsets over the gallery of the fit (0 without one), so
    that 0 is the neutral offset. gallery: None where the fit was given no targets.
    """

    method: str
    parameters: dict[str, Any]
    metric: Metric
    terms: Sequence[Term]
    bank_fingerprint: str
    centre: float = 0.0
    gallery: GalleryStatistics | None = None

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
        memory: int | str = "512MiB",
        progress: Progress | None = None,
    ) -> np.ndarray:
        """Offsets of `targets` [n, d] (or a store or file of them), seen by the fit or not: float32 [n].

        Raises InputError where `targets` cannot be used or have other dimensions than the bank.
        """
        from hubplugin.reductions import Compute

        return (self._raw(targets, Compute(device, memory, progress)) - self.centre).astype(np.float32)

    def centred_on(
        self,
        targets: VectorLike,
        *,
        device: str = "auto",
        memory: int | str = "512MiB",
        progress: Progress | None = None,
    ) -> OffsetModel:
        """This model with offsets of mean 0 over `targets` [n, d], and their statistics."""
        from hubplugin.reductions import Compute

        raw = self._raw(targets, Compute(device, memory, progress))
        centre = float(raw.mean())
        centred = raw - centre
        statistics = GalleryStatistics(len(raw), float(centred.min()), float(centred.max()), float(centred.std()))
        return replace(self, centre=centre, gallery=statistics)

    def _raw(self, targets: VectorLike, compute: Any) -> np.ndarray:
        """The sum of the terms, not centred: float64 [n]."""
        from hubplugin import reductions

        vectors = as_vectors(targets, "targets")
        if vectors.dim != self.dim:
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, the query bank of this model has {self.dim}; "
                "embed both with the same model"
            )
        total = np.zeros(vectors.rows)
        for term in self.terms:
            similarities = reductions.Similarities(term.bank, self.metric, compute)
            if isinstance(term, LogSumExp):
                value = reductions.log_sum_exp(similarities, vectors, term.tau, term.log_weights, "offsets")
            elif isinstance(term, TopKMean):
                value = reductions.top_k_mean(similarities, vectors, term.k, "offsets")
            else:
                value = reductions.dot(similarities, vectors, "offsets")
            total += term.scale * value
        return total

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
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelFileError(f"{name} is damaged: its header cannot be read ({error!r}); fit it again") from None

    def __repr__(self) -> str:
        given = ", ".join(f"{key}={value}" for key, value in self.parameters.items())
        fitted = f", gallery of {self.gallery.count}" if self.gallery else ""
        return f"OffsetModel({self.method}({given}), {self.metric.value}, bank {self.terms[0].bank.shape}{fitted})"


def load(path: str | os.PathLike[str]) -> OffsetModel:
    """The model that `OffsetModel.save` wrote to `path`.

    Raises ModelFileError if there is no such file, it is damaged, or a newer version wrote it.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot read model file {os.fspath(path)!r}: {error.strerror}") from None
    return OffsetModel.from_bytes(content, f"model file {os.fspath(path)!r}")


def _digest(tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(f"{key}{tensors[key].shape}{tensors[key].dtype.str}".encode())
        digest.update(np.ascontiguousarray(tensors[key]).data)
    return digest.hexdigest()
