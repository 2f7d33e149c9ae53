"""Commands on a correction's surroundings: explain a search, show the recorded bank."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hubplugin.bank import find_missing
from hubplugin.cli.application import command, require_writable
from hubplugin.cli.options import StoreUrl
from hubplugin.errors import InputError, Parameter
from hubplugin.recording import Recorded, Recorder, as_id, read
from hubplugin.registry import open_store
from hubplugin.results import Page, Result, Section, write_file
from hubplugin.store import Store
from hubplugin.vectors import as_vectors


@dataclass(frozen=True, repr=False)
class Explained(Result):
    """The request with which other clients get the corrected ranking.

    text: The request, ready to paste.
    request: The same request as JSON, in the form of the store: method, path and body
        for a server.
    """

    text: str
    request: dict[str, Any]
    store: None = None

    def as_text(self, *_: Any) -> str:
        return self.text


@command
def explain(
    store: StoreUrl,
    vector: Annotated[
        str | None,
        typer.Option(
            help="A file whose first vector is the query. The default is the first target."
        ),
    ] = None,
) -> Result:
    """Print the request with which other clients get the corrected ranking from Qdrant or PostgreSQL."""
    queries = None if vector is None else as_vectors(vector, "query")
    opened = open_store(store)
    explain = getattr(opened, "explain", None)
    if explain is None:
        raise InputError(f"{opened.url}: only Qdrant and PostgreSQL explain a search")
    if queries is not None:
        query = next(iter(queries.blocks(1)))[0]
    else:
        batch = next(iter(opened.scan()), None)
        if batch is None:
            raise InputError(f"{opened.url} is empty; pass a query with --vector")
        query = batch.vectors[0]
    if len(query) != opened.dim:
        raise InputError(
            f"--vector has {len(query)} dimensions, {opened.url} has {opened.dim}"
        )
    explanation = explain(query)
    return Explained(explanation.text, dict(explanation.request))


@dataclass(frozen=True, repr=False)
class RecordedBank(Result):
    """The queries and clicks recorded so far.

    queries: The number of recorded queries.
    dim: The number of dimensions of these queries.
    seen: The total number of queries that were asked.
    first, last: The times of the first and the last query.
    clicks: The number of clicks on targets of the store.
    pairs: The number of different pairs of query and target in these clicks.
    unknown: The number of clicks on targets that are not in the store; 0 if only a
        folder is read.
    how_to_record: Instructions for recording queries.
    forgotten: The number of queries that this command deleted.
    """

    store: str
    folder: str
    how_to_record: str
    forgotten: int = 0
    queries: int = 0
    dim: int | None = None
    seen: int | None = None
    first: str | None = None
    last: str | None = None
    clicks: int = 0
    pairs: int = 0
    unknown: int = 0

    def page(self) -> Page:
        if not self.queries:
            headline = f"no queries are recorded in {self.folder}"
            return Page(f"{headline}; to collect some: {self.how_to_record}")
        lines = [
            f"{self.clicks:,} clicks on {self.pairs:,} different pairs of query and target",
            f"in {self.folder}",
        ]
        if self.unknown:
            lines.append(
                f"{self.unknown:,} more clicks are on targets that are not in the store"
            )
        if self.forgotten:
            lines.append(f"{self.forgotten:,} forgotten, with their clicks")
        headline = f"{self.queries:,} queries of {self.dim} dimensions"
        asked = f"of {self.seen:,} that were asked from {self.first} to {self.last}"
        section = Section("Recorded", lines)
        return Page(f"{headline}, {asked}", sections=[section])


@command
def bank(
    place: Annotated[
        str,
        typer.Argument(
            metavar="STORE|FOLDER",
            help="A store whose queries are recorded, or the folder that contains the record.",
        ),
    ],
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npy", help="Write the recorded queries to this file."
        ),
    ] = None,
    forget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID",
            help="Delete this query and its clicks. A correction keeps the query's vector until a refit.",
        ),
    ] = None,
) -> Result:
    """Show, export or forget the recorded queries and clicks of a store."""
    if export is not None and export.suffix != ".npy":
        raise InputError(
            "--export writes a bank as .npy; given: ", Parameter("export", str(export))
        )
    require_writable(export)
    ids = forget or []
    for query in ids:
        as_id(query)  # raises for an invalid id
    store: Store | None = None
    folder: Path | None
    if os.path.isdir(place):
        name = place
        dim = None
        folder = Path(place)
        how_to_record = Store.how_to_record
    else:
        store = open_store(place)
        name = store.url
        dim = store.dim
        folder = store.record
        how_to_record = store.how_to_record
    if folder is None:
        raise InputError(f"{name}: its queries are not recorded; {how_to_record}")
    forgotten = 0
    if ids and folder.is_dir():
        forgotten = Recorder(folder).forget(ids)
    recorded = read(folder, dim)
    result = RecordedBank(
        name,
        str(folder),
        how_to_record,
        forgotten,
        **_count_recorded(recorded, store),
    )
    if export is not None:
        if recorded is None:
            raise InputError(f"{name}: {result.page().headline}")
        content = io.BytesIO()
        np.save(content, recorded.array())
        write_file(export, content.getvalue())
    return result


def _count_recorded(recorded: Recorded | None, store: Store | None) -> dict[str, Any]:
    """Return the fields of `RecordedBank` that count queries and clicks.

    Return no fields if nothing is recorded. Clicks on targets that `store` lacks count
    as unknown.
    """
    if recorded is None:
        return {}
    clicked = {target for counts in recorded.clicks for target in counts}
    missing = set[int | str]()
    if store is not None and clicked:
        missing = find_missing(store, clicked)
    clicks = pairs = unknown = 0
    for counts in recorded.clicks:
        for target, times in counts.items():
            if target in missing:
                unknown += times
            else:
                clicks += times
                pairs += 1
    return {
        "queries": recorded.rows,
        "dim": recorded.dim,
        "seen": recorded.seen,
        "first": _moment(recorded.first),
        "last": _moment(recorded.last),
        "clicks": clicks,
        "pairs": pairs,
        "unknown": unknown,
    }


def _moment(seconds: float) -> str:
    """Return a time in seconds since 1970 as ISO 8601, in UTC."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
