"""Commands that change a store: apply, refresh, remove."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hubplugin.cli.figures import of_applied, of_version
from hubplugin.cli.frame import Answer, command, progress_shown
from hubplugin.cli.options import (
    Dask,
    Device,
    Keep,
    Memory,
    Paired,
    ReportFile,
    SameKind,
    Settings,
    Shards,
    StoreUrl,
    TargetBank,
    TargetNames,
    Workspace,
    parameters_of,
    require_files,
    vectors,
    workers,
    write_report,
)
from hubplugin.cli.queries import Clicks, Embed, Field, GivenQueries, Queries
from hubplugin.store import KEEP

if TYPE_CHECKING:
    from pathlib import Path

    from hubplugin.jobs.naming import Naming
    from hubplugin.jobs.writing import Applied
    from hubplugin.store import Store


GroupBy = Annotated[
    str | None, typer.Option(help="A payload key that searches are filtered by: fit within each of its values.")
]

Robust = Annotated[
    bool, typer.Option("--robust", help="Bound the reach of what arrives later, against planted vectors.")
]


@command
def apply(
    store: StoreUrl,
    queries: Queries = None,
    embed: Embed = None,
    field: Field = None,
    target_bank: TargetBank = None,
    method: Annotated[str, typer.Option(help="blend, is, sn, dbsn, dualis, nnn, csls, dn or auto.")] = "blend",
    settings: Settings = None,
    pairs: Paired = None,
    clicks: Clicks = None,
    same_kind: SameKind = False,
    group_by: GroupBy = None,
    robust: Robust = False,
    force: Annotated[bool, typer.Option("--force", help="Apply it even if it would not help.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Fit and check, and write nothing.")] = False,
    keep: Keep = KEEP,
    names: TargetNames = None,
    report: ReportFile = None,
    executor: Dask = None,
    shards: Shards = None,
    workspace: Workspace = None,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> Answer:
    """Fit, check, write, activate; resumes where it was cut off."""
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    require_files(read=(), written=(report,))
    given, second = GivenQueries.of(queries, embed, field, clicks), vectors(target_bank, "target bank")
    opened = open_store(store)
    called = naming(names, opened, "--names")

    from hubplugin.jobs.correction import apply

    parameters = parameters_of(method, settings)
    with workers(executor) as engine, progress_shown() as progress:
        bank = given.bank(opened, progress)
        applied = apply(
            opened, bank, method, second,
            pairs=given.pairs(bank, pairs, target_bank), same_kind=same_kind, group_by=group_by, robust=robust,
            force=force, dry_run=dry_run, keep=keep, device=device, memory=memory, progress=progress, embed=None,
            executor=engine, shards=shards, workspace=workspace, **parameters,
        )  # fmt: skip
    _report(applied, opened, called, report)
    return Answer(f"{opened.url}: {applied}", of_applied(opened.url, applied))


def _report(applied: Applied, store: Store, names: Naming | None, path: Path | None) -> None:
    """What was applied, and the store as it is then, to the file `path` where one was asked for."""
    if path is None:
        return
    from hubplugin.evaluation.store_reports import page_of_applied
    from hubplugin.jobs.inspection import inspect

    with progress_shown() as progress:
        found = inspect(store, progress=progress) if applied.written else None
    write_report(page_of_applied(applied, found, store.url, names), path)


@command
def refresh(
    store: StoreUrl,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count what is missing or stale, and write nothing.")
    ] = False,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> Answer:
    """Write only the offsets that are missing or outdated."""
    from hubplugin.registry import open_store

    opened = open_store(store)

    from hubplugin.jobs.writing import refresh

    with progress_shown() as progress:
        applied = refresh(opened, dry_run=dry_run, device=device, memory=memory, progress=progress)
    return Answer(f"{opened.url}: {applied}", of_applied(opened.url, applied))


@command
def remove(
    store: StoreUrl,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take out, and change nothing.")] = False,
) -> Answer:
    """Take the correction out; the store is as if it had never been there."""
    from hubplugin.registry import open_store

    opened = open_store(store)
    found = list(opened.versions())
    figures = {"store": opened.url, "written": bool(found) and not dry_run, "versions": [*map(of_version, found)]}
    if dry_run:
        lines = [f"{opened.url}: nothing was changed; would take out", *map(str, found)]
        return Answer("\n".join(lines) if found else f"{opened.url}: there is no correction", figures)
    with progress_shown() as progress:
        opened.remove(progress)
    return Answer(f"{opened.url}: {'correction removed' if found else 'there was no correction'}", figures)
