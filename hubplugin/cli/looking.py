"""Commands that look at a store and change nothing: diagnose, inspect."""

from __future__ import annotations

from hubplugin.cli.frame import Answer, command, progress_shown
from hubplugin.cli.options import (
    Clicks,
    Device,
    Memory,
    Paired,
    Queries,
    SameKind,
    StoreUrl,
    TargetBank,
    pairs_of,
    vectors,
)


@command
def diagnose(
    store: StoreUrl,
    queries: Queries,
    target_bank: TargetBank = None,
    pairs: Paired = None,
    clicks: Clicks = None,
    same_kind: SameKind = False,
    device: Device = "auto",
    memory: Memory = "1GiB",
) -> Answer:
    """Is there hubness, who are the hubs, would a correction help? Changes nothing."""
    from hubplugin.registry import open_store

    bank, second = vectors(queries, "query bank"), vectors(target_bank, "target bank")
    known = pairs_of(pairs, clicks, target_bank)
    opened = open_store(store)

    from hubplugin.jobs.diagnosis import diagnose

    with progress_shown() as progress:
        found = diagnose(
            opened, bank, second, pairs=known, same_kind=same_kind, device=device, memory=memory, progress=progress
        )
    return Answer(str(found))


@command
def inspect(store: StoreUrl, device: Device = "auto", memory: Memory = "1GiB") -> Answer:
    """Say what correction lies in the store, and whether it is whole."""
    from hubplugin.registry import open_store

    opened = open_store(store)

    from hubplugin.jobs.inspection import inspect

    with progress_shown() as progress:
        found = inspect(opened, device=device, memory=memory, progress=progress)
    return Answer(str(found))
