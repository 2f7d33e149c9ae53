"""Commands that manage what lies beside a correction: explain, bank."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hubplugin.cli.application import command, say
from hubplugin.cli.options import DryRun, StoreUrl, require_writable
from hubplugin.errors import InputError, Parameter, telling
from hubplugin.recording import Recorded, Recorder, as_id, read
from hubplugin.registry import open_store
from hubplugin.report import Report, Result, write_file
from hubplugin.store import Store
from hubplugin.vectors import as_vectors


@dataclass(frozen=True)
class Explained(Result):
    """What other clients send for the corrected ranking: `text` to paste, and the `request` as JSON. Its form is the
    store's: method, path and body where there is a server."""

    text: str
    request: dict[str, Any]
    store: None = None

    def report(self) -> Report:
        return Report("The request of other clients", sentences=[self.text])


@command
def explain(
    store: StoreUrl,
    vector: Annotated[
        str | None, typer.Option(help="A file with the query, the first vector in it.")
    ] = None,
    id: Annotated[
        str | None,
        typer.Option(
            help="The query is this target. Without either it is the first one."
        ),
    ] = None,
    k: Annotated[
        int, typer.Option(min=1, help="How many results the request asks for.")
    ] = 10,
) -> Result:
    """Print the request that other clients send for the corrected ranking, with its constants filled in."""
    if vector is not None and id is not None:
        raise InputError("--vector and --id both name the query; give one of them")
    queries = None if vector is None else as_vectors(vector, "query")
    opened = open_store(store)
    query: Any
    if queries is not None:
        if queries.dim != opened.dim:
            raise InputError(
                f"--vector has {queries.dim} dimensions, {opened.url} has {opened.dim}"
            )
        query = next(iter(queries.blocks(1)))[0]
    elif id is not None:
        query = int(id) if id.isdigit() else id
    else:
        batch = next(iter(opened.scan()), None)
        if batch is None:
            raise InputError(f"{opened.url} is empty; name a query by --vector")
        query = batch.vectors[0]
    explanation = opened.explain(query, k)
    return Explained(explanation.text, dict(explanation.request))


@dataclass(frozen=True)
class RecordedBank(Result):
    """What is recorded now. queries: how many. dim: their dimensions. seen: how many were asked. different: about how
    many of these differ. first, last: when the first and the last was asked. texts: whether their texts are kept.
    clicks: how often targets were clicked for them. pairs: how many different pairs of query and target these are.
    targets: how many were clicked. how_to_record: how to collect some. written: whether any went. notes: what was done.
    """

    store: str
    folder: str
    how_to_record: str
    written: bool
    notes: list[str]
    queries: int = 0
    dim: int | None = None
    seen: int | None = None
    different: int | None = None
    first: str | None = None
    last: str | None = None
    texts: bool | None = None
    clicks: int = 0
    pairs: int = 0
    targets: int = 0

    def report(self) -> Report:
        return Report("Recorded queries", sentences=[self._summary(), *self.notes])

    def _summary(self) -> str:
        if not self.queries:
            return f"no queries are recorded in {self.folder}; to collect some: {self.how_to_record}"
        about = "" if self.different == self.queries else "about "
        clicks = (
            f"; {self.clicks:,} clicks on {self.pairs:,} different pairs of query and "
            f"target, {self.targets:,} targets"
        )
        return (
            f"{self.queries:,} queries of {self.dim} dimensions{', with texts' if self.texts else ''}, of "
            f"{self.seen:,} that were asked from {self.first} to {self.last}, {about}{self.different:,} of them "
            f"different{clicks if self.clicks else ''}, in {self.folder}"
        )


@command
def bank(
    place: Annotated[
        str,
        typer.Argument(
            metavar="STORE|FOLDER",
            help="A store whose queries are recorded, or the folder of a record.",
        ),
    ],
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npy", help="Write the recorded queries there."),
    ] = None,
    forget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Delete this query and its clicks; a correction keeps it until a refit.",
        ),
    ] = None,
    dry_run: DryRun = False,
) -> Result:
    """Show, export or forget the queries and clicks that are recorded of a store."""
    if export is not None and export.suffix != ".npy":
        raise InputError(
            "a bank is written as .npy; given: ", Parameter("export", str(export))
        )
    require_writable(export)
    forgotten = {as_id(query) for query in forget or []}
    name = place
    dim = None
    folder: Path | None = Path(place)
    how = Store.how_to_record
    if not os.path.isdir(place):
        store = open_store(place)
        name = store.url
        dim = store.dim
        folder = store.record
        how = store.how_to_record
    if folder is None:
        raise InputError(
            f"{name}: nobody has said where its queries are recorded; {how}"
        )
    recorded = read(folder, dim)
    notes = list[str]()
    if export is not None:
        if recorded is None:
            raise InputError(f"no queries are recorded in {folder}; {how}")
        content = io.BytesIO()
        np.save(content, recorded.array())
        write_file(export, content.getvalue())
        notes.append(f"written to {export}")
    written = bool(forgotten) and not dry_run
    if written:
        with telling(
            f"{folder}: queries were being deleted; the same command finishes"
        ):
            count = Recorder(folder).forget(forgotten)
        say(f"{count} recorded queries forgotten, with their clicks")
        recorded = read(folder, dim)
        notes.append(f"kept: {0 if recorded is None else recorded.rows}")
    elif forgotten:
        ids = [] if recorded is None else recorded.ids
        kept = len(set(ids) - forgotten)
        notes.append(f"nothing was changed; would keep {kept}")
    return RecordedBank(name, str(folder), how, written, notes, **_figures(recorded))


def _figures(recorded: Recorded | None) -> dict[str, Any]:
    if recorded is None:
        return {}
    return {
        "queries": recorded.rows,
        "dim": recorded.dim,
        "seen": recorded.seen,
        "different": recorded.different,
        "first": _moment(recorded.first),
        "last": _moment(recorded.last),
        "texts": recorded.texts is not None,
        "clicks": sum(sum(counts.values()) for counts in recorded.clicks),
        "pairs": sum(map(len, recorded.clicks)),
        "targets": len({target for counts in recorded.clicks for target in counts}),
    }


def _moment(seconds: float) -> str:
    return (
        datetime.fromtimestamp(seconds, timezone.utc)
        .isoformat(timespec="seconds")
        .replace("+00:00", "Z")
    )
