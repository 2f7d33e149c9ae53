"""Commands that look at a store and change nothing: diagnose, inspect."""

from __future__ import annotations

from typing import Annotated

import typer

from hubplugin.cli import looked
from hubplugin.cli.frame import Answer, command, progress_shown
from hubplugin.cli.options import (
    Device,
    Memory,
    Paired,
    ReportFile,
    SameKind,
    StoreUrl,
    TargetBank,
    TargetNames,
    Texts,
    require_files,
    vectors,
    write_report,
)
from hubplugin.cli.queries import Clicks, Embed, Field, GivenQueries, Queries


@command
def diagnose(
    store: StoreUrl,
    queries: Queries = None,
    embed: Embed = None,
    field: Field = None,
    target_bank: TargetBank = None,
    pairs: Paired = None,
    clicks: Clicks = None,
    same_kind: SameKind = False,
    names: TargetNames = None,
    texts: Texts = None,
    curve: Annotated[bool, typer.Option("--curve", help="Also say what size of bank helps by how much.")] = False,
    report: ReportFile = None,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> Answer:
    """What is wrong with these searches: hubness or something else? Who are the hubs, would a correction help?"""
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    require_files(read=(), written=(report,))
    given, second = GivenQueries.of(queries, embed, field, clicks), vectors(target_bank, "target bank")
    opened = open_store(store)
    called, worded = naming(names, opened, "--names"), naming(texts, opened, "--texts")

    from hubplugin.jobs.diagnosis import diagnose

    with progress_shown() as progress:
        bank = given.bank(opened, progress)
        known = given.pairs(bank, pairs, target_bank)
        found = diagnose(
            opened, bank, second, pairs=known, same_kind=same_kind, names=called, texts=worded, curve=curve,
            device=device, memory=memory, progress=progress,
        )  # fmt: skip
    if report is not None:
        from hubplugin.evaluation.store_reports import page_of_diagnosis

        write_report(page_of_diagnosis(found, opened.url), report)
    return Answer(str(found), looked.of_diagnosis(opened.url, found))


@command
def inspect(
    store: StoreUrl,
    names: TargetNames = None,
    report: ReportFile = None,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> Answer:
    """Say what correction lies in the store, whether it is whole, and which targets look planted."""
    from hubplugin.jobs.naming import naming
    from hubplugin.registry import open_store

    require_files(read=(), written=(report,))
    opened = open_store(store)
    called = naming(names, opened, "--names")

    from hubplugin.jobs.inspection import inspect

    with progress_shown() as progress:
        found = inspect(opened, device=device, memory=memory, progress=progress)
    if report is not None:
        from hubplugin.evaluation.store_reports import page_of_inspection

        write_report(page_of_inspection(found, called), report)
    return Answer(str(found), looked.of_inspection(found), attention=bool(found.alarms))
