"""The command that puts targets into quarantine."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from hubplugin.cli.frame import Answer, command, progress_shown
from hubplugin.cli.looked import of_quarantine
from hubplugin.cli.options import StoreUrl
from hubplugin.errors import InputError, Parameter


@command
def quarantine(
    store: StoreUrl,
    what: Annotated[Literal["add", "remove", "list"], typer.Argument(help="What to do.")],
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of targets, as `inspect` prints them.")] = None,
    why: Annotated[str, typer.Option(help="The reason, which the list keeps.")] = "",
    who: Annotated[str | None, typer.Option(help="Who decides; by default the user's name.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the ids, show the list as it would be, and change nothing.")
    ] = False,
) -> Answer:
    """Keep targets from being found, until they are removed from the list; lists who decided, when and why."""
    from hubplugin.registry import open_store

    named = [int(each) if each.lstrip("-").isdigit() else each for each in ids or []]
    if (what == "list") == bool(named):
        raise InputError("quarantine list takes no ids" if named else f"quarantine {what} needs the ids of targets")
    if what != "list" and not why.strip():
        raise InputError("a quarantine needs a reason: ", Parameter("why", "TEXT"))
    opened = open_store(store)
    lines, listed = [], None
    if what != "list":
        from hubplugin.jobs.quarantine import planned, quarantine
        from hubplugin.reductions import Compute

        if dry_run:
            listed = planned(opened, what, named, why, who)
            lines.append(f"{opened.url}: nothing was changed; there would be")
        else:
            with progress_shown() as progress:
                done = quarantine(opened, what, named, why, who=who, compute=Compute(progress=progress))
            lines.append(f"{opened.url}: {done}")
    listed = listed or opened.quarantined()
    lines += [f"{len(listed.last)} in quarantine", *map(str, listed.last.values())]
    return Answer("\n".join(lines), of_quarantine(opened.url, listed, what != "list" and not dry_run))
