"""`evaluate`: every method side by side on queries whose true targets are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import cast

from hubplugin.errors import InputError, Parameter
from hubplugin.evaluation.banks import bank_figures
from hubplugin.evaluation.candidates import Candidate, candidates_of, curve_of
from hubplugin.evaluation.details import Called, details
from hubplugin.evaluation.export import Evaluation
from hubplugin.evaluation.hubs import anti_hubs, worst_hubs
from hubplugin.evaluation.outcomes import Outcome, best, outcomes_of, results_of
from hubplugin.evaluation.result import RAW, SweepPoint, shown_of
from hubplugin.evaluation.scene import Scene
from hubplugin.evaluation.truth import Names, TruthLike, as_names, as_truth
from hubplugin.measures import hubness
from hubplugin.measures.retrieval import recall
from hubplugin.measures.significance import interval
from hubplugin.methods import FitInput
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.reductions import Compute, prepared
from hubplugin.vectors import Progress, VectorLike, Vectors, as_vectors


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
    _require_usable(asked, gallery, k, seed, models or {})
    if target_bank is not None and query_bank is None:
        raise InputError("a target bank was given without example queries: pass ", Parameter("query_bank"))
    names = as_names(names, gallery.rows, "names")
    query_names = as_names(query_names, asked.rows, "query_names")
    thumbnails = as_names(thumbnails, gallery.rows, "thumbnails")
    require_libraries()
    given = None
    if query_bank is not None:
        given = FitInput.read(query_bank, gallery, target_bank, metric, compute)
    true_pairs = as_truth(truth, asked.rows, gallery.rows, query_names, names)
    scene = Scene(prepared(asked, metric), gallery, true_pairs, given, metric, compute, k, seed)
    candidates = candidates_of(methods, models, scene)
    curve = curve_of(candidates, temperatures, scene)
    found = list(outcomes_of([*candidates, *curve], scene))
    return _evaluation(candidates, curve, found, scene, (names, query_names, thumbnails))


def _evaluation(
    candidates: Sequence[Candidate],
    curve: Sequence[Candidate],
    found: Sequence[Outcome],
    scene: Scene,
    called: tuple[Called, Called, Called],
) -> Evaluation:
    """found: of the `candidates` and then of the `curve`. called: names of targets and queries, and thumbnails."""
    given, results = scene.given, results_of(candidates, found[: len(candidates)], scene)
    names, query_names, thumbnails = called
    winner = best(results)
    shown = next((row for row, result in enumerate(results) if result is shown_of(results, winner)), None)
    occurrences = {
        candidate.label: hubness.k_occurrence(outcome.found, scene.targets.rows)
        for candidate, outcome in zip(candidates, found, strict=False)
    }
    return Evaluation(
        metric=scene.metric.value,
        queries=len(scene.queries),
        judged=len(scene.truth.judged),
        targets=scene.targets.rows,
        query_bank=None if given is None else len(given.query_bank),
        target_bank=None if given is None or given.target_bank is None else len(given.target_bank),
        k=scene.k,
        seed=scene.seed,
        methods=results,
        sweep=_sweep(curve, found[len(candidates) :], scene),
        hubs=worst_hubs(occurrences, names, thumbnails),
        banks=bank_figures(scene),
        best=winner,
        anti_hubs=anti_hubs(occurrences[RAW], names),
        **({} if shown is None else details(candidates[shown], found[0], found[shown], scene, (names, query_names))),
    )


def _sweep(curve: Sequence[Candidate], found: Sequence[Outcome], scene: Scene) -> list[SweepPoint]:
    return [
        SweepPoint(
            method=candidate.method,
            tau=cast(float, candidate.parameters["tau"]),
            recall=interval(recall(outcome.ranks, 1), scene.seed),
            skewness=hubness.skewness(hubness.k_occurrence(outcome.found, scene.targets.rows)),
        )
        for candidate, outcome in zip(curve, found, strict=True)
    ]


def _require_usable(asked: Vectors, gallery: Vectors, k: int, seed: int, models: Mapping[str, OffsetModel]) -> None:
    if asked.dim != gallery.dim:
        raise InputError(
            f"{asked.name} have {asked.dim} dimensions, {gallery.name} have {gallery.dim}; "
            "embed both with the same model"
        )
    if not 1 <= k <= gallery.rows:
        raise InputError(Parameter("k", k), f" is not between 1 and the {gallery.rows} targets of the gallery")
    if seed < 0:
        raise InputError(Parameter("seed", seed), ": expected 0 or more")
    unlabelled = [label for label in models if label == RAW or not label.strip()]
    if unlabelled:
        raise InputError(f"a model cannot be labelled {unlabelled[0]!r}; name it by another word than {RAW!r}")


def require_libraries() -> None:
    """Raises InputError where what figures need is not installed."""
    for library, module in (("scipy", "scipy"), ("POT", "ot")):
        if find_spec(module) is None:
            raise InputError(f"evaluating needs {library}: pip install 'hubplugin[evaluation]'")
