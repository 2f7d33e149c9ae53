"""`fit`: query bank in, `OffsetModel` out."""

from __future__ import annotations

from typing import Any

from hubplugin.errors import InputError
from hubplugin.methods import FitInput, configure
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.reductions import Compute, prepared
from hubplugin.vectors import Progress, VectorLike, as_vectors, fingerprint


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
    metric, compute = Metric.parse(metric), Compute(device, memory, progress)
    configuration = configure(method, **parameters)
    bank = as_vectors(query_bank, "query bank")
    gallery = None if targets is None else as_vectors(targets, "targets")
    second = None if target_bank is None else as_vectors(target_bank, "target bank")
    for other in (gallery, second):
        if other is not None and other.dim != bank.dim:
            raise InputError(
                f"{bank.name} has {bank.dim} dimensions, {other.name} has {other.dim}; embed both with the same model"
            )
    given = FitInput(
        query_bank=prepared(bank, metric),
        targets=gallery,
        target_bank=None if second is None else prepared(second, metric),
        metric=metric,
        compute=compute,
    )
    model = OffsetModel(
        method=method,
        parameters=configuration.model_dump(),
        metric=metric,
        terms=configuration.terms(given),
        bank_fingerprint=fingerprint(given.query_bank, given.target_bank),
    )
    if gallery is None:
        return model
    return model.centred_on(gallery, device=device, memory=memory, progress=progress)
