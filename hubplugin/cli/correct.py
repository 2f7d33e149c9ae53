"""Commands on the correction of a store: apply, refit, refresh, rollback, remove."""

from __future__ import annotations

from typing import Annotated

import typer

import hubplugin
from hubplugin.cli.application import command
from hubplugin.cli.options import (
    Answers,
    BankFile,
    DryRun,
    Embed,
    PairsFrom,
    ReportFile,
    Settings,
    StoreUrl,
    open_inputs,
    parameters_of,
)
from hubplugin.compute import Compute
from hubplugin.errors import InputError
from hubplugin.registry import open_store
from hubplugin.results import Result


@command
def apply(
    store: StoreUrl,
    compute: Compute,
    bank: BankFile = None,
    answers: Answers = None,
    embed: Embed = None,
    method: Annotated[
        str, typer.Option(help="blend, is, sn, dbsn, dualis, nnn, csls or dn.")
    ] = "blend",
    settings: Settings = None,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="Known answers teach a map of the query, too (docs/learning.md).",
        ),
    ] = False,
    pairs_from: PairsFrom = None,
    force: Annotated[
        bool, typer.Option("--force", help="Apply it even if the guard refuses it.")
    ] = False,
    dry_run: DryRun = False,
    report: ReportFile = None,
) -> Result:
    """Fit, check, write, activate; resumes where it was cut off."""
    parameters = parameters_of(method, settings)
    opened, examples, pairs = open_inputs(store, bank, answers, embed, pairs_from)
    return hubplugin.apply(
        opened,
        examples,
        method,
        learn=pairs or learn,
        force=force,
        dry_run=dry_run,
        compute=compute,
        **parameters,
    )


@command
def refit(
    store: StoreUrl,
    compute: Compute,
    bank: BankFile = None,
    answers: Answers = None,
    embed: Embed = None,
    method: Annotated[
        str | None,
        typer.Option(help="As for apply; by default that of the active correction."),
    ] = None,
    settings: Settings = None,
    learn: Annotated[
        bool | None,
        typer.Option(
            "--learn/--no-learn",
            help="As for apply; by default as in the active correction.",
        ),
    ] = None,
    pairs_from: PairsFrom = None,
    force: Annotated[
        bool, typer.Option("--force", help="Activate it even if it is worse.")
    ] = False,
    dry_run: DryRun = False,
    report: ReportFile = None,
) -> Result:
    """Fit the correction anew on newer queries; activate it if it is not worse than the old one."""
    if settings and method is None:
        raise InputError("--set is for a method that is named; add --method")
    if learn is False and pairs_from is not None:
        raise InputError(
            "--pairs-from teaches a map, and --no-learn wants none: leave one of them out"
        )
    parameters = parameters_of(method, settings)
    opened, examples, pairs = open_inputs(store, bank, answers, embed, pairs_from)
    return hubplugin.refit(
        opened,
        examples,
        method,
        learn=pairs or learn,
        force=force,
        dry_run=dry_run,
        compute=compute,
        **parameters,
    )


@command
def refresh(
    store: StoreUrl,
    compute: Compute,
    dry_run: DryRun = False,
) -> Result:
    """Write only the offsets that are missing or outdated."""
    return hubplugin.refresh(open_store(store), dry_run=dry_run, compute=compute)


@command
def rollback(
    store: StoreUrl,
    compute: Compute,
    dry_run: DryRun = False,
) -> Result:
    """Write the model that was active before; a second rollback returns."""
    return hubplugin.rollback(open_store(store), dry_run=dry_run, compute=compute)


@command
def remove(
    store: StoreUrl,
    compute: Compute,
    dry_run: DryRun = False,
) -> Result:
    """Take the correction out; the store is as if it had never been there."""
    return hubplugin.remove(open_store(store), dry_run=dry_run, compute=compute)
