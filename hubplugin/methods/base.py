"""What every method is: a checked configuration that turns banks and targets into the terms of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from hubplugin.errors import InputError
from hubplugin.metric import Metric
from hubplugin.model import Term
from hubplugin.reductions import Compute
from hubplugin.vectors import Vectors


@dataclass(frozen=True)
class FitInput:
    """Checked input of a fit. Banks are at unit length where the metric is cosine: [m, d] and [p, d]."""

    query_bank: np.ndarray
    targets: Vectors | None
    target_bank: np.ndarray | None
    metric: Metric
    compute: Compute

    def require_targets(self, method: str) -> Vectors:
        if self.targets is None:
            raise InputError(f"method {method!r} is fitted against the gallery: pass targets=")
        return self.targets

    def require_target_bank(self, method: str) -> np.ndarray:
        if self.target_bank is None:
            raise InputError(f"method {method!r} needs a second bank: pass target_bank=")
        return self.target_bank


class Method(BaseModel, ABC):
    """Parameters of one method. Temperatures are in the units of the similarity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]

    @abstractmethod
    def terms(self, given: FitInput) -> tuple[Term, ...]:
        """The terms whose sum at t is offset(t), up to a constant."""
