"""Commands for those who search a corrected store: explain, switch."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from hubplugin.cli.frame import Answer, command
from hubplugin.cli.looked import SwitchFigures
from hubplugin.cli.options import StoreUrl, vectors
from hubplugin.errors import InputError


@command
def explain(
    store: StoreUrl,
    vector: Annotated[str | None, typer.Option(help="A file with the query, the first vector in it.")] = None,
    id: Annotated[
        str | None, typer.Option(help="The query is this target. Without either it is the first one.")
    ] = None,
    k: Annotated[int, typer.Option(min=1, help="How many results the request asks for.")] = 10,
) -> Answer:
    """Print the request that other clients send for the corrected ranking, with its constants filled in."""
    from hubplugin.registry import open_store

    if vector is not None and id is not None:
        raise InputError("--vector and --id both name the query; give one of them")
    given = None if vector is None else vectors(vector, "query")
    opened = open_store(store)
    if given is not None:
        if given.dim != opened.dim:
            raise InputError(f"--vector has {given.dim} dimensions, {opened.url} has {opened.dim}")
        asked = next(iter(given.blocks(1)))[0]
    elif id is not None:
        asked = int(id) if id.isdigit() else id
    else:
        asked = next(iter(opened.scan())).vectors[0]
    found = opened.explain(asked, k)
    return Answer(found.text, found.request)


class Position(str, Enum):
    on = "on"
    off = "off"


@command
def switch(
    store: StoreUrl,
    position: Annotated[Position, typer.Argument(help="on or off.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do, and change nothing.")] = False,
) -> Answer:
    """Switch the correction off for every client, or on again; what is stored stays."""
    from hubplugin.registry import open_store

    opened = open_store(store)
    on = position is Position.on
    opened.switch(on, dry_run=dry_run)
    is_now = "nothing was changed; the correction would be" if dry_run else "the correction is"
    state = "on" if on else "off: clients search raw"
    figures: SwitchFigures = {"store": opened.url, "written": not dry_run, "on": on}
    return Answer(f"{opened.url}: {is_now} {state}; running clients see it within 10 seconds", figures)
