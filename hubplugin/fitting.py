"""`fit`: query bank in, `OffsetModel` out."""

from __future__ import annotations

from typing import Any

from hubplugin.methods import FitInput, configure
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.reductions import Compute
from hubplugin.vectors import Progress, VectorLike


def fit(
    query_bank: VectorLike,
    method: str = "dbsn",
    targets: VectorLike | None = None,
    target_bank: VectorLike | None = None,
    metric: Metric | str = "cosine",
    device: str = "auto",
    memory: int | str = "512MiB",
    progress: Progress | None = None,
    **parameters: Any,
) -> OffsetModel:
    """Estimates the offsets of a gallery from example queries.

    query_bank: [m, d]; numpy, torch, memory map, nested lists, or a path (.npy, .npz, .safetensors, .parquet).
    method: is | sn | dbsn | dualis | nnn | csls | dn; `hubplugin.METHODS` has each one's parameters, equation
        and defaults, which are given here as `parameters`.
    targets: the gallery [n, d], likewise, or a store. Needed by sn and dbsn; the offsets are centred on it.
    target_bank: [p, d]; needed by dualis, used by dbsn, ignored by the others.
    metric: cosine | dot | euclidean. Temperatures are in the units of the similarity.
    device: "auto" is cuda, then mps, then cpu. memory: bounds the similarities held at one time.
    progress: called as progress(what, done, total).

    Raises InputError, one line, for anything that cannot be used as given.
    """
    compute = Compute(device, memory, progress)
    configuration = configure(method, **parameters)
    return configuration.fit(FitInput.read(query_bank, targets, target_bank, Metric.parse(metric), compute))
