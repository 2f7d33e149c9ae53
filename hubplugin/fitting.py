"""`fit`: query bank in, `OffsetModel` out."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import Executor
from typing import cast

from hubplugin.bank import Bank, BankLike
from hubplugin.cluster import ShardedGallery, Workspace
from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter
from hubplugin.learning import NOTHING, require_learnable, taught
from hubplugin.methods import METHODS, configured
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Setting
from hubplugin.vectors import Directed, GalleryLike, VectorLike, Vectors, shards_of


def fit(
    targets: GalleryLike | None,
    bank: BankLike,
    method: str = "blend",
    *,
    metric: Metric | str = "cosine",
    compute: Compute = Compute(),
    learn: bool = False,
    judged: BankLike | None = None,
    executor: Executor | None = None,
    shards: int | None = None,
    workspace: str | os.PathLike[str] | None = None,
    **parameters: Setting,
) -> OffsetModel:
    """Estimates the offsets of a gallery from example queries.

    targets: the gallery [n, d]; numpy, torch, memory map, nested lists, a path (.npy, .npz, .safetensors, .parquet), or
        a store. Needed by blend, sn and dbsn; offsets are centred on it. None where it is not known yet.
    bank: the example queries [m, d], likewise, or a `hubplugin.Bank`: texts, or queries and what is known of their
        answers. dualis needs vectors of answers, blend and dbsn use them.
    method: blend | is | sn | dbsn | dualis | nnn | csls | dn; `hubplugin.METHODS` has each one's parameters, equation
        and defaults, which are given here as `parameters`. The default, blend, is made for banks of any kind and size;
        `hubplugin.evaluate` compares the methods.
    metric: cosine | dot | euclidean. Temperatures are in the units of the similarity.
    compute: device, memory, progress and precision, see `hubplugin.Compute`.
    learn: learn a map of the query, too, from a bank whose answers are known: at least 200 different pairs. Search with
        `model.queries(q)` then. Where held-out targets gain nothing, a warning says so. See docs/learning.md.
    judged: a small bank with clicks that somebody has looked at, at least 50. Where clicks are noisy, it chooses better
        how strong the map may be.
    executor: any `concurrent.futures.Executor`, whose workers read the gallery in shards, see docs/scale.md. targets
        are then files (a list, a pattern such as "parts/*.npy", fsspec URLs), or a store that workers can open.
    shards: into how many parts one file, or a store, is divided; by default one for 250,000 rows.
    workspace: a folder in which a run that was cut off is taken up by the next one; None: nothing is kept.

    Raises InputError, one line, for anything that cannot be used as given; ClusterError for workers that are lost.
    """
    require_executor(executor, shards, workspace)
    if learn:
        require_learnable(learn, method, metric, targets, executor=executor)
    elif judged is not None:
        raise InputError(Parameter("judged"), " chooses how strong a map is: pass ", Parameter("learn", True))
    configuration = configured(METHODS, method, parameters, fit)
    if executor is not None:
        if targets is None:
            raise InputError("an executor computes on the gallery: pass ", Parameter("targets"))
        planned = shards_of(targets, shards)
        with Workspace(workspace) as kept:
            gallery = ShardedGallery("targets", planned, Metric.parse(metric), executor, kept, compute)
            _tell_of_zeros(gallery)
            return configuration.fit(Bank.of(bank).read(metric, compute, targets=gallery))
    if not learn:
        given = Bank.of(bank).read(metric, compute, targets=cast("VectorLike | None", targets))
        _tell_of_zeros(given.gallery)
        return configuration.fit(given)
    whole = cast(VectorLike, targets)
    prepared = Bank.of(bank).prepare(metric, compute).against(whole)
    _tell_of_zeros(prepared.gallery)
    looked_at = None if judged is None else Bank.of(judged).prepare(metric, compute).against(whole)
    model = taught(configuration, prepared, looked_at).model
    if model.query_map is None:
        warnings.warn(NOTHING, stacklevel=2)
    return model


def _tell_of_zeros(targets: Vectors | None) -> None:
    if isinstance(targets, (Directed, ShardedGallery)) and targets.left_out:
        warnings.warn(
            f"{targets.name}: {targets.left_out} zero vectors are left out, and keep the offset 0",
            stacklevel=3,
        )


def require_executor(executor: object, shards: int | None, workspace: object) -> bool:
    """Whether there is an executor; raises InputError for arguments that say nothing without one, and for a pool that
    forks: a child of a process that has used torch waits for threads that it does not have."""
    if executor is None and (shards is not None or workspace is not None):
        name = "workspace" if shards is None else "shards"
        raise InputError(Parameter(name), " is for the workers of an executor: pass ", Parameter("executor"), ", too")
    context = getattr(executor, "_mp_context", None)  # of a ProcessPoolExecutor, which has no public name for it
    if context is not None and context.get_start_method() == "fork":
        raise InputError(
            "the processes of this executor are forks, which do not survive that torch has been used; make it with "
            'mp_context=multiprocessing.get_context("spawn")'
        )
    return executor is not None
