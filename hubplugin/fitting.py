"""Fit an `OffsetModel` to a query bank with `fit`."""

from __future__ import annotations

import warnings
from concurrent.futures import Executor
from dataclasses import replace
from typing import cast

from hubplugin.bank import Bank, BankLike
from hubplugin.compute import Compute
from hubplugin.compute.device import Library
from hubplugin.errors import InputError, Parameter, ZeroVector
from hubplugin.executors import GalleryLike, read_by_workers, shards_of
from hubplugin.learning import NOTHING_TAUGHT, Teachers, learn_query_map, read_learn
from hubplugin.methods import METHODS, build_method
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Setting
from hubplugin.vectors import VectorLike, as_vectors


def fit(
    targets: GalleryLike | None,
    bank: BankLike,
    method: str = "blend",
    *,
    metric: Metric | str = "cosine",
    compute: Compute = Compute(),
    learn: bool | Bank = False,
    executor: Executor | None = None,
    shards: int | None = None,
    **parameters: Setting,
) -> OffsetModel:
    """Estimate the offsets of a gallery from example queries.

    Args:
        targets: The gallery [n, d]: a numpy or torch array, a memory map, nested lists,
            a path (.npy, .parquet), or a store. Offsets are centred on it. blend, sn
            and dbsn need it; for other methods, None means that it is not known yet.
        bank: The example queries [m, d] in any of these forms, or a `hubplugin.Bank` of
            texts, or of queries and what is known about their answers. dualis needs
            vectors of answers; blend and dbsn use them.
        method: blend | is | sn | dbsn | dualis | nnn | csls | dn;
            `hubplugin.methods.METHODS` has the equation of each. The default, blend,
            suits banks of any kind and size; `hubplugin.evaluate` compares the methods.
        metric: cosine | dot | euclidean. Temperatures are in the units of the
            similarity.
        compute: Device, memory, progress and precision, see `hubplugin.Compute`.
        learn: True also learns a map of the query, from a bank with known answers: at
            least 50 different pairs. Search with `model.queries(q)` then. `fit` warns
            if held-out targets gain nothing. Alternatively, pass pairs that teach in
            addition to the bank, such as titles: `Bank(titles, rows)`. See
            docs/learning.md.
        executor: Any `concurrent.futures.Executor`. Its workers read the gallery in
            shards, see docs/scale.md, and the model is fitted on a sample of 200,000
            targets. `targets` must be files (a list, or a pattern such as
            "parts/*.npy"), or a store that workers can open.
        shards: The number of parts to split one file or a store into, by default one
            per 250,000 rows.
        **parameters: The parameters of the method; `hubplugin.methods.METHODS` has
            their meaning and defaults.

    Returns:
        The model. Its `offsets` method returns the offsets of any targets.

    Raises:
        InputError: An argument cannot be used.
        ClusterError: Workers were lost.
    """
    if executor is not None or shards is not None:
        require_executor(executor, shards)
    configuration = build_method(METHODS, method, parameters)
    gallery = cast(VectorLike, targets)
    if learn is not False:
        learn = read_learn(learn, method, metric, targets, executor)
        teachers = Teachers.read(Bank.of(bank), learn, metric, compute)
        teachers = teachers.against(gallery)
        prepared = teachers.bank
        model = learn_query_map(configuration, teachers).model
        if model.query_map is None:
            warnings.warn(NOTHING_TAUGHT, stacklevel=2)
    else:
        # Clicks serve only to learn and to test.
        prepared = replace(Bank.of(bank).prepare(metric, compute), clicks=None)
        if executor is not None:
            parts = shards_of(targets, shards)
            prepared = read_by_workers(
                prepared, targets, parts, configuration, executor
            )
        elif targets is not None:
            gallery = as_vectors(gallery, "targets")
            if not Library(compute).is_on_cpu:
                # On a GPU, a fit is quicker than a scan for zero vectors, so scan the
                # gallery only if a zero vector turns up.
                try:
                    return configuration.fit(
                        prepared.against(gallery, has_no_zeros=True)
                    )
                except ZeroVector:
                    pass
            prepared = prepared.against(gallery)
        model = configuration.fit(prepared)
    fitted = prepared.targets
    if fitted is not None and fitted.left_out:
        warnings.warn(
            f"{fitted.name}: {fitted.left_out} zero vectors are left out, and get the "
            "offset 0",
            stacklevel=2,
        )
    return model


def require_executor(executor: object, shards: int | None) -> None:
    """Raise InputError for `shards` without an executor, and for a pool that forks.

    A forked child of a process that has used torch waits for threads that do not exist
    in the child.
    """
    if executor is None and shards is not None:
        raise InputError(
            Parameter("shards"),
            " are for workers: pass ",
            Parameter("executor"),
            ", too",
        )
    # ProcessPoolExecutor has no public name for its start method.
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise InputError(
            "the processes of this executor are forks, which hang once torch has been "
            'used; create it with mp_context=multiprocessing.get_context("spawn")'
        )
