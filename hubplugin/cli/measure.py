"""Commands that look and change nothing: diagnose, evaluate, inspect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hubplugin
from hubplugin.bank import Bank, holds_texts
from hubplugin.bank.embedding import for_documents
from hubplugin.cli.application import command
from hubplugin.cli.options import (
    Answers,
    BankFile,
    Device,
    Embed,
    ReportFile,
    StoreUrl,
    TargetNames,
    bank_of,
    computing,
    require_writable,
    write_report,
)
from hubplugin.errors import InputError, Parameter
from hubplugin.jobs.naming import read_names
from hubplugin.registry import adapters, open_store
from hubplugin.report import Result
from hubplugin.vectors import Progress, Vectors, as_vectors, require_file

if TYPE_CHECKING:
    from hubplugin.evaluation.beir import Beir


@command
def diagnose(
    store: StoreUrl,
    bank: BankFile = None,
    answers: Answers = None,
    embed: Embed = None,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="Also says what known answers or clicks would teach (docs/learning.md).",
        ),
    ] = False,
    names: TargetNames = None,
    report: ReportFile = None,
    device: Device = "auto",
) -> Result:
    """What is wrong with these searches: hubness or something else? Who are the hubs, what would a fit change?"""
    require_writable(report)
    examples, opened, called = (
        bank_of(bank, answers, embed),
        open_store(store),
        read_names(names, "--names"),
    )
    with computing(device) as compute:
        diagnosis = hubplugin.diagnose(
            opened, examples, learn=learn, names=called, compute=compute
        )
    return write_report(diagnosis, report)


@command
def inspect(
    store: StoreUrl,
    live: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Queries that people ask now: a file, as for a bank. By default those recorded since the fit.",
        ),
    ] = None,
    embed: Embed = None,
    names: TargetNames = None,
    report: ReportFile = None,
    device: Device = "auto",
) -> Result:
    """Which correction lies in the store, is it whole, is hubness still lower? The exit status is 4 where it is not."""
    require_writable(report)
    live_queries = (
        None if live is None else Bank(live, embed=embed, name="live queries").look()
    )
    opened, called = open_store(store), read_names(names, "--names")
    with computing(device) as compute:
        inspection = hubplugin.inspect(
            opened, live_queries, names=called, compute=compute
        )
    return write_report(inspection, report)


@command
def evaluate(
    queries: Annotated[
        str,
        typer.Option(
            help="Queries whose true targets are known: a file of vectors or, with --embed, of texts, or a BEIR "
            "folder, whose corpus is the gallery unless there is another.",
        ),
    ],
    targets: Annotated[
        str | None,
        typer.Argument(
            metavar="[STORE or FILE]",
            help="A STORE, searched raw and corrected by its own search; or a file of vectors, ranked by each method.",
        ),
    ] = None,
    truth: Annotated[
        str | None,
        typer.Option(
            help="True target rows, ids in a STORE (.npy, .json), or qrels (TREC, BEIR); by default row i to row i."
        ),
    ] = None,
    bank: BankFile = None,
    answers: Answers = None,
    embed: Embed = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="As 'dbsn' or 'nnn k=128 alpha=0.75'; may be repeated. All additive ones by default.",
        ),
    ] = None,
    k: Annotated[
        int,
        typer.Option(
            help="Cut-off k for hubness, mAP and nDCG; how many a STORE is asked for."
        ),
    ] = 10,
    metric: Annotated[
        str | None,
        typer.Option(help="Of files: cosine, dot or euclidean.", show_default="cosine"),
    ] = None,
    names: TargetNames = None,
    report: ReportFile = None,
) -> Result:
    """Queries whose true targets are known: a corrected store beside its raw search, or every method side by side."""
    beir = _beir(queries, embed) if Path(queries).is_dir() else None
    if targets is None and beir is None:
        raise InputError("expected a STORE, or a file of vectors to try methods on")
    require_writable(report)
    of_store = targets is not None and (
        ":" in targets or targets.rpartition(".")[2] in adapters()
    )
    truth = str(beir.qrels) if truth is None and beir is not None else truth
    for path in (truth, None if of_store else names):
        if path is not None:
            require_file(Path(path))
    test_queries, examples = _read_queries(
        queries if beir is None else beir.queries, bank, answers, embed
    )
    called: Any = (
        read_names(names, "--names")
        if of_store
        else names
        if names or beir is None
        else beir.ids
    )
    ranked: Any
    if targets is not None:
        ranked = open_store(targets) if of_store else as_vectors(targets, "targets")
    elif beir is not None:
        ranked = Bank(beir.documents, embed=for_documents(str(embed)), name="corpus")
    with computing() as compute:
        ranked = (
            ranked.vectors(None, compute.progress)
            if isinstance(ranked, Bank)
            else ranked
        )
        if examples is not None:
            examples = replace(
                examples, queries=examples.vectors(ranked, compute.progress), embed=None
            )
        results = hubplugin.evaluate(
            ranked, examples, queries=_each_row(test_queries, ranked, compute.progress), truth=truth, methods=methods,
            k=k, names=called, query_names=None if beir is None else beir.query_ids, metric=metric, compute=compute,
        )  # fmt: skip
    return write_report(results, report)


def _beir(folder: str, embed: str | None) -> Beir:
    """What lies in a folder that was named in the place of a file of queries."""
    from hubplugin.evaluation.beir import read_beir

    if embed is None:
        raise InputError(
            f"{folder!r} is a folder, as of BEIR: name the model of its texts by ",
            Parameter("embed"),
        )
    return read_beir(Path(folder))


def _read_queries(
    queries: str | list[str], bank: str | None, answers: str | None, embed: str | None
) -> tuple[Bank, Bank | None]:
    """Test queries and bank as they were typed; either may be texts and the other vectors."""
    in_queries, in_bank = (
        source is not None
        and (isinstance(source, list) or holds_texts(source, embed is not None))
        for source in (queries, bank)
    )
    test_queries = Bank(
        queries, embed=embed if in_queries or not in_bank else None, name="queries"
    ).look()
    if bank is None and answers is None:
        return test_queries, None
    return test_queries, bank_of(bank, answers, embed if in_bank else None)


def _each_row(queries: Bank, gallery: object, progress: Progress | None) -> Vectors:
    """The vectors, where row i of the file belongs to row i of another; raises InputError where a text is missing."""
    texts = queries.texts
    if texts is not None and texts.rows[-1] >= len(texts.rows):
        lacking = next(row for row, number in enumerate(texts.rows) if row != number)
        raise InputError(
            f"{texts.name}: row {lacking}, counted from 0, has no text; take it out here and in the truth"
        )
    return queries.vectors(gallery, progress)
