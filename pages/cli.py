"""docs/reference/cli.md: the commands, and their arguments and options as `--help` has them."""

from __future__ import annotations

from typing import Any

from typer.main import get_command

from hubplugin.cli import app
from hubplugin.cli.application import SHARED_OPTIONS, STORE

START = """# Command line

`hubplugin COMMAND --help` prints the same texts. Every command takes `--json`, `--quiet`, `--verbose` and `--device`.

| exit status | meaning |
|---|---|
| 0 | all is well |
| 1 | an error, described in one line |
| 2 | wrong usage of the command |
| 3 | the guard refused a correction; nothing was changed |
| 4 | the result needs your attention |
| 130 | stopped by Ctrl-C; one line says what was changed and how to continue |
"""


def reference() -> str:
    """The page: the commands in the order of `hubplugin --help`, then what each option does."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    takers: dict[str, list[str]] = {}
    for name, command in commands.items():
        for option in command.params:
            if option.name not in (*SHARED_OPTIONS, "store"):
                takers.setdefault(_row(option), []).append(name)
    lines = [
        START,
        "## STORE\n",
        f"{_cell(STORE)}\n",
        "## Commands\n",
        "| command | what it does |",
        "|---|---|",
    ]
    lines += [
        f"| `hubplugin {_usage(name, each)}` | {_cell(each.help)} |"
        for name, each in commands.items()
    ]
    lines += [
        "",
        "## Options\n",
        "| command | option | what it does | default |",
        "|---|---|---|---|",
    ]
    lines += [f"| {', '.join(names)} {row}" for row, names in takers.items()]
    lines += [
        f"| every command {_row(each)}"
        for each in commands["apply"].params
        if each.name in SHARED_OPTIONS
    ]
    return "\n".join([*lines, ""])


def _usage(name: str, command: Any) -> str:
    needed = [
        each
        for each in command.params
        if each.param_type_name == "option" and each.required
    ]
    arguments = [
        _metavar(each) for each in command.params if each.param_type_name == "argument"
    ]
    return " ".join(
        [name, *arguments, *(f"{each.opts[0]} {_metavar(each)}" for each in needed)]
    )


def _row(parameter: Any) -> str:
    return f"| {_name(parameter)} | {_cell(parameter.help or '')} | {_default(parameter)} |"


def _name(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    value = "" if parameter.is_flag else f" {_metavar(parameter)}"
    return " ".join(f"`{name}{value}`" for name in names)


def _metavar(parameter: Any) -> str:
    return parameter.metavar or (
        parameter.name.upper() if parameter.param_type_name == "argument" else "..."
    )


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    return (
        ""
        if value is None or value is False or value == () or value == []
        else f"`{value}`"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")
