"""The methods of an evaluation, as their users ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hubplugin.errors import InputError, Parameter
from hubplugin.evaluation.plans import PLANS, check_size
from hubplugin.evaluation.result import RAW
from hubplugin.evaluation.scene import Scene
from hubplugin.methods import METHODS, configured
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Setting
from hubplugin.query_dependent import QUERY_METHODS
from hubplugin.reductions import Similarities, dense

TEMPERATURES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2)
"""Where the curve of recall against temperature is drawn, for cosine: the papers' settings and a decade around."""


@dataclass(frozen=True)
class Candidate:
    """A method that was asked for. Either its offsets [n] are known, or its scores for some of the queries
    (rows -> [rows, n])."""

    label: str
    method: str
    parameters: dict[str, Setting]
    offsets: np.ndarray | None = None
    scores: Callable[[slice], np.ndarray] | None = None


def candidates_of(
    methods: Sequence[str] | None, models: Mapping[str, OffsetModel] | None, scene: Scene
) -> list[Candidate]:
    """The raw search, the methods (None: every additive one that the banks allow) and the models, once each."""
    given = scene.given
    if methods is None:
        dual = given is not None and given.target_bank is not None
        methods = [] if given is None else [name for name in METHODS if name != "dualis" or dual]
    raw = Candidate(RAW, RAW, {}, np.zeros(scene.targets.rows, np.float32))
    asked_for = [candidate_of(method, scene) for method in ([methods] if isinstance(methods, str) else methods)]
    of_models = [fitted(label, model, scene) for label, model in (models or {}).items()]
    return list({candidate.label: candidate for candidate in (raw, *asked_for, *of_models)}.values())


def curve_of(candidates: Sequence[Candidate], temperatures: Sequence[float] | None, scene: Scene) -> list[Candidate]:
    """Those of `candidates` that have one temperature, at each of `temperatures`; None: the usual ones for cosine."""
    if temperatures is None:
        temperatures = TEMPERATURES if scene.metric is Metric.COSINE and scene.given is not None else ()
    return [
        candidate_of(f"{name} tau={tau:g}", scene)
        for name in sorted({c.method for c in candidates if c.method in ("is", "sn", "dbsn")})
        for tau in temperatures
    ]


def fitted(label: str, model: OffsetModel, scene: Scene) -> Candidate:
    if model.metric is not scene.metric:
        raise InputError(f"model {label!r} is for {model.metric.value}, the evaluation for {scene.metric.value}")
    compute = scene.compute
    offsets = model.members.offsets(
        scene.targets, device=compute.device, memory=compute.memory, progress=compute.progress
    )
    return Candidate(label, model.method, model.parameters, offsets)


def candidate_of(method: str, scene: Scene) -> Candidate:
    name, *settings_given = method.split() or [""]
    parameters: dict[str, Setting] = {}
    for setting in settings_given:
        key, equals, value = setting.partition("=")
        if not equals:
            raise InputError(
                f"method {method!r}: {setting!r} is no parameter; expected NAME=VALUE, as in 'is tau=0.05'"
            )
        parameters[key] = value
    if name in PLANS:
        if parameters:
            raise InputError(f"method {name!r} takes no parameters, got {', '.join(parameters)}")
        check_size(name, len(scene.queries), scene.targets.rows)
        return Candidate(method, name, {}, scores=partial(_plan_scores, name, scene))
    if name == "auto":
        raise InputError("method 'auto' is a fit: pass models={'auto': hubplugin.fit(query_bank, 'auto', targets)}")
    known = {**METHODS, **QUERY_METHODS}
    if name not in known:
        raise InputError(f"unknown method {name!r}: use one of {', '.join([*known, *PLANS])}")
    if scene.given is None:
        raise InputError(f"method {name!r} needs example queries: pass ", Parameter("query_bank"))
    if name in METHODS:
        configuration = configured(METHODS, name, parameters)
        return fitted(method, configuration.fit(scene.given), scene)
    query_dependent = configured(QUERY_METHODS, name, parameters)
    rule = query_dependent.rule(scene.given)
    kept = rule.keep(scene.targets)

    def scores(rows: slice) -> np.ndarray:
        corrected: np.ndarray = rule.rescore(similarities(rows, scene), kept)
        return corrected

    return Candidate(method, name, query_dependent.model_dump(), scores=scores)


def similarities(rows: slice, scene: Scene) -> np.ndarray:
    product = Similarities(scene.queries[rows], scene.metric, replace(scene.compute, progress=None))
    scores: np.ndarray = dense(product, scene.targets).numpy()
    return scores


def _plan_scores(name: str, scene: Scene, rows: slice) -> np.ndarray:
    return PLANS[name](similarities(slice(None), scene))[rows]
