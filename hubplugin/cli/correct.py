"""Commands on the correction of a store: apply, refresh, remove, rollback, refit."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from hubplugin.cli.application import Answer, command, progress_shown
from hubplugin.cli.options import (
    BankOptions,
    ComputeOptions,
    ReportOptions,
    Settings,
    StoreUrl,
    answer,
    bank_of,
    parameters_of,
    require_files,
    told,
)
from hubplugin.compute import Compute
from hubplugin.errors import HubpluginError, InputError, telling

GroupBy = Annotated[
    str | None, typer.Option(help="A payload key that searches are filtered by: fit within each of its values.")
]


Learn = Annotated[bool, typer.Option("--learn", help="Known answers teach a map of the query, too (docs/learning.md).")]


@command
def apply(
    store: StoreUrl,
    *,
    banks: BankOptions,
    method: Annotated[str, typer.Option(help="blend, is, sn, dbsn, dualis, nnn, csls or dn.")] = "blend",
    settings: Settings = None,
    group_by: GroupBy = None,
    learn: Learn = False,
    force: Annotated[bool, typer.Option("--force", help="Apply it even if the guard refuses it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Fit and check, and write nothing.")] = False,
    shown: ReportOptions,
    computing: ComputeOptions,
) -> Answer:
    """Fit, check, write, activate; resumes where it was cut off."""
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    require_files(read=(), written=(shown.report,))
    bank, opened = bank_of(banks), open_store(store)
    called = naming(shown.names, "--names")

    from hubplugin.jobs.correct import apply

    parameters = parameters_of(method, settings)
    with progress_shown() as progress:
        applied = apply(
            opened, bank, method, group_by=group_by, learn=learn, judged=None,
            force=force, dry_run=dry_run, compute=computing.compute(progress), executor=None, shards=None,
            **parameters,
        )  # fmt: skip
    state = "the correction is active, and its report was being written" if applied.written else "nothing was changed"
    with telling(f"{opened.url}: {state}"):
        report = applied.report()
        if shown.report is not None and applied.written:
            from hubplugin.jobs.health import inspect

            with progress_shown() as progress:
                seen = inspect(opened, compute=Compute(progress=progress)).report(called)
            report = replace(report, tiles=report.tiles or seen.tiles, hubs=seen.hubs, plots=seen.plots)
        return replace(answer(report, applied, shown.report, opened), of=opened.url)


@command
def refresh(
    store: StoreUrl,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count what is missing or stale, and write nothing.")
    ] = False,
    *,
    computing: ComputeOptions,
) -> Answer:
    """Write only the offsets that are missing or outdated."""
    from hubplugin.registry import open_store

    opened = open_store(store)

    from hubplugin.jobs.write import refresh

    with progress_shown() as progress:
        applied = refresh(opened, dry_run=dry_run, compute=computing.compute(progress))
    return Answer(f"{opened.url}: {applied}", told(opened, applied))


@command
def remove(
    store: StoreUrl,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take out, and change nothing.")] = False,
) -> Answer:
    """Take the correction out; the store is as if it had never been there."""
    from hubplugin.jobs.write import remove
    from hubplugin.registry import open_store

    opened = open_store(store)
    found = previous = None
    line = "correction removed"
    try:
        found, previous = opened.correction(), opened.previous()
        if found is None:
            line = "there is no correction"
    except HubpluginError:  # a removal needs no model, and takes a damaged one out, too
        if dry_run:
            raise
    from hubplugin.cli.json_types import Removed

    seen = {"written": not dry_run, "correction": found, "previous": previous}
    figures = told(opened, Removed.model_validate(seen, from_attributes=True))
    if not dry_run:
        with progress_shown() as progress:
            remove(opened, compute=Compute(progress=progress))
    elif found is not None:
        line = f"nothing was changed; would take out {found.model}"
        line += "" if previous is None else f", and {previous}, which was active before"
    return Answer(f"{opened.url}: {line}", figures)


@command
def rollback(
    store: StoreUrl,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the offsets that would be written, and write nothing.")
    ] = False,
    *,
    computing: ComputeOptions,
) -> Answer:
    """Write the model that was active before; a second rollback returns."""
    from hubplugin.registry import open_store

    opened = open_store(store)

    from hubplugin.jobs.write import rollback

    with progress_shown() as progress:
        applied = rollback(opened, dry_run=dry_run, compute=computing.compute(progress))
    return Answer(f"{opened.url}: {applied}", told(opened, applied))


@command
def refit(
    store: StoreUrl,
    *,
    banks: BankOptions,
    method: Annotated[str | None, typer.Option(help="As for apply; by default that of the active correction.")] = None,
    settings: Settings = None,
    learn: Annotated[
        bool | None, typer.Option("--learn/--no-learn", help="As for apply; by default as in the active correction.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Activate it even if it is worse.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Fit and compare, and write nothing.")] = False,
    computing: ComputeOptions,
) -> Answer:
    """Fit the correction anew on newer queries; activate it if it is not worse than the old one."""
    from hubplugin.registry import open_store

    if settings and method is None:
        raise InputError("--set is for a method that is named; add --method")
    bank, opened = bank_of(banks), open_store(store)

    from hubplugin.jobs.correct import refit

    parameters = {} if method is None else parameters_of(method, settings)
    with progress_shown() as progress:
        done = refit(
            opened, bank, method, learn=learn, judged=None, force=force, dry_run=dry_run,
            compute=computing.compute(progress),
            **parameters,
        )  # fmt: skip
    return replace(answer(done.report(), done, store=opened), of=opened.url)
