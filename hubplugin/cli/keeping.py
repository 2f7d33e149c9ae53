"""Commands that look after a correction: versions, rollback."""

from __future__ import annotations

from typing import Annotated

import typer

from hubplugin.cli.figures import of_rollback, of_version
from hubplugin.cli.frame import Answer, command, progress_shown
from hubplugin.cli.options import StoreUrl


@command
def versions(
    store: StoreUrl,
    keep: Annotated[
        int | None, typer.Option(min=0, help="Delete the kept versions but for so many that were active last.")
    ] = None,
) -> Answer:
    """List the versions of a store's correction: number, state, date, method, query bank."""
    from hubplugin.registry import open_store

    opened = open_store(store)
    if keep is not None:
        with progress_shown() as progress:
            opened.prune(keep, progress)
    found = list(opened.versions())
    text = "\n".join(map(str, found)) if found else "no correction"
    return Answer(f"{opened.url}\n{text}", {"store": opened.url, "versions": [of_version(each) for each in found]})


@command
def rollback(
    store: StoreUrl,
    to: Annotated[
        int | None, typer.Option(help="The number of a kept version; by default the newest before the active one.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would return to, and change nothing.")
    ] = False,
) -> Answer:
    """Return to a version that was kept, in one step."""
    from hubplugin.registry import open_store

    opened = open_store(store)

    from hubplugin.jobs.versions import rollback

    done = rollback(opened, to, dry_run=dry_run)
    return Answer(f"{opened.url}: {done}", {"store": opened.url, **of_rollback(done)})
