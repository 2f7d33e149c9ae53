"""The command that looks after recorded queries: bank."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from hubplugin.cli.frame import Answer, command
from hubplugin.cli.options import StoreUrl, require_files
from hubplugin.errors import InputError, Parameter
from hubplugin.recording import Recorded, clear, thin
from hubplugin.store import Store


@command
def bank(
    store: StoreUrl,
    export: Annotated[Path | None, typer.Option(metavar="FILE.npy", help="Write the recorded queries there.")] = None,
    keep: Annotated[
        int | None, typer.Option("--thin", metavar="N", min=1, help="Keep N of them, drawn at random.")
    ] = None,
    delete: Annotated[bool, typer.Option("--clear", help="Delete them.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what --thin or --clear would do, and do nothing.")
    ] = False,
) -> Answer:
    """Show, export, thin or clear the queries that are recorded of the store."""
    import numpy as np

    from hubplugin.registry import open_store

    if export is not None and export.suffix != ".npy":
        raise InputError("a bank is written as .npy; given: ", Parameter("export", str(export)))
    require_files([], [export])
    if delete and keep is not None:
        raise InputError("--thin keeps some of the queries and --clear none; give one of them")
    opened = open_store(store)
    if opened.record is None:
        raise InputError(f"{opened.url}: nobody has said where its queries are recorded; {opened.how_to_record()}")
    found = opened.recorded()
    if export is not None:
        if found is None:
            raise InputError(_nothing(opened))
        np.save(export, found.array())
    changes = found is not None and (delete or keep is not None)
    left = found if dry_run else _changed(opened, keep, delete)
    lines = [_nothing(opened) if found is None else f"{opened.url}: {_summary(found)}, in {opened.record}"]
    if export is not None:
        lines.append(f"written to {export}")
    if found is not None and changes:
        planned = 0 if delete else min(found.rows, keep or 0)
        rows = 0 if left is None else left.rows
        lines.append(f"nothing was changed; would keep {planned}" if dry_run else f"kept: {rows}")
    figures = {
        "store": opened.url,
        "folder": str(opened.record),
        "written": changes and not dry_run,
        **_figures(left),
    }
    return Answer("\n".join(lines), figures)


def _changed(store: Store, keep: int | None, delete: bool) -> Recorded | None:
    """What is recorded of `store` once it is thinned or cleared, if it shall be."""
    if delete and store.record is not None:
        clear(store.record)
    elif keep is not None and store.record is not None:
        thin(store.record, keep)
    return store.recorded()


def _nothing(store: Store) -> str:
    return f"{store.url}: no queries are recorded in {store.record}; to collect some: {store.how_to_record()}"


def _summary(found: Recorded) -> str:
    texts = "" if found.texts is None else ", with texts"
    about = "" if found.different == found.rows else "about "
    return (
        f"{found.rows:,} queries of {found.dim} dimensions{texts}, of {found.seen:,} that were asked from "
        f"{_moment(found.first)} to {_moment(found.last)}, {about}{found.different:,} of them different"
    )


def _figures(found: Recorded | None) -> dict[str, object]:
    if found is None:
        return {"queries": 0}
    return {
        "queries": found.rows,
        "dim": found.dim,
        "seen": found.seen,
        "different": found.different,
        "first": _moment(found.first),
        "last": _moment(found.last),
        "texts": found.texts is not None,
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
