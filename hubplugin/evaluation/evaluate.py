"""`evaluate`: every method side by side on queries whose true targets are known."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hubplugin.errors import InputError, Parameter
from hubplugin.evaluation.banks import SAMPLE, coverage, earth_movers_distance
from hubplugin.evaluation.export import Evaluation
from hubplugin.evaluation.plans import PLANS, check_size
from hubplugin.evaluation.result import RAW, SIGNIFICANT, BankFigures, Hub, MethodResult, SweepPoint
from hubplugin.evaluation.truth import Names, TruthLike, as_names, as_truth
from hubplugin.measures import hubness
from hubplugin.measures.retrieval import Ranks, Truth, average_precision, expected_ranks, ndcg, recall
from hubplugin.measures.significance import compare, hubness_interval, interval
from hubplugin.methods import METHODS, FitInput, configured
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.query_dependent import QUERY_METHODS
from hubplugin.reductions import Compute, Similarities, dense, prepared, sampled
from hubplugin.search import TIE, TopK, TruthCounts, search
from hubplugin.vectors import Progress, VectorLike, Vectors, as_vectors

TEMPERATURES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.2)
"""Where the curve of recall against temperature is drawn, for cosine: the papers' settings and a decade around."""

RECALL_AT = (1, 5, 10)
HUBS = 20
THUMBNAIL = 160


@dataclass(frozen=True)
class _Scene:
    queries: np.ndarray
    targets: Vectors
    truth: Truth
    given: FitInput | None
    metric: Metric
    compute: Compute
    k: int
    seed: int


@dataclass(frozen=True)
class _Candidate:
    """A method that was asked for. Either its offsets [n] are known, or its scores for some of the queries
    (rows -> [rows, n])."""

    label: str
    method: str
    parameters: dict[str, Any]
    offsets: np.ndarray | None = None
    scores: Callable[[slice], np.ndarray] | None = None


@dataclass(frozen=True)
class _Outcome:
    ranks: Ranks
    found: np.ndarray


def evaluate(
    queries: VectorLike,
    targets: VectorLike,
    truth: TruthLike = None,
    query_bank: VectorLike | None = None,
    target_bank: VectorLike | None = None,
    methods: Sequence[str] | None = None,
    models: Mapping[str, OffsetModel] | None = None,
    k: int = 10,
    names: Names = None,
    query_names: Names = None,
    thumbnails: Names = None,
    temperatures: Sequence[float] | None = None,
    metric: Metric | str = "cosine",
    seed: int = 0,
    device: str = "auto",
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> Evaluation:
    """Ranks all targets for all queries, raw and under each method, and measures recall and hubness.

    queries [q, d], targets [n, d], query_bank [m, d], target_bank [p, d]: as in `hubplugin.fit`.
    truth: see `TruthLike`; by default row i of the targets is the true one of query i.
    methods: names, with parameters where they differ from the defaults ("is", "nnn k=128 alpha=0.75"): the additive
        methods, the query-dependent ones (dis, dualdis, dsl, gc), and, for comparison on up to 25 million pairs,
        otn, l2n and hn, which need no bank. By default every additive method that the given banks allow.
    models: fitted models besides, by the label that they get, as {"auto": hubplugin.fit(..., method="auto")}.
    k: of the k-occurrence, mAP@k and nDCG@k; 10 as in the papers. R@k is given beside R@1, R@5 and R@10.
    names, query_names: what reports and a qrels file call the targets and the queries; a sequence, or a text file with
        one a line.
    thumbnails: the path of an image for each target, or None (or an empty line); shown beside the worst hubs.
    temperatures: where `is`, `sn` and `dbsn`, if among the methods, are tried besides, each at the cost of a fit; by
        default 0.01 to 0.2 for cosine, whose scale is known, and nowhere for other metrics. () for none.
    seed: of the bootstrap and of samples. device, memory, progress: as in `hubplugin.fit`.

    All additive methods and temperatures share one product of queries and targets. Memory holds the queries, one
    block of targets, and k rows a query and one offset a target for each method.

    Raises InputError, one line, for anything that cannot be used as given.
    """
    metric, compute = Metric.parse(metric), Compute(device, memory, progress)
    asked, gallery = as_vectors(queries, "queries"), as_vectors(targets, "targets")
    if asked.dim != gallery.dim:
        raise InputError(
            f"{asked.name} have {asked.dim} dimensions, {gallery.name} have {gallery.dim}; "
            "embed both with the same model"
        )
    if not 1 <= k <= gallery.rows:
        raise InputError(Parameter("k", k), f" is not between 1 and the {gallery.rows} targets of the gallery")
    if seed < 0:
        raise InputError(Parameter("seed", seed), ": expected 0 or more")
    if target_bank is not None and query_bank is None:
        raise InputError("a target bank was given without example queries: pass ", Parameter("query_bank"))
    unlabelled = [label for label in models or {} if label == RAW or not label.strip()]
    if unlabelled:
        raise InputError(f"a model cannot be labelled {unlabelled[0]!r}; name it by another word than {RAW!r}")
    names = as_names(names, gallery.rows, "names")
    query_names = as_names(query_names, asked.rows, "query_names")
    thumbnails = as_names(thumbnails, gallery.rows, "thumbnails")
    _require_libraries()
    given = None
    if query_bank is not None:
        given = FitInput.read(query_bank, gallery, target_bank, metric, compute)
    scene = _Scene(
        queries=prepared(asked, metric),
        targets=gallery,
        truth=as_truth(truth, asked.rows, gallery.rows, query_names, names),
        given=given,
        metric=metric,
        compute=compute,
        k=k,
        seed=seed,
    )
    if methods is None:
        methods = [] if given is None else [name for name in METHODS if name != "dualis" or target_bank is not None]
    if temperatures is None:
        temperatures = TEMPERATURES if metric is Metric.COSINE and given is not None else ()

    raw = _Candidate(RAW, RAW, {}, np.zeros(gallery.rows, np.float32))
    asked_for = [_candidate(method, scene) for method in ([methods] if isinstance(methods, str) else methods)]
    fitted = [_fitted(label, model, scene) for label, model in (models or {}).items()]
    candidates = list({candidate.label: candidate for candidate in (raw, *asked_for, *fitted)}.values())
    curve = [
        _candidate(f"{name} tau={tau:g}", scene)
        for name in sorted({c.method for c in candidates if c.method in ("is", "sn", "dbsn")})
        for tau in temperatures
    ]
    outcomes = list(_outcomes([*candidates, *curve], scene))
    results = _results(candidates, outcomes[: len(candidates)], scene)
    occurrences = {
        candidate.label: hubness.k_occurrence(outcome.found, gallery.rows)
        for candidate, outcome in zip(candidates, outcomes, strict=False)
    }
    return Evaluation(
        metric=metric.value,
        queries=asked.rows,
        judged=len(scene.truth.judged),
        targets=gallery.rows,
        query_bank=None if given is None else len(given.query_bank),
        target_bank=None if given is None or given.target_bank is None else len(given.target_bank),
        k=k,
        seed=seed,
        methods=results,
        sweep=[
            SweepPoint(
                method=candidate.method,
                tau=candidate.parameters["tau"],
                recall=interval(recall(outcome.ranks, 1), seed),
                skewness=hubness.skewness(hubness.k_occurrence(outcome.found, gallery.rows)),
            )
            for candidate, outcome in zip(curve, outcomes[len(candidates) :], strict=True)
        ],
        hubs=[
            Hub(
                row=int(row),
                name=str(names[row]) if names is not None else f"target {row}",
                found_by={label: int(occurrence[row]) for label, occurrence in occurrences.items()},
                thumbnail=None if thumbnails is None else _data_uri(thumbnails[row]),
            )
            for row in hubness.hubs(occurrences[RAW], HUBS)
        ],
        banks=_bank_figures(scene),
        best=_best(results),
    )


def _require_libraries() -> None:
    for library, module in (("scipy", "scipy"), ("POT", "ot")):
        if find_spec(module) is None:
            raise InputError(f"evaluating needs {library}: pip install 'hubplugin[evaluation]'")


def _fitted(label: str, model: OffsetModel, scene: _Scene) -> _Candidate:
    if model.metric is not scene.metric:
        raise InputError(f"model {label!r} is for {model.metric.value}, the evaluation for {scene.metric.value}")
    compute = scene.compute
    offsets = model.offsets(scene.targets, device=compute.device, memory=compute.memory, progress=compute.progress)
    return _Candidate(label, model.method, model.parameters, offsets)


def _candidate(method: str, scene: _Scene) -> _Candidate:
    name, *settings_given = method.split() or [""]
    parameters: dict[str, Any] = {}
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
        return _Candidate(method, name, {}, scores=partial(_plan_scores, name, scene))
    if name == "auto":
        raise InputError("method 'auto' is a fit: pass models={'auto': hubplugin.fit(query_bank, 'auto', targets)}")
    known = {**METHODS, **QUERY_METHODS}
    if name not in known:
        raise InputError(f"unknown method {name!r}: use one of {', '.join([*known, *PLANS])}")
    if scene.given is None:
        raise InputError(f"method {name!r} needs example queries: pass ", Parameter("query_bank"))
    if name in METHODS:
        configuration = configured(METHODS, name, parameters)
        return _fitted(method, configuration.fit(scene.given), scene)
    query_dependent = configured(QUERY_METHODS, name, parameters)
    rule = query_dependent.rule(scene.given)
    kept = rule.keep(scene.targets)

    def scores(rows: slice) -> np.ndarray:
        corrected: np.ndarray = rule.rescore(_similarities(rows, scene), kept)
        return corrected

    return _Candidate(method, name, query_dependent.model_dump(), scores=scores)


def _similarities(rows: slice, scene: _Scene) -> np.ndarray:
    similarities = Similarities(scene.queries[rows], scene.metric, replace(scene.compute, progress=None))
    scores: np.ndarray = dense(similarities, scene.targets).numpy()
    return scores


def _plan_scores(name: str, scene: _Scene, rows: slice) -> np.ndarray:
    return PLANS[name](_similarities(slice(None), scene))[rows]


def _outcomes(candidates: Sequence[_Candidate], scene: _Scene) -> Iterator[_Outcome]:
    """In the order of the candidates; those with offsets share one search."""
    truth, top = scene.truth, TopK(scene.k)
    counts = TruthCounts(truth.query_rows, truth.target_rows)
    offsets = np.stack([candidate.offsets for candidate in candidates if candidate.offsets is not None])
    search(scene.queries, scene.targets, scene.metric, scene.compute, top, counts, offsets=offsets)
    searched = iter(
        [
            _Outcome(expected_ranks(truth, greater, equal), found)
            for greater, equal, found in zip(counts.greater, counts.equal, top.rows, strict=True)
        ]
    )
    for candidate in candidates:
        yield next(searched) if candidate.scores is None else _scored(candidate, scene)


def _scored(candidate: _Candidate, scene: _Scene) -> _Outcome:
    """Ranks and nearest of a method that gives scores and no offsets, as many queries at a time as memory allows."""
    assert candidate.scores is not None
    truth, count = scene.truth, len(scene.queries)
    greater, equal = np.empty(len(truth.query_rows), np.int64), np.empty(len(truth.query_rows), np.int64)
    found = np.empty((count, scene.k), np.int64)
    whole = candidate.method in PLANS
    height = count if whole else max(1, scene.compute.bytes() // (8 * 8 * scene.targets.rows))
    generator = np.random.default_rng(scene.seed)
    for start in range(0, count, height):
        rows = slice(start, min(start + height, count))
        scores = candidate.scores(rows)
        first, last = np.searchsorted(truth.query_rows, [rows.start, rows.stop])
        for pair in range(first, last):
            row, own = scores[truth.query_rows[pair] - start], truth.target_rows[pair]
            tie = TIE * np.finfo(np.float32).eps * abs(row[own])
            greater[pair] = (row > row[own] + tie).sum()
            equal[pair] = (row >= row[own] - tie).sum() - greater[pair] - 1
        if whole:  # nearly all of a plan ties at zero; which of those are found must not depend on their rows
            scores = scores + generator.random(scores.shape) * scores[scores > 0].min() * 1e-3
        found[rows] = torch.topk(torch.from_numpy(scores), scene.k, dim=1).indices.numpy()
        scene.compute.report(f"ranking by {candidate.label}", rows.stop, count)
    return _Outcome(expected_ranks(truth, greater, equal), found)


def _results(candidates: Sequence[_Candidate], outcomes: Sequence[_Outcome], scene: _Scene) -> list[MethodResult]:
    from scipy.stats import false_discovery_control

    raw_ranks, seed, k = outcomes[0].ranks.best, scene.seed, scene.k
    versus = [compare(raw_ranks, outcome.ranks.best, seed) for outcome in outcomes[1:]]
    adjusted = false_discovery_control([comparison.p for comparison in versus]) if versus else []
    results = []
    for number, (candidate, outcome) in enumerate(zip(candidates, outcomes, strict=True)):
        ranks, occurrence = outcome.ranks, hubness.k_occurrence(outcome.found, scene.targets.rows)
        values, targets = np.unique(occurrence, return_counts=True)
        results.append(
            MethodResult(
                label=candidate.label,
                method=candidate.method,
                parameters=candidate.parameters,
                recall={at: interval(recall(ranks, at), seed) for at in sorted({*RECALL_AT, k})},
                median_rank=interval(ranks.best, seed, np.median),
                mean_rank=interval(ranks.best, seed),
                mean_average_precision=interval(average_precision(ranks, k), seed),
                ndcg=interval(ndcg(ranks, k), seed),
                skewness=hubness_interval(outcome.found, scene.targets.rows, hubness.skewness, seed),
                hubness=hubness.Hubness.of(occurrence, k),
                occurrences=dict(zip(values.tolist(), targets.tolist(), strict=True)),
                storable=candidate.offsets is not None,
                transductive=candidate.method in PLANS,
                versus_raw=versus[number - 1] if number else None,
                adjusted_p=float(adjusted[number - 1]) if number else None,
                best_ranks=ranks.best,
            )
        )
        scene.compute.report("bootstrap intervals", number + 1, len(candidates))
    return results


def _best(results: Sequence[MethodResult]) -> str | None:
    """The highest R@1 among the methods that a search can use, if it is better than the raw search beyond chance."""
    usable = [result for result in results[1:] if not result.transductive]
    if not usable:
        return None
    best = max(usable, key=lambda result: (result.recall[1].value, -result.hubness.skewness))
    gained = best.recall[1].value > results[0].recall[1].value
    return best.label if gained and best.adjusted_p is not None and best.adjusted_p < SIGNIFICANT else None


def _bank_figures(scene: _Scene) -> BankFigures:
    gallery = sampled(scene.targets, SAMPLE, scene.metric, np.random.default_rng(scene.seed))
    distance = partial(earth_movers_distance, seed=scene.seed)
    given = scene.given
    if given is None:
        sample = min(SAMPLE, len(scene.queries), len(gallery))
        return BankFigures(sample=sample, queries_to_targets=distance(scene.queries, gallery, sample=sample))
    both = None if given.target_bank is None else np.concatenate([gallery, given.target_bank])
    sample = min(SAMPLE, len(scene.queries), len(gallery), len(given.query_bank))
    distance = partial(distance, sample=sample)
    return BankFigures(
        sample=sample,
        queries_to_targets=distance(scene.queries, gallery),
        query_bank_to_queries=distance(given.query_bank, scene.queries),
        query_bank_to_targets=distance(given.query_bank, gallery),
        query_bank_to_targets_and_target_bank=None if both is None else distance(given.query_bank, both),
        coverage=coverage(given.query_bank, scene.targets, scene.metric, scene.compute),
    )


def _data_uri(path: str | os.PathLike[str] | None) -> str | None:
    """The image at `path`, at most 160 pixels wide and high, as text that a page can hold."""
    if not path:
        return None
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(Path(path)) as image:
            small = image.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"thumbnail {os.fspath(path)!r} cannot be read as an image: {error}") from None
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    content = io.BytesIO()
    small.save(content, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()
