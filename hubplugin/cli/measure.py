"""Commands that look and change nothing: diagnose, inspect, evaluate, demo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hubplugin.bank import Bank, holds_texts
from hubplugin.cli.application import Answer, command, progress_shown
from hubplugin.cli.options import (
    AnswerOptions,
    BankOptions,
    ComputeOptions,
    ReportOptions,
    StoreUrl,
    Texts,
    answer,
    bank_of,
    require_files,
)
from hubplugin.errors import InputError, Parameter
from hubplugin.vectors import Progress, Vectors


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
    bank, opened = bank_of(banks, answers), open_store(store)
    called, worded = naming(shown.names, opened, "--names"), naming(texts, opened, "--texts")

    from hubplugin.jobs.diagnose import diagnose

    with progress_shown() as progress:
        found = diagnose(opened, bank, names=called, texts=worded, compute=computing.compute(progress))
    return answer(found.report(), found, shown.report, opened)


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
    answered = answer(found.report(called), found, shown.report, opened)
    return replace(answered, attention=bool(found.alarms))


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
        "--targets": targets, "--bank": banks.bank, "--answers": banks.answers, "--method": method,
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
    return _on_files(
        *_both(queries, banks), targets, method, shown.report,
        truth=truth, k=k, names=shown.names, query_names=query_names, seed=seed, metric=metric, computing=computing,
    )  # fmt: skip


def _asked(queries: str, embed: str | None, field: str | None) -> Bank:
    """The test queries as they were typed."""
    return Bank(queries, embed=embed, field=field, name="queries").look()


def _both(queries: str, banks: BankOptions) -> tuple[Bank, Bank | None]:
    """Test queries and bank; either may be texts and the other vectors."""
    in_queries, in_bank = (
        path is not None and holds_texts(path, banks.embed is not None) for path in (queries, banks.bank)
    )
    asked = _asked(queries, *((banks.embed, banks.field) if in_queries or not in_bank else (None, None)))
    if banks.bank is None:
        return asked, None
    return asked, bank_of(banks if in_bank else replace(banks, embed=None, field=None))


def _each_row(queries: Bank, gallery: object, progress: Progress | None) -> Vectors:
    """The vectors, where row i of the file belongs to row i of another; raises InputError where a text is missing."""
    texts = queries.texts
    if texts is not None and texts.rows[-1] >= len(texts.rows):
        lacking = next(row for row, number in enumerate(texts.rows) if row != number)
        raise InputError(f"{texts.name}: row {lacking}, counted from 0, has no text; take it out here and in the truth")
    return queries.vectors(gallery, progress)


def _on_files(
    queries: Bank,
    bank: Bank | None,
    targets: str,
    methods: list[str] | None,
    report: Path | None,
    *,
    metric: str,
    computing: ComputeOptions,
    **given: Any,
) -> Answer:
    """Every method side by side."""
    from hubplugin.evaluation.evaluate import evaluate
    from hubplugin.fitting import fit
    from hubplugin.vectors import as_vectors

    gallery = as_vectors(targets, "targets")
    with progress_shown() as progress:
        models, compute = dict[str, Any](), computing.compute(progress)
        if bank is not None:
            bank = replace(bank, queries=bank.vectors(gallery, progress), embed=None, field=None)
        if "auto" in (methods or []):
            if bank is None:
                raise InputError("method 'auto' chooses on example queries: pass ", Parameter("bank"))
            models["auto"] = fit(gallery, bank, "auto", metric=metric, compute=compute)
        found = evaluate(
            gallery, bank, queries=_each_row(queries, gallery, progress),
            methods=[name for name in methods if name not in models] if methods else None, models=models,
            metric=metric, compute=compute, **given,
        )  # fmt: skip
    return answer(found.report(), found, report)


def _in_store(store: str, queries: Bank, truth: str | None, shown: ReportOptions, given: dict[str, Any]) -> Answer:
    """A store beside its raw search."""
    if truth is None:
        raise InputError("a STORE needs --truth: for each query the id of its true target")
    require_files(read=(truth, given["query_names"]), written=(shown.report,))
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    opened = open_store(store)
    called = naming(shown.names, opened, "--names")
    from hubplugin.evaluation.evaluate import evaluate
    from hubplugin.resources import Compute

    with progress_shown() as progress:
        found = evaluate(
            opened, queries=_each_row(queries, opened, progress), truth=truth, names=called,
            compute=Compute(progress=progress), **given,
        )  # fmt: skip
    return answer(found.report(), found, shown.report)


@command
def demo(
    folder: Annotated[Path, typer.Option(help="Where the index and the collection are built.")] = Path(".demo"),
) -> Answer:
    """Correct an index and a shard of the data that comes with hubplugin, and show the gain."""
    from hubplugin.cli.demo import run

    run(folder)
    return Answer("")
