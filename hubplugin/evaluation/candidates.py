"""The methods of an evaluation, as their users ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np

from hubplugin.compute import Similarities, dense
from hubplugin.errors import InputError, Parameter, install
from hubplugin.evaluation.result import RAW
from hubplugin.measures.retrieval import Truth
from hubplugin.methods import METHODS, FitInput, configured
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, Setting
from hubplugin.query_dependent import QUERY_METHODS
from hubplugin.resources import Compute
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


LARGEST = 25_000_000
"""Pairs: 200 MB a matrix, of which a solver holds several. Each plan takes less than a minute on one core."""


def optimal_transport(similarities: np.ndarray) -> np.ndarray:
    """`otn`: argmax <S, P> over the transport plans P, DBSN eq. 4 under eq. 7. [q, n] -> [q, n]."""
    import ot

    queries, targets = similarities.shape
    plan: np.ndarray = ot.emd(ot.unif(queries), ot.unif(targets), -similarities, numItermax=10_000_000)
    return plan


def l2_transport(similarities: np.ndarray) -> np.ndarray:
    """`l2n`: argmax <S, P> - c/2 |P|_F^2 over the transport plans P, DBSN eq. 5 under eq. 7. [q, n] -> [q, n].

    The paper asks for "an appropriate coefficient" c; it is taken relative to the size of an even plan's entries,
    c = spread of S / max(1/q, 1/n), so that the plan spreads over a few targets a query at any size.
    """
    import ot

    queries, targets = similarities.shape
    if np.ptp(similarities) <= 1e-6 * np.abs(similarities).max():  # all plans are worth the same
        return np.full_like(similarities, 1 / similarities.size)
    coefficient = float(similarities.std()) * min(queries, targets)
    plan: np.ndarray = ot.smooth.smooth_ot_dual(
        ot.unif(queries), ot.unif(targets), -similarities, coefficient, reg_type="l2", numItermax=2000
    )
    return plan


def hungarian(similarities: np.ndarray) -> np.ndarray:
    """`hn`: 1 where the assignment of largest total similarity matches query and target, else 0. [q, n] -> [q, n].

    Each target serves at most one query; where there are more queries than targets, the rest match nothing.
    """
    from scipy.optimize import linear_sum_assignment

    plan = np.zeros_like(similarities)
    plan[linear_sum_assignment(similarities, maximize=True)] = 1
    return plan


PLANS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "otn": optimal_transport,
    "l2n": l2_transport,
    "hn": hungarian,
}


def require_solvable(method: str, queries: int, targets: int) -> None:
    """Raises InputError where its solver is missing, or a plan over `queries` x `targets` is out of reach."""
    module, package = ("scipy", "scipy") if method == "hn" else ("ot", "POT")
    if find_spec(module) is None:
        raise InputError(f"method {method!r} needs {package}; {install('evaluation')}")
    if queries * targets > LARGEST:
        raise InputError(
            f"method {method!r} solves one transport problem over all {queries} x {targets} pairs; at most "
            f"{LARGEST:,} are accepted: leave it out, or evaluate on a sample"
        )


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


def fitted(label: str, model: OffsetModel, scene: Scene) -> Candidate:
    if model.metric is not scene.metric:
        raise InputError(f"model {label!r} is for {model.metric.value}, the evaluation for {scene.metric.value}")
    compute = scene.compute
    offsets = model.members.offsets(scene.targets, compute=compute)
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
        require_solvable(name, len(scene.queries), scene.targets.rows)
        return Candidate(method, name, {}, scores=partial(_plan_scores, name, scene))
    if name == "auto":
        raise InputError("method 'auto' is a fit: pass models={'auto': hubplugin.fit(targets, bank, 'auto')}")
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
    product = Similarities(scene.queries[rows], scene.metric, scene.compute.quiet)
    scores: np.ndarray = dense(product, scene.targets).numpy()
    return scores


def _plan_scores(name: str, scene: Scene, rows: slice) -> np.ndarray:
    return PLANS[name](similarities(slice(None), scene))[rows]
