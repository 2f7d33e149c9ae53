"""Commands that look and change nothing: diagnose, inspect, evaluate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubplugin.bank import Bank, holds_texts
from hubplugin.bank.embedding import for_documents
from hubplugin.cli.application import Answer, command, progress_shown
from hubplugin.cli.options import (
    BankOptions,
    ComputeOptions,
    Embed,
    ReportOptions,
    StoreUrl,
    answer,
    bank_of,
    require_files,
    vectors,
)
from hubplugin.errors import InputError, Parameter
from hubplugin.vectors import Progress, Vectors

if TYPE_CHECKING:
    from hubplugin.evaluation.beir import Beir


Forecast = Annotated[
    bool,
    typer.Option("--learn", help="Also says what known answers would teach, or recorded clicks (docs/learning.md)."),
]


@command
def diagnose(
    store: StoreUrl,
    *,
    banks: BankOptions,
    learn: Forecast = False,
    shown: ReportOptions,
    computing: ComputeOptions,
) -> Answer:
    """What is wrong with these searches: hubness or something else? Who are the hubs, what would a fit change?"""
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    require_files(read=(), written=(shown.report,))
    bank, opened = bank_of(banks), open_store(store)
    called = naming(shown.names, "--names")

    from hubplugin.jobs.diagnose import diagnose

    with progress_shown() as progress:
        computed = computing.compute(progress)
        diagnosis = diagnose(opened, bank, learn=learn, names=called, compute=computed)
    return answer(diagnosis.report(), diagnosis, shown.report, opened)


LiveQueries = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Queries that people ask now: a file, as for a bank. By default those recorded since the fit.",
    ),
]


@command
def inspect(
    store: StoreUrl, live: LiveQueries = None, embed: Embed = None, *, shown: ReportOptions, computing: ComputeOptions
) -> Answer:
    """Which correction lies in the store, is it whole, is hubness still lower? The exit status is 4 where it is not."""
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    require_files(read=(), written=(shown.report,))
    asked = None if live is None else Bank(live, embed=embed, name="live queries").look()
    opened = open_store(store)
    called = naming(shown.names, "--names")

    from hubplugin.jobs.health import inspect

    with progress_shown() as progress:
        inspection = inspect(opened, asked, compute=computing.compute(progress))
    answered = answer(inspection.report(called), inspection, shown.report, opened)
    return replace(answered, attention=bool(inspection.attention))


TrueTargets = Annotated[
    str | None,
    typer.Option(
        help="True target rows, ids in a STORE (.npy, .json), or qrels (TREC, BEIR); by default row i to row i."
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(help="As 'dbsn' or 'nnn k=128 alpha=0.75'; may be repeated. All additive ones by default."),
]
MeasuredQueries = Annotated[
    str,
    typer.Option(
        help="Queries whose true targets are known: a file of vectors or, with --embed, of texts, or a BEIR folder, "
        "whose corpus is the gallery unless there is another."
    ),
]
InStore = Annotated[
    str | None,
    typer.Argument(metavar="[STORE]", help="Searched raw and corrected, by its own search; or pass --targets."),
]
Gallery = Annotated[str | None, typer.Option(help="The gallery: a file, as for a bank.")]
CutOff = Annotated[int, typer.Option(help="Cut-off k for hubness, mAP and nDCG; how many a STORE is asked for.")]
MetricName = Annotated[str, typer.Option(help="cosine, dot or euclidean.")]
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
    metric: MetricName = "cosine",
    condition: Condition = None,
    shown: ReportOptions,
    computing: ComputeOptions,
) -> Answer:
    """Queries whose true targets are known: a corrected store beside its raw search, or every method side by side."""
    for_files = {"--targets": targets, "--bank": banks.bank, "--answers": banks.answers, "--method": method}
    beir = _beir(queries, banks.embed) if Path(queries).is_dir() else None
    truth = truth if beir is None or truth is not None else str(beir.qrels)
    if store is not None:
        for option in (name for name, value in for_files.items() if value):
            raise InputError(f"{option} is for files; a STORE is searched as it is")
        if truth is None:
            raise InputError("a STORE needs --truth: for each query the id of its true target")
    elif targets is None and beir is None:
        raise InputError("expected a STORE, to search it as it is, or --targets, to try methods on files")
    elif condition is not None:
        raise InputError("--filter is for a STORE; files are searched whole")
    test_queries, bank = _queries_and_bank(queries if beir is None else beir.queries, banks)
    require_files(read=(truth, shown.names if store is None else None), written=(shown.report,))
    ranked, names = _ranked(store, targets, shown.names, beir, banks.embed)

    from hubplugin.evaluation.evaluate import evaluate

    with progress_shown() as progress:
        compute = computing.compute(progress)
        ranked = ranked.vectors(None, progress) if isinstance(ranked, Bank) else ranked
        if bank is not None:
            bank = replace(bank, queries=bank.vectors(ranked, progress), embed=None)
        results = evaluate(
            ranked, bank, queries=_each_row(test_queries, ranked, progress), truth=truth,
            methods=method or None, k=k,
            condition=condition, names=names, query_names=None if beir is None else beir.query_ids,
            metric=metric if store is None else None, compute=compute,
        )  # fmt: skip
    return answer(results.report(), results, shown.report)


def _ranked(
    store: str | None, targets: str | None, names: str | None, beir: Beir | None, embed: str | None
) -> tuple[Any, Any]:
    """What is evaluated, a store, the vectors in a file or a corpus to embed, and what its targets are called."""
    if store is None and beir is not None:
        corpus = Bank(beir.documents, embed=for_documents(str(embed)), name="corpus")
        return (corpus if targets is None else vectors(targets, "targets")), beir.ids
    if store is None:
        return vectors(targets, "targets"), names
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    return open_store(store), naming(names, "--names")


def _beir(folder: str, embed: str | None) -> Beir:
    """What lies in a folder that was named in the place of a file of queries."""
    from hubplugin.evaluation.beir import read_beir

    if embed is None:
        raise InputError(f"{folder!r} is a folder, as of BEIR: name the model of its texts by ", Parameter("embed"))
    return read_beir(Path(folder))


def _queries_and_bank(queries: str | list[str], banks: BankOptions) -> tuple[Bank, Bank | None]:
    """Test queries and bank as they were typed; either may be texts and the other vectors."""
    in_queries, in_bank = (
        path is not None and (isinstance(path, list) or holds_texts(path, banks.embed is not None))
        for path in (queries, banks.bank)
    )
    embed = banks.embed if in_queries or not in_bank else None
    test_queries = Bank(queries, embed=embed, name="queries").look()
    if banks.bank is None:
        return test_queries, None
    return test_queries, bank_of(banks if in_bank else replace(banks, embed=None))


def _each_row(queries: Bank, gallery: object, progress: Progress | None) -> Vectors:
    """The vectors, where row i of the file belongs to row i of another; raises InputError where a text is missing."""
    texts = queries.texts
    if texts is not None and texts.rows[-1] >= len(texts.rows):
        lacking = next(row for row, number in enumerate(texts.rows) if row != number)
        raise InputError(f"{texts.name}: row {lacking}, counted from 0, has no text; take it out here and in the truth")
    return queries.vectors(gallery, progress)
