"""Offsets fitted within groups of the targets: hubs are relative to what a search can return, and one that is filtered
returns the targets of its group only.

Offsets depend on bank and target, not on the other targets, but for two things: the centre, which is the group's
own, and under `sn` and `dbsn` log alpha. So all groups share one bank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from hubplugin.errors import CorrectionRefused, InputError, ModelFileError
from hubplugin.methods import FitInput, Method
from hubplugin.model import GalleryStatistics, LogSumExp, OffsetModel, Term
from hubplugin.reductions import Compute, Precision
from hubplugin.tuning import Pairs, check
from hubplugin.vectors import Progress, Sliceable, VectorLike, Vectors, as_vectors, fingerprint

Value: TypeAlias = str | int | None
"""What makes a group: the value of a key of the targets, a text, a number or a truth value. None: no group."""

SMALLEST_GROUP = 100
"""Targets below which a group has no hubs to speak of: the 10 best of it are a tenth of it."""

FORMAT = 1


@dataclass(frozen=True)
class Group:
    """What of a model is one group's own: the centre, the statistics, and log_weights [m] under `sn` and `dbsn`."""

    centre: float
    gallery: GalleryStatistics
    log_weights: np.ndarray | None = None


@dataclass(frozen=True, repr=False)
class GroupedModel(OffsetModel):
    """An OffsetModel for each value of `key`, over one bank. Targets of other values, or of none, have the offset 0.

    `terms` lack the groups' own weights; `gallery` has the statistics of all groups together.
    """

    key: str = ""
    groups: Mapping[Value, Group] = field(default_factory=dict)

    def within(self, value: Value) -> OffsetModel:
        """The model of one group. Raises KeyError if there is none."""
        group, terms = self.groups[value], self.terms
        if group.log_weights is not None:
            (term,) = terms
            assert isinstance(term, LogSumExp)
            terms = (replace(term, log_weights=group.log_weights),)
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
        """Offsets of `targets` [n, d], of which the first is of the group groups[0] and so on: float32 [n]."""
        if groups is None:
            raise InputError(f"the model has offsets within each {self.key!r}: pass groups=, the value of each target")
        vectors = as_vectors(targets, "targets").array()
        rows: dict[Value, list[int]] = {}
        for row, value in enumerate(groups):
            if value in self.groups:
                rows.setdefault(value, []).append(row)
        offsets = np.zeros(len(vectors), np.float32)
        if rows and all(self.groups[value].log_weights is None for value in rows):
            raw = self.raw_offsets(vectors, Compute(device, memory, progress, precision))
            for value, some in rows.items():
                offsets[some] = raw[some] - self.groups[value].centre
        else:
            for value, some in rows.items():
                offsets[some] = self.within(value).offsets(
                    vectors[some], device=device, memory=memory, precision=precision
                )
        return offsets

    def to_bytes(self) -> bytes:
        """The model as safetensors: the shared part as a model file of its own, and what the groups have."""
        from safetensors.numpy import save

        tensors = {
            "centres": np.array([group.centre for group in self.groups.values()]),
            "statistics": np.array([_row(group.gallery) for group in self.groups.values()]).reshape(-1, 4),
        }
        weights = [group.log_weights for group in self.groups.values() if group.log_weights is not None]
        if weights:
            tensors["log_weights"] = np.stack(weights)
        shared = OffsetModel(*(getattr(self, name) for name in _SHARED))
        tensors["shared"] = np.frombuffer(shared.to_bytes(), np.uint8)
        header = {
            "format": FORMAT,
            "key": self.key,
            "values": list(self.groups),
            "tensors": fingerprint(*(tensors[name] for name in sorted(tensors))),
        }
        return save(tensors, metadata={"hubplugin-groups": json.dumps(header)})

    def __repr__(self) -> str:
        return f"{super().__repr__()} within each {self.key!r}, {len(self.groups)} of them corrected"


_SHARED = ("method", "parameters", "metric", "terms", "bank_fingerprint", "centre", "gallery")


def _row(statistics: GalleryStatistics) -> tuple[float, ...]:
    return (statistics.count, statistics.smallest, statistics.largest, statistics.deviation)


def from_bytes(content: bytes, name: str) -> OffsetModel:
    """The model that `to_bytes` of either kind wrote. Raises ModelFileError if it is damaged or no such thing."""
    length = int.from_bytes(content[:8], "little")
    try:
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    except ValueError:
        metadata = {}
    if "hubplugin-groups" not in metadata:
        return OffsetModel.from_bytes(content, name)
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        header, tensors = json.loads(metadata["hubplugin-groups"]), load(content)
        if header["format"] > FORMAT:
            raise ModelFileError(f"{name} is of a newer hubplugin than this one: upgrade hubplugin")
        if header["tensors"] != fingerprint(*(tensors[part] for part in sorted(tensors))):
            raise ModelFileError(f"{name} is damaged: its tensors do not match their checksum; fit it again")
        weights = tensors.get("log_weights", [None] * len(header["values"]))
        parts = zip(header["values"], tensors["centres"], tensors["statistics"], weights, strict=True)
        groups = {
            value: Group(float(centre), GalleryStatistics(int(row[0]), *map(float, row[1:])), log_weights)
            for value, centre, row, log_weights in parts
        }
        shared = OffsetModel.from_bytes(tensors["shared"].tobytes(), name)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{name} is damaged: its header cannot be read ({error!r}); fit it again") from None
    return GroupedModel(**{part: getattr(shared, part) for part in _SHARED}, key=header["key"], groups=groups)


def offsets_of(
    model: OffsetModel,
    vectors: np.ndarray,
    groups: Sequence[Value] | None,
    *,
    device: str = "auto",
    memory: int | str = "1GiB",
) -> np.ndarray:
    """The offsets of `vectors` [n, d] by a model of either kind: float32 [n]."""
    if isinstance(model, GroupedModel):
        return model.offsets(vectors, groups=groups, device=device, memory=memory)
    return model.offsets(vectors, device=device, memory=memory)


class Members(Vectors):
    """The targets of one group among those of a gallery: `rows` are their numbers."""

    def __init__(self, name: str, gallery: Sliceable, rows: np.ndarray):
        super().__init__(name, len(rows), gallery.dim)
        self._gallery, self._numbers = gallery, rows

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        for first in range(0, self.rows, size):
            yield self._gallery.take(self._numbers[first : first + size])


def fit_within(
    key: str,
    groups: Sequence[tuple[Value, Members]],
    count: int,
    query_bank: VectorLike,
    method: Method,
    given: FitInput,
    target_bank: VectorLike | None,
    pairs: Pairs,
    force: bool,
) -> tuple[GroupedModel, dict[Value, str]]:
    """A fit on each of `groups` that has `SMALLEST_GROUP` targets and that the guard lets pass on its own gallery,
    and why the others, whose targets stay neutral, have none. count: of all targets, in groups or not.

    Raises CorrectionRefused if no group is left.
    """
    fitted: dict[Value, Group] = {}
    neutral: dict[Value, str] = {}
    terms: tuple[Term, ...] = ()
    parameters: dict[str, Any] = {}
    compute = given.compute
    for number, (value, members) in enumerate(groups):
        try:
            if members.rows < SMALLEST_GROUP:
                raise CorrectionRefused(f"{members.rows} targets, {SMALLEST_GROUP} are needed")
            if not force:
                check(
                    query_bank, members, method.name, target_bank,
                    pairs=pairs, metric=given.metric, device=compute.device, memory=compute.memory,
                    **method.parameters,
                )  # fmt: skip
        except CorrectionRefused as refusal:
            neutral[value] = str(refusal).partition("; nothing was changed")[0]  # which holds for all of it or none
        else:
            model = method.fit(replace(given, targets=members))
            assert model.gallery is not None
            weights = next((term.log_weights for term in model.terms if isinstance(term, LogSumExp)), None)
            fitted[value] = Group(model.centre, model.gallery, weights)
            parameters = model.parameters
            terms = tuple(replace(t, log_weights=None) if isinstance(t, LogSumExp) else t for t in model.terms)
        compute.report(f"fitting within each {key!r}", number + 1, len(groups))
    if not fitted:
        first = "; ".join(f"{value!r}: {reason}" for value, reason in list(neutral.items())[:1])
        raise CorrectionRefused(
            f"no value of {key!r} can be corrected by itself ({len(neutral)} tried; {first or 'no target has one'})"
        )
    return GroupedModel(
        method=method.name,
        parameters=parameters,
        metric=given.metric,
        terms=terms,
        bank_fingerprint=given.fingerprint,
        gallery=_together([group.gallery for group in fitted.values()], count),
        key=key,
        groups=fitted,
    ), neutral


def _together(parts: list[GalleryStatistics], count: int) -> GalleryStatistics:
    """Of `count` targets, of which those outside of `parts` have the offset 0."""
    return GalleryStatistics(
        count,
        min(0.0, *(part.smallest for part in parts)),
        max(0.0, *(part.largest for part in parts)),
        math.sqrt(sum(part.count * part.deviation**2 for part in parts) / count),
    )
