"""Commands that look and change nothing: diagnose, inspect, evaluate, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hubplugin.bank import holds_texts
from hubplugin.cli.frame import Answer, command, progress_shown
from hubplugin.cli.options import (
    AnswerOptions,
    BankOptions,
    ComputeOptions,
    GivenQueries,
    ReportOptions,
    StoreUrl,
    Texts,
    given_by,
    require_files,
    told,
    typed,
    vectors,
    write_report,
)
from hubplugin.errors import InputError, Parameter


@command
def diagnose(
    store: StoreUrl,
    *,
    banks: BankOptions,
    answers: AnswerOptions,
    texts: Texts = None,
    shown: ReportOptions,
    computing: ComputeOptions,
) -> Answer:
    """What is wrong with these searches: hubness or something else? Who are the hubs, would a correction help?"""
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    require_files(read=(), written=(shown.report,))
    given, second = given_by(banks, answers), vectors(banks.target_bank, "target bank")
    opened = open_store(store)
    called, worded = naming(shown.names, opened, "--names"), naming(texts, opened, "--texts")

    from hubplugin.jobs.diagnose import diagnose

    with progress_shown() as progress:
        bank = given.bank(opened, progress)
        known = given.pairs(bank, answers.pairs, banks.target_bank)
        found = diagnose(
            opened, bank, second, pairs=known, same_kind=answers.same_kind, names=called, texts=worded,
            compute=computing.compute(progress),
        )  # fmt: skip
    if shown.report is not None:
        from hubplugin.evaluation.report import page_of_diagnosis

        write_report(page_of_diagnosis(found, opened.url), shown.report)
    return Answer(str(found), told(opened, found))


@command
def inspect(
    store: StoreUrl,
    *,
    shown: ReportOptions,
    computing: ComputeOptions,
) -> Answer:
    """Say what correction lies in the store, whether it is whole, and which targets look planted."""
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    require_files(read=(), written=(shown.report,))
    opened = open_store(store)
    called = naming(shown.names, opened, "--names")

    from hubplugin.jobs.health import inspect

    with progress_shown() as progress:
        found = inspect(opened, compute=computing.compute(progress))
    if shown.report is not None:
        from hubplugin.evaluation.report import page_of_inspection

        write_report(page_of_inspection(found, called), shown.report)
    from hubplugin.jobs.facts import facts_of

    return Answer(str(found), facts_of(found), attention=bool(found.alarms))


TrueTargets = Annotated[
    str | None,
    typer.Option(
        help="True target rows, ids in a STORE (.npy, .json), or qrels (TREC, BEIR); by default row i to row i."
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(help="As 'dbsn' or 'nnn k=128 alpha=0.75', or auto; may be repeated. All additive ones by default."),
]
MeasuredQueries = Annotated[
    str, typer.Option(help="Queries whose true targets are known: a file of vectors or, with --embed, of texts.")
]
InStore = Annotated[
    str | None,
    typer.Argument(metavar="[STORE]", help="Searched raw and corrected, by its own search; or pass --targets."),
]
Gallery = Annotated[str | None, typer.Option(help="The gallery: a file, as for a bank.")]
CutOff = Annotated[int, typer.Option(help="Cut-off k for hubness, mAP and nDCG; how many a STORE is asked for.")]
QueryNames = Annotated[str | None, typer.Option(help="What a qrels file calls the queries: a text file, one a line.")]
MetricName = Annotated[str, typer.Option(help="cosine, dot or euclidean.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Condition = Annotated[
    str | None, typer.Option("--filter", help="A STORE's own filter, such as Qdrant's in JSON: searched with it.")
]


@command
def evaluate(
    queries: MeasuredQueries,
    store: InStore = None,
    *,
    targets: Gallery = None,
    truth: TrueTargets = None,
    banks: BankOptions,
    method: Methods = None,
    k: CutOff = 10,
    query_names: QueryNames = None,
    metric: MetricName = "cosine",
    seed: Seed = 0,
    condition: Condition = None,
    shown: ReportOptions,
    computing: ComputeOptions,
) -> Answer:
    """Queries whose true targets are known: a corrected store beside its raw search, or every method side by side."""
    for_files = {
        "--targets": targets, "--bank": banks.query_bank, "--target-bank": banks.target_bank, "--method": method,
    }  # fmt: skip
    if store is not None:
        for option in (name for name, given in for_files.items() if given):
            raise InputError(f"{option} is for files; a STORE is searched as it is")
        known = {"k": k, "condition": condition, "query_names": query_names, "seed": seed}
        return _in_store(store, _asked(queries, banks.embed, banks.field), truth, shown, known)
    if targets is None:
        raise InputError("expected a STORE, to search it as it is, or --targets, to try methods on files")
    if condition is not None:
        raise InputError("--filter is for a STORE; files are searched whole")
    require_files(read=(truth, shown.names, query_names), written=(shown.report,))
    given: dict[str, Any] = {"k": k, "names": shown.names, "query_names": query_names, "seed": seed, "metric": metric}
    given["computing"] = computing
    return _on_files(*_both(queries, banks), (targets, banks.target_bank), truth, method, shown.report, given)


def _asked(queries: str, embed: str | None, field: str | None) -> GivenQueries:
    """The test queries as they were typed."""
    return GivenQueries.of(queries, embed, field, name="queries", parameter="queries")


def _both(queries: str, banks: BankOptions) -> tuple[GivenQueries, GivenQueries]:
    """Test queries and query bank; either may be texts and the other vectors."""
    texts, nothing = (banks.embed, banks.field), (None, None)
    in_queries, in_bank = (
        path is not None and holds_texts(path, banks.embed is not None) for path in (queries, banks.query_bank)
    )
    asked = _asked(queries, *(texts if in_queries or not in_bank else nothing))
    return asked, GivenQueries.of(banks.query_bank, *(texts if in_bank else nothing))


def _on_files(
    queries: GivenQueries,
    query_bank: GivenQueries,
    files: tuple[str, str | None],
    truth: str | None,
    methods: list[str] | None,
    report: Path | None,
    given: dict[str, Any],
) -> Answer:
    """Every method side by side. files: of targets and target bank."""
    gallery, second = vectors(files[0], "targets"), vectors(files[1], "target bank")

    from hubplugin.evaluation.evaluate import evaluate
    from hubplugin.fitting import fit

    with progress_shown() as progress:
        bank, models = query_bank.given(gallery.dim, progress), dict[str, Any]()
        compute = given.pop("computing").compute(progress)
        if "auto" in (methods or []):
            if bank is None:
                raise InputError("method 'auto' chooses on example queries: pass ", Parameter("query_bank"))
            models["auto"] = fit(gallery, bank, "auto", target_bank=second, metric=given["metric"], compute=compute)
        asked = queries.each_row(gallery.dim, progress)
        named = [name for name in methods if name not in models] if methods else None
        found = evaluate(asked, gallery, truth, bank, second, named, models, compute=compute, **given)
    if report is not None:
        found.to_html(report, typed())
    return Answer(found, found.model_dump(mode="json"))


def _in_store(
    store: str, queries: GivenQueries, truth: str | None, shown: ReportOptions, given: dict[str, Any]
) -> Answer:
    """A store beside its raw search."""
    if truth is None:
        raise InputError("a STORE needs --truth: for each query the id of its true target")
    require_files(read=(truth, given["query_names"]), written=(shown.report,))
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    opened = open_store(store)
    called = naming(shown.names, opened, "--names")
    from hubplugin.evaluation.in_store import evaluate_store

    with progress_shown() as progress:
        asked = queries.each_row(opened.dim, progress)
        found = evaluate_store(opened, asked, truth, names=called, progress=progress, **given)
    if shown.report is not None:
        from hubplugin.evaluation.report import page_of_evaluation

        write_report(page_of_evaluation(found), shown.report)
    return Answer(str(found), found.model_dump(mode="json"))


@command
def demo(
    folder: Annotated[Path, typer.Option(help="Where the index and the collection are built.")] = Path(".demo"),
) -> Answer:
    """Correct an index and a shard of the data that comes with hubplugin, and show the gain."""
    from hubplugin.cli.demo import run

    run(folder)
    return Answer("")
