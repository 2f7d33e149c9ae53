"""Commands that change nothing: diagnose, evaluate, inspect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import hubplugin
from hubplugin.bank import Bank
from hubplugin.cli.application import command
from hubplugin.cli.options import (
    Answers,
    BankFile,
    Embed,
    Images,
    PairsFrom,
    ReportFile,
    Show,
    StoreUrl,
    bank_of,
    embedding,
    open_inputs,
)
from hubplugin.compute import Compute
from hubplugin.errors import InputError, Parameter
from hubplugin.jobs.naming import display_query, names_of
from hubplugin.registry import open_store
from hubplugin.results import Result
from hubplugin.vectors import Progress, Vectors, as_vectors, require_file


@command
def diagnose(
    store: StoreUrl,
    compute: Compute,
    bank: BankFile = None,
    answers: Answers = None,
    embed: Embed = None,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="Also show what learning from known answers or clicks would gain (docs/learning.md).",
        ),
    ] = False,
    pairs_from: PairsFrom = None,
    show: Show = None,
    images: Images = None,
    report: ReportFile = None,
) -> Result:
    """Find out whether hubness or something else is behind bad searches, and what a correction would change."""
    opened, examples, pairs = open_inputs(store, bank, answers, embed, pairs_from)
    return hubplugin.diagnose(
        opened, examples, learn=pairs or learn, show=show, compute=compute
    )


@command
def inspect(
    store: StoreUrl,
    compute: Compute,
    live: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A file of current queries, as for a bank. The default is the queries "
            "recorded since the fit.",
        ),
    ] = None,
    embed: Embed = None,
    show: Show = None,
    images: Images = None,
    report: ReportFile = None,
) -> Result:
    """Check that the correction is complete and still reduces hubness. The exit status is 4 if not."""
    asked = None
    if live is not None:
        asked = Bank(live, embed=embed, name="live queries").look()
    opened = open_store(store)
    return hubplugin.inspect(opened, asked, show=show, compute=compute)


@command
def evaluate(
    compute: Compute,
    targets: Annotated[
        str,
        typer.Argument(
            metavar="STORE|FILE",
            help="A STORE, which is searched both raw and corrected, or a file of vectors, which each method ranks.",
        ),
    ],
    queries: Annotated[
        str,
        typer.Option(
            help="Queries whose true targets are known: a file of vectors or (with --embed) of texts.",
        ),
    ],
    truth: Annotated[
        str | None,
        typer.Option(
            help="Rows of the true targets, ids in a STORE (.npy), or qrels (TREC, "
            "BEIR). By default, row i of the targets is the answer to query i."
        ),
    ] = None,
    bank: BankFile = None,
    answers: Answers = None,
    embed: Embed = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="For example 'dbsn' or 'nnn k=128 alpha=0.75'; may be repeated. The default is all additive methods.",
        ),
    ] = None,
    k: Annotated[
        int,
        typer.Option(
            help="Cut-off k for hubness and nDCG, and the number of results requested from a STORE."
        ),
    ] = 10,
    metric: Annotated[
        str | None,
        typer.Option(
            help="The metric of files: cosine, dot or euclidean.", show_default="cosine"
        ),
    ] = None,
    show: Show = None,
    images: Images = None,
    report: ReportFile = None,
) -> Result:
    """Compare a corrected store with its raw search, or compare all methods, on queries with known true targets."""
    is_store = ":" in targets
    if is_store and truth is None:
        raise InputError("a store needs ids of true targets: pass ", Parameter("truth"))
    if truth is not None:
        require_file(Path(truth), "truth")
    # The model is for texts: if the bank has texts, the queries may be vectors, and the
    # other way round.
    query_model = embed
    if embedding(bank, embed) is not None:
        query_model = embedding(queries, embed)
    asked = Bank(queries, embed=query_model, name="queries").look()
    examples = None
    if bank is not None or answers is not None:
        others_embed = query_model is not None
        examples = bank_of(bank, answers, embed, others_embed=others_embed)
    query_names = None
    if asked.texts is not None and (truth is None or truth.endswith(".npy")):
        # Only here: a qrels file would look for its query ids among these names.
        rows = range(len(asked.texts.texts))
        query_names = [display_query(asked, row) for row in rows]
    gallery: Any
    names: Any
    if is_store:
        gallery = open_store(targets)
        names = names_of(gallery, show)
    else:
        gallery = as_vectors(targets, "targets")
        names = show
    return hubplugin.evaluate(
        gallery,
        examples,
        queries=_vectors_of_all_rows(asked, gallery, compute.progress),
        truth=truth,
        methods=methods,
        k=k,
        names=names,
        query_names=query_names,
        metric=metric,
        compute=compute,
    )


def _vectors_of_all_rows(
    queries: Bank, gallery: object, progress: Progress | None
) -> Vectors:
    """Return the vectors of all rows: row i of the file belongs to row i of the truth.

    Raises:
        InputError: A row has no text.
    """
    texts = queries.texts
    # Rows without a text are left out, so later rows have larger numbers than places.
    if texts is not None and texts.rows[-1] >= len(texts.rows):
        empty = next(place for place, row in enumerate(texts.rows) if place != row)
        raise InputError(
            f"{texts.name}: row {empty}, counted from 0, has no text; remove it "
            "here and from the truth"
        )
    return queries.vectors(gallery, progress)
