"""Commands that look after a correction: versions, rollback, refit, monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hubplugin.cli.figures import of_monitored, of_refit, of_rollback, of_version
from hubplugin.cli.frame import Answer, command, progress_shown
from hubplugin.cli.options import (
    Device,
    Keep,
    Memory,
    Paired,
    SameKind,
    Settings,
    StoreUrl,
    TargetBank,
    parameters_of,
    require_files,
    vectors,
)
from hubplugin.cli.queries import Clicks, Embed, Field, GivenQueries, Queries
from hubplugin.errors import InputError
from hubplugin.store import KEEP


@command
def versions(
    store: StoreUrl,
    keep: Annotated[
        int | None, typer.Option(min=0, help="Delete the kept versions but for so many that were active last.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many --keep would delete, and delete none.")
    ] = False,
) -> Answer:
    """List the versions of a store's correction: number, state, date, method, query bank."""
    from hubplugin.registry import open_store

    opened = open_store(store)
    found = list(opened.versions())
    kept = sum(version.state == "kept" for version in found)
    gone = 0 if keep is None else max(kept - keep, 0)
    if keep is not None and not dry_run:
        with progress_shown() as progress:
            opened.prune(keep, progress)
        found = list(opened.versions())
    lines = [opened.url, *(map(str, found) if found else ["no correction"])]
    if keep is not None and dry_run:
        lines.append(f"nothing was deleted; would delete {gone} of {kept} kept, those that were left longest ago")
    written = gone > 0 and not dry_run
    figures = {"store": opened.url, "written": written, "deleted": gone, "versions": [*map(of_version, found)]}
    return Answer("\n".join(lines), figures)


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
    return Answer(f"{opened.url}: {done}", of_rollback(opened.url, done))


@command
def refit(
    store: StoreUrl,
    queries: Queries = None,
    embed: Embed = None,
    field: Field = None,
    target_bank: TargetBank = None,
    method: Annotated[
        str | None, typer.Option(help="As for apply; by default that of the active correction, auto chooses.")
    ] = None,
    settings: Settings = None,
    pairs: Paired = None,
    clicks: Clicks = None,
    same_kind: SameKind = False,
    force: Annotated[bool, typer.Option("--force", help="Activate it even if it is worse.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Fit and compare, and write nothing.")] = False,
    keep: Keep = KEEP,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> Answer:
    """Fit the correction anew on newer queries; activate it if it is not worse than the old one."""
    from hubplugin.registry import open_store

    if settings and method is None:
        raise InputError("--set is for a method that is named; add --method")
    given, second = GivenQueries.of(queries, embed, field, clicks), vectors(target_bank, "target bank")
    opened = open_store(store)

    from hubplugin.jobs.refitting import refit

    parameters = {} if method is None else parameters_of(method, settings)
    with progress_shown() as progress:
        bank = given.bank(opened, progress)
        done = refit(
            opened, bank, method, second,
            pairs=given.pairs(bank, pairs, target_bank), same_kind=same_kind, force=force, dry_run=dry_run, keep=keep,
            device=device, memory=memory, progress=progress, **parameters,
        )  # fmt: skip
    return Answer(f"{opened.url}: {done}", of_refit(opened.url, done))


@command
def monitor(
    store: StoreUrl,
    queries: Queries = None,
    embed: Embed = None,
    field: Field = None,
    clicks: Clicks = None,
    prometheus: Annotated[
        Path | None, typer.Option(help="Write the figures to this file, as Prometheus text.", metavar="FILE")
    ] = None,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> Answer:
    """Is the correction whole, and does it still help live queries? By default those recorded since it was made.

    Looks at samples. The exit status is 4 if something needs attention.
    """
    from hubplugin.registry import open_store

    require_files([], [prometheus])
    if clicks is not None and queries is None:
        raise InputError("--clicks belong to queries; add --queries")
    given = GivenQueries.of(queries, embed, field, clicks)
    opened = open_store(store)

    from hubplugin.jobs.monitoring import monitor

    with progress_shown() as progress:
        live = None if queries is None else given.bank(opened, progress)
        known = None if live is None else given.pairs(live, None, None)
        seen = monitor(opened, live, known, device=device, memory=memory, progress=progress)
    if prometheus is not None:
        from hubplugin.cli.prometheus import write

        write(prometheus, seen)
    return Answer(str(seen), of_monitored(seen), bool(seen.attention))
