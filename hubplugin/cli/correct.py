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
        str,
        typer.Option(help="The method: blend, is, sn, dbsn, dualis, nnn, csls or dn."),
    ] = "blend",
    settings: Settings = None,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="Also learn a query map from known answers (docs/learning.md).",
        ),
    ] = False,
    pairs_from: PairsFrom = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Apply the correction even if the guard refuses it."
        ),
    ] = False,
    dry_run: DryRun = False,
    report: ReportFile = None,
) -> Result:
    """Fit, check, write and activate a correction. An interrupted run resumes."""
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
        typer.Option(
            help="As for apply; the default is the method of the active correction."
        ),
    ] = None,
    settings: Settings = None,
    learn: Annotated[
        bool | None,
        typer.Option(
            "--learn/--no-learn",
            help="As for apply; the default is the choice of the active correction.",
        ),
    ] = None,
    pairs_from: PairsFrom = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Activate the new correction even if it is worse."
        ),
    ] = False,
    dry_run: DryRun = False,
    report: ReportFile = None,
) -> Result:
    """Fit the correction again on newer queries, and activate it unless it is worse than the old one."""
    if settings and method is None:
        raise InputError("--set needs the name of a method; add --method")
    if learn is False and pairs_from is not None:
        raise InputError(
            "--pairs-from learns a map, and --no-learn drops it: leave one of them out"
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
    """Write only missing and stale offsets."""
    return hubplugin.refresh(open_store(store), dry_run=dry_run, compute=compute)


@command
def rollback(
    store: StoreUrl,
    compute: Compute,
    dry_run: DryRun = False,
) -> Result:
    """Restore the previous model. A second rollback undoes the first."""
    return hubplugin.rollback(open_store(store), dry_run=dry_run, compute=compute)


@command
def remove(
    store: StoreUrl,
    compute: Compute,
    dry_run: DryRun = False,
) -> Result:
    """Remove the correction, as if it had never been there."""
    return hubplugin.remove(open_store(store), dry_run=dry_run, compute=compute)
