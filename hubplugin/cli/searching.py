"""Commands for those who search a corrected store: switch."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from hubplugin.cli.frame import Answer, command
from hubplugin.cli.options import StoreUrl


class Position(str, Enum):
    on = "on"
    off = "off"


@command
def switch(store: StoreUrl, position: Annotated[Position, typer.Argument(help="on or off.")]) -> Answer:
    """Switch the correction off for every client, or on again; what is stored stays."""
    from hubplugin.registry import open_store

    opened = open_store(store)
    on = position is Position.on
    opened.switch(on)
    state = "on" if on else "off: clients search raw"
    return Answer(f"{opened.url}: the correction is {state}; running clients see it within 10 seconds", {"on": on})
