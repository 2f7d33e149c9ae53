"""Commands that manage what lies beside a correction: explain, bank."""

from __future__ import annotations

import io
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from hubplugin.abilities import Explaining, able
from hubplugin.cli.application import Answer, command, say
from hubplugin.cli.options import StoreUrl, require_files, told, vectors
from hubplugin.errors import InputError, Parameter, telling
from hubplugin.recording import Recorded, Recorder, as_id, clear, thin
from hubplugin.store import Store, recorded_of


@command
def explain(
    store: StoreUrl,
    vector: Annotated[str | None, typer.Option(help="A file with the query, the first vector in it.")] = None,
    id: Annotated[
        str | None, typer.Option(help="The query is this target. Without either it is the first one.")
    ] = None,
    k: Annotated[int, typer.Option(min=1, help="How many results the request asks for.")] = 10,
) -> Answer:
    """Print the request that other clients send for the corrected ranking, with its constants filled in."""
    from hubplugin.registry import open_store

    if vector is not None and id is not None:
        raise InputError("--vector and --id both name the query; give one of them")
    queries = None if vector is None else vectors(vector, "query")
    opened = open_store(store)
    if queries is not None:
        if queries.dim != opened.dim:
            raise InputError(f"--vector has {queries.dim} dimensions, {opened.url} has {opened.dim}")
        query = next(iter(queries.blocks(1)))[0]
    elif id is not None:
        query = int(id) if id.isdigit() else id
    else:
        batch = next(iter(opened.scan()), None)
        if batch is None:
            raise InputError(f"{opened.url} is empty; name a query by --vector")
        query = batch.vectors[0]
    explanation = able(opened, Explaining).explain(query, k)
    return Answer(explanation.text, explanation.request)


@command
def bank(
    store: StoreUrl,
    export: Annotated[Path | None, typer.Option(metavar="FILE.npy", help="Write the recorded queries there.")] = None,
    keep: Annotated[
        int | None, typer.Option("--thin", metavar="N", min=1, help="Keep N of them, drawn at random.")
    ] = None,
    delete: Annotated[bool, typer.Option("--clear", help="Delete them.")] = False,
    forget: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Delete this query and its clicks; a correction keeps it until a refit."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what --thin, --clear or --forget would do, and do nothing.")
    ] = False,
) -> Answer:
    """Show, export, thin, clear or forget the queries and clicks that are recorded of the store."""
    import numpy as np

    from hubplugin.registry import open_store
    from hubplugin.report.render import write_file

    if export is not None and export.suffix != ".npy":
        raise InputError("a bank is written as .npy; given: ", Parameter("export", str(export)))
    require_files([], [export])
    if delete and keep is not None:
        raise InputError("--thin keeps some of the queries and --clear none; give one of them")
    if forget and (delete or keep is not None):
        raise InputError("--forget takes out the queries that are named; --thin and --clear go without it")
    for each in forget or []:
        as_id(each)  # which says what is no id, before a dry run says what it would do
    opened = open_store(store)
    if opened.record is None:
        raise InputError(f"{opened.url}: nobody has said where its queries are recorded; {opened.how_to_record}")
    recorded = recorded_of(opened)
    if export is not None:
        if recorded is None:
            raise InputError(_nothing(opened))
        content = io.BytesIO()
        np.save(content, recorded.array())
        write_file(export, content.getvalue())
    # Clicks may be there without their queries, and queries of a model of other dimensions.
    changes = opened.record.is_dir() and (delete or keep is not None or bool(forget))
    with telling(f"{opened.record}: queries were being deleted; the same command finishes"):
        left = _changed(opened, keep, delete, forget or []) if changes and not dry_run else recorded
    lines = [_nothing(opened) if recorded is None else f"{opened.url}: {_summary(recorded)}, in {opened.record}"]
    if export is not None:
        lines.append(f"written to {export}")
    if changes:
        ids = [] if recorded is None or delete else recorded.ids
        planned = len(set(ids) - set(forget or [])) if keep is None else min(len(ids), keep)
        rows = 0 if left is None else left.rows
        lines.append(f"nothing was changed; would keep {planned}" if dry_run else f"kept: {rows}")
    from hubplugin.cli.json_types import RecordedBank

    figures = RecordedBank(folder=str(opened.record), written=changes and not dry_run)
    if left is not None:
        figures = figures.model_copy(update=_figures(left))
    return Answer("\n".join(lines), told(opened, figures))


def _changed(store: Store, keep: int | None, delete: bool, ids: list[str]) -> Recorded | None:
    """What is recorded of `store` once it is thinned or cleared, or the queries `ids` are forgotten."""
    assert store.record is not None
    if ids:
        say(f"{Recorder(store.record).forget(ids)} recorded queries forgotten, with their clicks")
    if delete:
        clear(store.record)
    elif keep is not None:
        thin(store.record, keep)
    return recorded_of(store)


def _nothing(store: Store) -> str:
    return f"{store.url}: no queries are recorded in {store.record}; to collect some: {store.how_to_record}"


def _summary(recorded: Recorded) -> str:
    texts = "" if recorded.texts is None else ", with texts"
    about = "" if recorded.different == recorded.rows else "about "
    clicks, pairs, targets = _clicked(recorded)
    on = f"; {clicks:,} clicks on {pairs:,} different pairs of query and target, {targets:,} targets" if clicks else ""
    return (
        f"{recorded.rows:,} queries of {recorded.dim} dimensions{texts}, of {recorded.seen:,} that were asked from "
        f"{_moment(recorded.first)} to {_moment(recorded.last)}, {about}{recorded.different:,} of them different{on}"
    )


def _clicked(recorded: Recorded) -> tuple[int, int, int]:
    """How many clicks, different pairs of query and target, and targets."""
    targets = {target for counts in recorded.clicks for target in counts}
    return sum(sum(counts.values()) for counts in recorded.clicks), sum(map(len, recorded.clicks)), len(targets)


def _figures(recorded: Recorded) -> dict[str, object]:
    clicks, pairs, targets = _clicked(recorded)
    return {
        "queries": recorded.rows,
        "dim": recorded.dim,
        "seen": recorded.seen,
        "different": recorded.different,
        "first": _moment(recorded.first),
        "last": _moment(recorded.last),
        "texts": recorded.texts is not None,
        "clicks": clicks,
        "pairs": pairs,
        "targets": targets,
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
