"""Commands on queries whose answers are known: evaluate, demo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hubplugin.cli.frame import Answer, command, progress_shown
from hubplugin.cli.options import Device, Memory, ReportFile, TargetBank, require_files, typed, vectors, write_report
from hubplugin.errors import InputError, Parameter

TrueTargets = Annotated[
    str | None,
    typer.Option(
        help="True target rows, ids in a STORE (.npy, .json), or qrels (TREC, BEIR); by default row i to row i."
    ),
]
ExampleQueries = Annotated[str | None, typer.Option(help="Example queries; needed by all methods but otn, l2n, hn.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(help="As 'dbsn' or 'nnn k=128 alpha=0.75', or auto; may be repeated. All additive ones by default."),
]
Thumbnails = Annotated[str | None, typer.Option(help="An image for each target: a text file, one path a line.")]
Temperatures = Annotated[
    list[float] | None, typer.Option(help="A further temperature for is, sn and dbsn; may be repeated.")
]


MeasuredQueries = Annotated[str, typer.Option(help="Queries whose true targets are known: a file, as for a bank.")]
InStore = Annotated[
    str | None,
    typer.Argument(metavar="[STORE]", help="Searched raw and corrected, by its own search; or pass --targets."),
]
Gallery = Annotated[str | None, typer.Option(help="The gallery: a file, as for a bank.")]
CutOff = Annotated[int, typer.Option(help="Cut-off k for hubness, mAP and nDCG; how many a STORE is asked for.")]
Names = Annotated[
    str | None,
    typer.Option(help="What the targets are called: a text file, one a line; or, in a STORE, payload.KEY."),
]
QueryNames = Annotated[str | None, typer.Option(help="What a qrels file calls the queries: likewise.")]
MetricName = Annotated[str, typer.Option(help="cosine, dot or euclidean.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Condition = Annotated[
    str | None, typer.Option("--filter", help="A STORE's own filter, such as Qdrant's in JSON: searched with it.")
]
Csv = Annotated[Path | None, typer.Option(help="Write one line a method as CSV.")]


@command
def evaluate(
    queries: MeasuredQueries,
    store: InStore = None,
    targets: Gallery = None,
    truth: TrueTargets = None,
    query_bank: ExampleQueries = None,
    target_bank: TargetBank = None,
    method: Methods = None,
    k: CutOff = 10,
    names: Names = None,
    query_names: QueryNames = None,
    thumbnails: Thumbnails = None,
    temperature: Temperatures = None,
    metric: MetricName = "cosine",
    seed: Seed = 0,
    condition: Condition = None,
    report: ReportFile = None,
    csv: Csv = None,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> Answer:
    """Queries whose true targets are known: a corrected store beside its raw search, or every method side by side."""
    for_files = {
        "--targets": targets, "--query-bank": query_bank, "--target-bank": target_bank, "--method": method,
        "--thumbnails": thumbnails, "--temperature": temperature, "--csv": csv,
    }  # fmt: skip
    if store is not None:
        for option in (name for name, given in for_files.items() if given):
            raise InputError(f"{option} is for files; a STORE is searched as it is")
        known = {"k": k, "condition": condition, "query_names": query_names, "seed": seed}
        return _in_store(store, queries, truth, names, report, known)
    if targets is None:
        raise InputError("expected a STORE, to search it as it is, or --targets, to try methods on files")
    if condition is not None:
        raise InputError("--filter is for a STORE; files are searched whole")
    require_files(read=(truth, names, query_names, thumbnails), written=(csv, report))
    labels = {"k": k, "names": names, "query_names": query_names, "thumbnails": thumbnails, "temperatures": temperature}
    given = {"metric": metric, "device": device, "memory": memory, "seed": seed, **labels}
    return _on_files((queries, targets, query_bank, target_bank), truth, method, csv, report, given)


def _on_files(
    files: Sequence[str | None],
    truth: str | None,
    methods: list[str] | None,
    csv: Path | None,
    report: Path | None,
    given: dict[str, Any],
) -> Answer:
    """Every method side by side. files: of queries, targets, query bank and target bank."""
    kinds = ("queries", "targets", "query bank", "target bank")
    asked, gallery, bank, second = (vectors(*each) for each in zip(files, kinds, strict=True))
    auto = "auto" in (methods or [])
    if auto and bank is None:
        raise InputError("method 'auto' chooses on example queries: pass ", Parameter("query_bank"))

    from hubplugin.evaluation.evaluate import evaluate
    from hubplugin.fitting import fit

    with progress_shown() as progress:
        computing = {name: given[name] for name in ("metric", "device", "memory")} | {"progress": progress}
        models = {"auto": fit(bank, "auto", gallery, second, **computing)} if auto else {}
        named = [name for name in methods if name not in models] if methods else None
        found = evaluate(asked, gallery, truth, bank, second, named, models, progress=progress, **given)
    if csv is not None:
        found.to_csv(csv)
    if report is not None:
        found.to_html(report, typed())
    return Answer(found, found.model_dump(mode="json"))


def _in_store(
    store: str, queries: str, truth: str | None, names: str | None, report: Path | None, given: dict[str, Any]
) -> Answer:
    """A store beside its raw search."""
    if truth is None:
        raise InputError("a STORE needs --truth: for each query the id of its true target")
    asked = vectors(queries, "queries")
    require_files(read=(truth, given["query_names"]), written=(report,))
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    opened = open_store(store)
    called = naming(names, opened, "--names")
    from hubplugin.evaluation.in_store import evaluate_store

    with progress_shown() as progress:
        found = evaluate_store(opened, asked, truth, names=called, progress=progress, **given)
    if report is not None:
        from hubplugin.evaluation.store_reports import page_of_evaluation

        write_report(page_of_evaluation(found), report)
    return Answer(str(found), found.model_dump(mode="json"))


@command
def demo(
    folder: Annotated[Path, typer.Option(help="Where the index and the collection are built.")] = Path(".demo"),
) -> Answer:
    """Correct an index and a shard of the data that comes with hubplugin, and show the gain."""
    from hubplugin.cli.demo import run

    run(folder)
    return Answer("")
