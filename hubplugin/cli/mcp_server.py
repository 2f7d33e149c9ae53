"""Commands as tools of an MCP server: the same names, parameters and help; only those that change nothing."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import threading
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, InputRequiredResult, TextContent, Tool, ToolAnnotations
from pydantic import Field
from typer.models import ParameterInfo

from hubplugin._version import __version__
from hubplugin.cli import measure
from hubplugin.cli.application import Answer, answer_of, options_of
from hubplugin.errors import HubpluginError

COMMANDS = (measure.diagnose, measure.inspect, measure.evaluate)

FILES = ("store", "queries", "targets", "bank", "answers", "truth", "names", "texts", "query_names")
SETTINGS = ("pairs", "kind", "learn", "condition", "method", "k", "metric", "seed", "device", "memory")
"""What an agent may say: what to read, and how to compute. What a command gets later is left out until it stands here,
for it may write a file or run somebody's code."""

CLOSED = {"additionalProperties": False}
"""In a schema: there are no more arguments."""

INSTRUCTIONS = (
    "hubplugin finds hubness in vector stores: a few targets that come back for far too many queries. Begin with "
    "`inspect`, which says whether a correction lies in the store and whether it is whole, or with `diagnose`, which "
    "needs example queries and says whether there is hubness and whether a correction would help. `evaluate` compares "
    "the raw and the corrected ranking of a store, or methods on files, by queries with known answers. No tool changes "
    "anything: `hubplugin apply` is for people to run."
)


class Server(MCPServer[Any]):
    """A server whose tools refuse an argument that they do not take: an agent that misspells one, or believes in one,
    must not take the answer for what it asked."""

    async def list_tools(self) -> list[Tool]:
        tools = await super().list_tools()
        return [each.model_copy(update={"input_schema": each.input_schema | CLOSED}) for each in tools]

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        known = {each.name: list(each.input_schema["properties"]) for each in await self.list_tools()}
        unknown = [each for each in arguments if each not in known.get(name, arguments)]
        if unknown:
            raise ToolError(f"{name} takes no argument {unknown[0]!r}; it takes {', '.join(known[name])}")
        return await super().call_tool(name, arguments, context)


def server() -> Server:
    """The server with its tools, one call at a time: each may take all memory that it is allowed."""
    made = Server("hubplugin", instructions=INSTRUCTIONS, version=__version__)
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
                return _result(answer_of(command, **given))
        except HubpluginError as error:
            raise ToolError(str(error)) from None
        finally:
            gc.collect()  # closes the store: files of one are held by one process at a time

    parameters = [
        each.replace(annotation=_described(each.annotation))
        for each in options_of(command)
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
    text = answer.as_text(120, verbose=True)
    figures = json.loads(json.dumps(answer.figures, allow_nan=False)) or None
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=figures)
