"""Commands on queries whose answers are known: evaluate, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hubplugin.cli.frame import Answer, command, progress_shown
from hubplugin.cli.options import Device, Memory, TargetBank, require_files, vectors
from hubplugin.errors import InputError, Parameter

TrueTargets = Annotated[
    str | None,
    typer.Option(help="Target rows of each query (.npy, .json) or qrels (TREC, BEIR); without it, row i to row i."),
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


@command
def evaluate(
    queries: Annotated[str, typer.Option(help="Queries whose true targets are known: a file, as for a bank.")],
    targets: Annotated[str, typer.Option(help="The gallery: a file, as for a bank.")],
    truth: TrueTargets = None,
    query_bank: ExampleQueries = None,
    target_bank: TargetBank = None,
    method: Methods = None,
    k: Annotated[int, typer.Option(help="Cut-off k for hubness, mAP and nDCG.")] = 10,
    names: Annotated[str | None, typer.Option(help="What the targets are called: a text file, one a line.")] = None,
    query_names: Annotated[str | None, typer.Option(help="What a qrels file calls the queries: likewise.")] = None,
    thumbnails: Thumbnails = None,
    temperature: Temperatures = None,
    metric: Annotated[str, typer.Option(help="cosine, dot or euclidean.")] = "cosine",
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write a report: one HTML file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write one line a method as CSV.")] = None,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> Answer:
    """Every method side by side on queries whose true targets are known, with confidence intervals."""
    asked, gallery = vectors(queries, "queries"), vectors(targets, "targets")
    bank, second = vectors(query_bank, "query bank"), vectors(target_bank, "target bank")
    auto = "auto" in (method or [])
    if auto and query_bank is None:
        raise InputError("method 'auto' chooses on example queries: pass ", Parameter("query_bank"))
    require_files(read=(truth, names, query_names, thumbnails), written=(csv, report))

    from hubplugin.evaluation.evaluate import evaluate
    from hubplugin.fitting import fit

    with progress_shown() as progress:
        computing: dict[str, Any] = {"metric": metric, "device": device, "memory": memory, "progress": progress}
        models = {"auto": fit(bank, "auto", gallery, second, **computing)} if auto else {}
        found = evaluate(
            asked, gallery, truth, bank, second,
            [name for name in method if name not in models] if method else None, models, k,
            names, query_names, thumbnails, temperature, seed=seed, **computing,
        )  # fmt: skip
    for path, write in ((csv, found.to_csv), (report, found.to_html)):
        if path is not None:
            write(path)
    return Answer(found, found.model_dump(mode="json"))


@command
def demo(
    folder: Annotated[Path, typer.Option(help="Where the index and the collection are built.")] = Path(".demo"),
) -> Answer:
    """Correct an index and a shard of the data that comes with hubplugin, and show the gain."""
    from hubplugin.cli.demo import run

    run(folder)
    return Answer("")
