"""`GroupedModel`: an `OffsetModel` for each value of a key, for searches that are filtered by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import ClassVar

import numpy as np

from hubplugin.compute import Compute
from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.model.file import Header, are_numbers, is_number, require
from hubplugin.model.offset_model import (
    Dot,
    GalleryStatistics,
    LogSumExp,
    OffsetModel,
    Term,
    Value,
    cap,
)
from hubplugin.vectors import VectorLike, as_vectors


@dataclass(frozen=True)
class Group:
    """What of a model is one group's own: the centre, the statistics, log_weights [m] under `sn`, `dbsn` and `blend`,
    and where answers are left out, their levels [m] within the group."""

    centre: float
    gallery: GalleryStatistics
    log_weights: np.ndarray | None = None
    answers: np.ndarray | None = None

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

    mark: ClassVar[str] = "key"

    def within(self, value: Value) -> OffsetModel:
        """The model of one group. Raises KeyError if there is none."""
        group = self.groups[value]
        terms = tuple(group.term(term) for term in self.terms)
        return OffsetModel(
            self.method,
            self.parameters,
            self.metric,
            terms,
            self.bank_fingerprint,
            group.centre,
            group.gallery,
        )

    def offsets(
        self,
        targets: VectorLike,
        *,
        groups: Sequence[Value] | None = None,
        compute: Compute = Compute(),
    ) -> np.ndarray:
        """Offsets of targets, each by the model of its group, whose cap it has.

        Args:
            targets: [n, d].
            groups: the group of each target [n].
            compute: device, memory and progress.

        Returns:
            float32 [n].
        """
        if groups is None:
            raise InputError(
                f"the model has offsets within each {self.key!r}: pass groups=, the value of each target"
            )
        vectors = as_vectors(targets, "targets").array()
        directed = np.asarray(vectors.any(axis=1))
        if self.metric is not Metric.COSINE:
            directed[:] = True
        rows: dict[Value, list[int]] = {}
        for row, value in enumerate(groups):
            if value in self.groups and directed[row]:
                rows.setdefault(value, []).append(row)
        offsets = np.zeros(len(vectors), np.float32)
        present = [self.groups[value] for value in rows]
        if present and all(
            group.log_weights is None and group.answers is None for group in present
        ):  # one pass
            raw = np.zeros(len(vectors))
            raw[directed] = self.raw_offsets(vectors[directed], compute)
            for value, members in rows.items():
                offsets[members] = cap(
                    raw[members] - self.groups[value].centre, self.groups[value].gallery
                )
        else:
            for value, members in rows.items():
                offsets[members] = self.within(value).offsets(
                    vectors[members], compute=compute
                )
        return offsets

    def _content(self) -> tuple[Header, dict[str, np.ndarray]]:
        header, tensors = super()._content()
        groups = self.groups.values()
        tensors["groups.centres"] = np.array([group.centre for group in groups])
        tensors["groups.statistics"] = np.array(
            [astuple(group.gallery) for group in groups]
        ).reshape(-1, 4)
        for name in ("log_weights", "answers"):
            arrays = [
                getattr(group, name)
                for group in groups
                if getattr(group, name) is not None
            ]
            if arrays:
                tensors[f"groups.{name}"] = np.stack(arrays)
        return header | {"key": self.key, "values": list(self.groups)}, tensors

    @classmethod
    def _fields(cls, header: Header, tensors: dict[str, np.ndarray]) -> Header:
        values = header["values"]
        none = [None] * len(values)
        weights, answers = (
            tensors.get(f"groups.{name}", none) for name in ("log_weights", "answers")
        )
        columns = zip(
            values,
            tensors["groups.centres"],
            tensors["groups.statistics"],
            weights,
            answers,
            strict=True,
        )
        groups = {
            value: Group(
                float(centre),
                GalleryStatistics(int(row[0]), *map(float, row[1:])),
                log_weights,
                levels,
            )
            for value, centre, row, log_weights, levels in columns
        }
        return super()._fields(header, tensors) | {
            "key": header["key"],
            "groups": groups,
        }

    def _require_usable(self, dim: int) -> None:
        super()._require_usable(dim)
        m = len(self.terms[0].bank)
        require(isinstance(self.key, str) and self.key, "key of the groups")
        for value, group in self.groups.items():
            require(isinstance(value, (str, int)), "list of groups")
            require(is_number(group.centre), f"centre of group {value!r}")
            group.gallery.require_usable(f"group {value!r}")
            for name in ("log_weights", "answers"):
                array = getattr(group, name)
                require(
                    array is None or are_numbers(array, m, infinite=True),
                    f"{name} of group {value!r}",
                )

    def __repr__(self) -> str:
        return f"{super().__repr__()} within each {self.key!r}, {len(self.groups)} of them corrected"


def group_key(model: OffsetModel) -> str | None:
    """The key within whose values `model` has offsets, if it has them within groups."""
    return model.key if isinstance(model, GroupedModel) else None
