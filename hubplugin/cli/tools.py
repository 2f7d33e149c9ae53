"""Commands as tools of an MCP server: the same names, parameters and help; only those that change nothing."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import threading
from collections.abc import Callable
from io import StringIO
from typing import Annotated, Any, get_args, get_origin

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field
from rich.console import Console
from typer.models import ParameterInfo

from hubplugin._version import __version__
from hubplugin.cli import evaluating, looking
from hubplugin.cli.frame import Answer, plain
from hubplugin.errors import HubpluginError

COMMANDS = (looking.diagnose, looking.inspect, evaluating.evaluate)

FILES = ("store", "queries", "targets", "target_bank", "query_bank", "truth", "clicks", "names", "texts", "query_names")
SETTINGS = (
    "pairs",
    "same_kind",
    "curve",
    "condition",
    "method",
    "k",
    "temperature",
    "metric",
    "seed",
    "device",
    "memory",
)
"""What an agent may say: what to read, and how to compute. What a command gets later is left out until it stands here,
for it may write a file or run somebody's code."""

INSTRUCTIONS = (
    "hubplugin finds hubness in vector stores: a few targets that come back for far too many queries. Begin with "
    "`inspect`, which says whether a correction lies in the store and whether it is whole, or with `diagnose`, which "
    "needs example queries and says whether there is hubness and whether a correction would help. `evaluate` compares "
    "the raw and the corrected ranking of a store, or methods on files, by queries with known answers. No tool changes "
    "anything: `hubplugin apply` is for people to run."
)


def server() -> MCPServer[Any]:
    """The server with its tools, one call at a time: each may take all memory that it is allowed."""
    made = MCPServer("hubplugin", instructions=INSTRUCTIONS, version=__version__)
    alone = threading.Lock()
    for each in COMMANDS:
        annotations = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
        made.add_tool(_tool(each, alone), annotations=annotations)
    return made


def _tool(command: Callable[..., Answer], alone: threading.Lock) -> Callable[..., CallToolResult]:
    """`command` as a function that an MCP server can describe and call."""

    @functools.wraps(command)
    def tool(**given: Any) -> CallToolResult:
        try:
            with alone:
                return _result(command(**given))
        except HubpluginError as error:
            raise ToolError(str(error)) from None
        finally:
            gc.collect()  # closes the store: files of one are held by one process at a time

    own = inspect.signature(command, eval_str=True)
    parameters = [
        each.replace(annotation=_described(each.annotation))
        for each in own.parameters.values()
        if each.name in (*FILES, *SETTINGS)
    ]
    tool.__signature__ = inspect.Signature(parameters, return_annotation=CallToolResult)  # type: ignore[attr-defined]
    tool.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": CallToolResult}
    del tool.__wrapped__
    return tool


def _described(annotation: Any) -> Any:
    """`annotation` with the help of its option as the description in a schema."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *more = get_args(annotation)
    described = [Field(description=each.help) for each in more if isinstance(each, ParameterInfo)]
    return Annotated[kind, described[0]] if described else kind


def _result(answer: Answer) -> CallToolResult:
    """What people would read, and the figures beside it."""
    text = answer.text
    if not isinstance(text, str):
        console = Console(file=StringIO(), width=120, color_system=None)
        console.print(text)
        text = console.file.getvalue()  # type: ignore[attr-defined]
    figures = json.loads(json.dumps(plain(answer.figures), allow_nan=False)) or None
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=figures)
