"""`OffsetModel`: what a fit returns. It turns any targets, old or new, into offsets, and lies in one file."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from hubplugin._version import __version__
from hubplugin.errors import InputError, ModelFileError
from hubplugin.metric import Metric
from hubplugin.vectors import Progress, VectorLike, as_vectors

if TYPE_CHECKING:
    from hubplugin.reductions import Compute, LogSum, MeanOfLargest, Precision

FORMAT = 3
"""Version of the model file. A reader refuses what another version wrote."""

Value: TypeAlias = str | int | None
"""What makes a group: the value of a key of the targets, a text, a number or a truth value. None: no group."""

LARGEST_OFFSET = 1e38
"""Offsets are stored as float32, which ends at 3.4e38."""

CAP_SLACK = 1e-3
"""By how many standard deviations the cap lies above the largest offset of the gallery: more than rounding, which
differs from one pass to the next, can add to an offset of the fit's own targets."""


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
_TERMS: dict[str, Callable[..., Term]] = {term.kind: term for term in (LogSumExp, TopKMean, Dot)}


@dataclass(frozen=True)
class GalleryStatistics:
    """The offsets of the gallery of the fit: how many, and their extremes and spread after centring."""

    count: int
    smallest: float
    largest: float
    deviation: float

    @property
    def cap(self) -> float:
        """The largest offset that a newcomer may get."""
        return self.largest + CAP_SLACK * self.deviation


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
    which `activation.Dynamic` and `DualDynamic` ask; offsets do not depend on it.
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
        """Names this very model, its centre included, whatever version of hubplugin wrote it: the first 16 hex digits
        of the SHA-256 of what its file holds."""
        return _digest(*self._content())[:16]

    def offsets(
        self,
        targets: VectorLike,
        *,
        groups: Sequence[Value] | None = None,
        device: str = "auto",
        memory: int | str = "1GiB",
        progress: Progress | None = None,
        precision: Precision = "float32",
    ) -> np.ndarray:
        """Offsets of `targets` [n, d] (or a store or file of them), seen by the fit or not: float32 [n].

        No offset is above the cap, the largest of the gallery of the fit (but for rounding): a vector that is far from
        the whole bank would otherwise get more than any target has, and rank above them. Targets of the fit keep
        theirs. A model that was fitted without a gallery has no cap.

        groups: what a `GroupedModel` must know of each target; others do not look at it.
        Raises InputError where `targets` cannot be used or have other dimensions than the bank.
        """
        from hubplugin.reductions import Compute

        raw = self.raw_offsets(targets, Compute(device, memory, progress, precision))
        return _capped(raw - self.centre, self.gallery)

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
        """The sum of the terms, not centred, not capped: float64 [n]. Raises InputError where it is beyond float32."""
        from hubplugin import reductions

        vectors = as_vectors(targets, "targets")
        if vectors.dim != self.dim:
            raise InputError(
                f"{vectors.name} has {vectors.dim} dimensions, the query bank of this model has {self.dim}; "
                "embed both with the same model"
            )
        total = np.zeros(vectors.rows)
        for terms in _of_one_bank(self.terms):
            similarities = compute.similarities(terms[0].bank, self.metric)
            if isinstance(terms[0], Dot):
                values = [reductions.dot(similarities, vectors, "offsets")]
            else:
                answers = terms[0].answers
                left_out = None if answers is None else reductions.LeftOut(answers)
                values = reductions.reduce(similarities, vectors, [reduction_of(term) for term in terms], left_out)
            with np.errstate(over="ignore", invalid="ignore"):
                for term, value in zip(terms, values, strict=True):
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
        """Writes the model to one safetensors file, whole or not at all: to a `.tmp` file beside, then renamed, which
        is left only by a process that is killed outright.

        Raises ModelFileError if it cannot; what lay there before is then untouched.
        """
        content = self.to_bytes()
        try:
            target = os.path.realpath(path)
            beside = Path(f"{target}.{uuid.uuid4().hex[:8]}.tmp")  # its own, so that two who save do not share one
            try:
                with beside.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, target)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
        except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
            raise ModelFileError(f"cannot write model file {os.fspath(path)!r}: {_reason(error)}") from None

    def _content(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What a model file holds: header and tensors."""
        tensors: dict[str, np.ndarray] = {}
        terms = []
        places: dict[int, str] = {}
        for number, term in enumerate(self.terms):
            fields: dict[str, Any] = {"kind": term.kind}
            for key, value in vars(term).items():
                if isinstance(value, np.ndarray):
                    # An array that several terms share is held once; the others name it.
                    place = places.setdefault(id(value), f"{number}.{key}")
                    if place == f"{number}.{key}":
                        tensors[place] = np.ascontiguousarray(value)
                    else:
                        fields[key] = {"as": place}
                elif value is not None:
                    fields[key] = value
            terms.append(fields)
        if self.activation:
            for number, thresholds in enumerate(self.activation.thresholds):
                tensors[f"activation.{number}"] = np.ascontiguousarray(thresholds)
        header = {
            "format": FORMAT,
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
        return header, tensors

    def to_bytes(self) -> bytes:
        """The model as the bytes of a model file: safetensors with a JSON header."""
        from safetensors.numpy import save

        header, tensors = self._content()
        made = {"hubplugin": __version__, "sha256": _digest(header, tensors)}
        return save(tensors, metadata={"hubplugin": json.dumps(header | made)})

    @staticmethod
    def from_bytes(content: bytes, name: str = "model") -> OffsetModel:
        """The model in the bytes of a model file. Raises ModelFileError if they are damaged, are no model, or
        come from another version; `name` is what the error calls it."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            tensors = load(content)
            length = int.from_bytes(content[:8], "little")
            metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        except (SafetensorError, ValueError) as error:
            raise ModelFileError(f"{name} is damaged or not a hubplugin model: {str(error)!r}; fit it again") from None
        if "hubplugin" not in metadata:
            raise ModelFileError(f"{name} is a safetensors file, but not a hubplugin model; fit one with hubplugin.fit")
        try:
            header = json.loads(metadata["hubplugin"])
            if not _printable({**header, "values": None}):  # values of a group may be any text; they are shown escaped
                raise ModelFileError(f"{name} is damaged: its header holds control characters; fit it again")
            written, version = header["format"], header.pop("hubplugin")
            if written != FORMAT:
                mend = "upgrade hubplugin" if written > FORMAT else "fit it again"
                raise ModelFileError(
                    f"{name} has format {written}, written by hubplugin {version}; this version "
                    f"({__version__}) reads format {FORMAT}: {mend}"
                )
            if header.pop("sha256") != _digest(header, tensors):
                raise ModelFileError(f"{name} is damaged: its content does not match its checksum; fit it again")
            return _model(header, tensors)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ModelFileError(f"{name} is damaged: its header cannot be read ({error!r}); fit it again") from None

    @property
    def _described(self) -> str:
        values = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in self.parameters.items()}
        return f"{self.method}({', '.join(f'{key}={value}' for key, value in values.items())})"

    def __repr__(self) -> str:
        fitted = f", gallery of {self.gallery.count}" if self.gallery else ""
        first = self.terms[0]
        bank = f"mean of the bank, {self.dim} dimensions" if isinstance(first, Dot) else f"bank {first.bank.shape}"
        return f"OffsetModel({self._described}, {self.metric.value}, {bank}{fitted})"


@dataclass(frozen=True)
class Group:
    """What of a model is one group's own: the centre, the statistics, log_weights [m] under `sn`, `dbsn` and `blend`,
    and where answers are left out, their levels [m] within the group."""

    centre: float
    gallery: GalleryStatistics
    log_weights: np.ndarray | None = None
    answers: np.ndarray | None = None

    @property
    def shares_terms(self) -> bool:
        """Whether its terms are those of all groups."""
        return self.log_weights is None and self.answers is None

    def term(self, shared: Term) -> Term:
        """A term of this group."""
        if isinstance(shared, LogSumExp) and self.log_weights is not None:
            shared = replace(shared, log_weights=self.log_weights)
        if isinstance(shared, Dot) or shared.answers is None:
            return shared
        return replace(shared, answers=self.answers)


@dataclass(frozen=True, repr=False)
class GroupedModel(OffsetModel):
    """An OffsetModel for each value of `key`, over one bank. Targets of other values, or of none, have the offset 0.

    `terms` lack the groups' own weights and have the answers of one of them; `gallery` has the statistics of all
    groups together.
    """

    key: str = ""
    groups: Mapping[Value, Group] = field(default_factory=dict)

    def within(self, value: Value) -> OffsetModel:
        """The model of one group. Raises KeyError if there is none."""
        group = self.groups[value]
        terms = tuple(group.term(term) for term in self.terms)
        return OffsetModel(
            self.method, self.parameters, self.metric, terms, self.bank_fingerprint, group.centre, group.gallery
        )

    def offsets(
        self,
        targets: VectorLike,
        *,
        groups: Sequence[Value] | None = None,
        device: str = "auto",
        memory: int | str = "1GiB",
        progress: Progress | None = None,
        precision: Precision = "float32",
    ) -> np.ndarray:
        """Offsets of `targets` [n, d], of which the first is of the group groups[0] and so on: float32 [n]. The cap is
        that of the target's own group."""
        from hubplugin.reductions import Compute

        if groups is None:
            raise InputError(f"the model has offsets within each {self.key!r}: pass groups=, the value of each target")
        vectors = as_vectors(targets, "targets").array()
        rows: dict[Value, list[int]] = {}
        for row, value in enumerate(groups):
            if value in self.groups:
                rows.setdefault(value, []).append(row)
        offsets = np.zeros(len(vectors), np.float32)
        if rows and all(self.groups[value].shares_terms for value in rows):
            raw = self.raw_offsets(vectors, Compute(device, memory, progress, precision))
            for value, some in rows.items():
                offsets[some] = _capped(raw[some] - self.groups[value].centre, self.groups[value].gallery)
        else:
            for value, some in rows.items():
                offsets[some] = self.within(value).offsets(
                    vectors[some], device=device, memory=memory, precision=precision
                )
        return offsets

    def _content(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        header, tensors = super()._content()
        groups = self.groups.values()
        tensors["groups.centres"] = np.array([group.centre for group in groups])
        tensors["groups.statistics"] = np.array([astuple(group.gallery) for group in groups]).reshape(-1, 4)
        for name in ("log_weights", "answers"):
            own = [getattr(group, name) for group in groups if getattr(group, name) is not None]
            if own:
                tensors[f"groups.{name}"] = np.stack(own)
        return header | {"key": self.key, "values": list(self.groups)}, tensors

    def __repr__(self) -> str:
        return f"{super().__repr__()} within each {self.key!r}, {len(self.groups)} of them corrected"


def warn_if_swapped(model: OffsetModel, count: int) -> None:
    """Warns where `fit` was probably given the gallery as its query bank: `model` goes to `count` targets, as many as
    its bank has queries, and was fitted on another number of targets."""
    queries = len(model.terms[0].bank)
    if model.gallery is not None and queries == count != model.gallery.count and count > 1:
        warnings.warn(
            f"the model was fitted on a query bank of {queries} and {model.gallery.count} targets, and is given to a "
            f"gallery of {count}: if the two were swapped, it is fit(query_bank, targets=gallery)",
            stacklevel=3,
        )


def load(path: str | os.PathLike[str]) -> OffsetModel:
    """The model that `OffsetModel.save` wrote to `path`.

    Raises ModelFileError if there is no such file, it is damaged, or another version wrote it.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read model file {os.fspath(path)!r}: {_reason(error)}") from None
    return OffsetModel.from_bytes(content, f"model file {os.fspath(path)!r}")


def _of_one_bank(terms: Sequence[Term]) -> list[list[Term]]:
    """`terms` in lists that share a bank, and what is left out of it, so that one pass serves each list."""
    lists: list[list[Term]] = []
    for term in terms:
        for others in lists:
            first = others[0]
            if isinstance(term, Dot) or isinstance(first, Dot) or term.bank is not first.bank:
                continue
            if term.answers is first.answers:
                others.append(term)
                break
        else:
            lists.append([term])
    return lists


def reduction_of(term: Term) -> LogSum | MeanOfLargest:
    """What `reductions.reduce` computes for a term that has a bank of examples."""
    from hubplugin.reductions import LogSum, MeanOfLargest

    if isinstance(term, LogSumExp):
        return LogSum(term.tau, term.log_weights)
    assert isinstance(term, TopKMean)
    return MeanOfLargest(term.k)


def _capped(offsets: np.ndarray, gallery: GalleryStatistics | None) -> np.ndarray:
    """Centred offsets, none above the cap of their gallery: float32 [n]."""
    capped = offsets if gallery is None else np.minimum(offsets, gallery.cap)
    return capped.astype(np.float32)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _model(header: dict[str, Any], tensors: dict[str, np.ndarray]) -> OffsetModel:
    """The model whose `_content` was `header` and `tensors`."""
    terms = []
    for number, fields in enumerate(header["terms"]):
        prefix = f"{number}."
        arrays = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        arrays |= {key: tensors[value["as"]] for key, value in fields.items() if isinstance(value, dict)}
        terms.append(_TERMS[fields.pop("kind")](**(fields | arrays)))
    k, gallery = header["activation"], header["gallery"]
    given: dict[str, Any] = {
        "method": header["method"],
        "parameters": header["parameters"],
        "metric": Metric(header["metric"]),
        "terms": tuple(terms),
        "bank_fingerprint": header["bank_fingerprint"],
        "centre": float(header["centre"]),
        "gallery": GalleryStatistics(**gallery) if gallery else None,
        "activation": Activation(k, tuple(tensors[f"activation.{i}"] for i in range(len(terms)))) if k else None,
    }
    if "key" not in header:
        return OffsetModel(**given)
    values = header["values"]
    none = [None] * len(values)
    weights, answers = (tensors.get(f"groups.{name}", none) for name in ("log_weights", "answers"))
    parts = zip(values, tensors["groups.centres"], tensors["groups.statistics"], weights, answers, strict=True)
    groups = {
        value: Group(float(centre), GalleryStatistics(int(row[0]), *map(float, row[1:])), log_weights, levels)
        for value, centre, row, log_weights, levels in parts
    }
    return GroupedModel(**given, key=header["key"], groups=groups)


def _printable(part: Any) -> bool:
    """Whether all texts in a part of a header, the keys too, can be shown on a terminal as they are."""
    if isinstance(part, dict):
        return all(_printable(key) and _printable(value) for key, value in part.items())
    if isinstance(part, list):
        return all(map(_printable, part))
    return not isinstance(part, str) or part.isprintable()


def _digest(header: dict[str, Any], tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for key in sorted(tensors):
        digest.update(f"{key}{tensors[key].shape}{tensors[key].dtype.str}".encode())
        digest.update(np.ascontiguousarray(tensors[key]).data)
    return digest.hexdigest()
