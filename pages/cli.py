"""docs/reference/cli.md: each command with its arguments and options, as `--help` has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from typing import Any

from typer.main import get_command

from hubplugin.cli import app
from hubplugin.cli.application import SHARED, STORE

START = """# Command line

`hubplugin COMMAND --help` prints what stands here. Every command takes `--json`, `--quiet`, `--verbose`, `--threads`.

| exit status | meaning |
|---|---|
| 0 | all is well |
| 1 | an error, told in one line |
| 2 | the command was typed wrongly |
| 3 | the guard refused a correction; nothing was changed |
| 4 | the answer needs somebody's attention |
| 130 | stopped by Ctrl-C; one line says what was changed and how to go on |
"""


def reference() -> str:
    """The page: all commands in the order of `hubplugin --help`, then the options that several or all of them have."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    shared = [each for each in commands["apply"].params if each.name in SHARED]
    uses = Counter(_row(each) for command in commands.values() for each in command.params)
    common = {row: each for command in commands.values() for each in command.params if uses[row := _row(each)] > 1}
    several = [each for each in common.values() if each.name not in SHARED and each.name != "store"]
    parts = [START, f"## STORE\n\n{_cell(STORE)}\n"]
    parts += ["\n".join(_command(name, command, common)) for name, command in commands.items()]
    parts += ["## Options of several commands\n", *_table("option", several)]
    return "\n".join([*parts, "## Options of every command\n", *_table("option", shared)])


def _command(name: str, command: Any, common: Container[str]) -> Iterator[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each not in arguments and each.name not in SHARED]
    needed = [f"{each.opts[0]} {_metavar(each)}" for each in options if each.required]
    also = ", ".join(f"`{each.opts[0]}`" for each in options if _row(each) in common)
    yield f"## hubplugin {name}\n"
    usage = f"`hubplugin {' '.join([name, *(_metavar(each) for each in arguments), *needed])} [OPTIONS]`"
    yield f"{usage}: {command.help}{f' Also {also} ([below](#options-of-several-commands)).' if also else ''}\n"
    own = [each for each in command.params if each.name not in SHARED and _row(each) not in common]
    yield from _table("argument or option" if arguments[0] in own else "option", own)


def _table(kind: str, parameters: list[Any]) -> Iterator[str]:
    if not parameters:
        return
    yield f"| {kind} | what it does | default |"
    yield "|---|---|---|"
    yield from map(_row, parameters)
    yield ""


def _row(parameter: Any) -> str:
    return f"| {_name(parameter)} | {_cell(parameter.help or '')} | {_default(parameter)} |"


def _name(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    value = "" if parameter.is_flag else f" {_metavar(parameter)}"
    return " ".join(f"`{name}{value}`" for name in names)


def _metavar(parameter: Any) -> str:
    return parameter.metavar or (parameter.name.upper() if parameter.param_type_name == "argument" else "...")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    return "" if value is None or value is False or value == () or value == [] else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")
