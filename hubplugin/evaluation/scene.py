"""What all methods of an evaluation are measured on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hubplugin.measures.retrieval import Truth
from hubplugin.methods import FitInput
from hubplugin.metric import Metric
from hubplugin.reductions import Compute
from hubplugin.vectors import Vectors


@dataclass(frozen=True)
class Scene:
    """queries [q, d] are prepared; given: None without example queries; k: of the k-occurrence, mAP@k and nDCG@k."""

    queries: np.ndarray
    targets: Vectors
    truth: Truth
    given: FitInput | None
    metric: Metric
    compute: Compute
    k: int
    seed: int
