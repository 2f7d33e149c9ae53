"""The command mcp: what looks at a store and changes nothing, as tools for an agent."""

from __future__ import annotations

from hubplugin.cli.frame import Answer, command
from hubplugin.errors import InputError


@command
def mcp() -> Answer:
    """Serve diagnose, inspect and evaluate to an agent (Model Context Protocol, on stdin and stdout)."""
    try:
        from hubplugin.cli.tools import server
    except ModuleNotFoundError as error:
        raise InputError(f"needs a package that is missing ({error.name}): pip install 'hubplugin[mcp]'") from None
    server().run("stdio")
    return Answer("")
