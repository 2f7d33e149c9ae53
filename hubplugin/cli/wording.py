"""What the command line says on stderr: errors and warnings, one line each, in the words that were typed."""

from __future__ import annotations

import logging
from typing import Any

import typer

from hubplugin.errors import Parameter

OF_A_URL = ("metric", "storage", "using")


def as_typed(parameter: Parameter, command: Any) -> str:
    """`parameter` as it is typed behind `command`: an option, or a part of the URL."""
    options = {option.name: option.opts[0] for option in command.params}
    name, value = parameter.name, parameter.value
    if name in options:
        return options[name] if value is None or value is True else f"{options[name]} {value}"
    return f"?{name}={value or 'NAME'}" if name in OF_A_URL else str(parameter)


class LogLines(logging.Handler):
    """What is logged: a line each, and of a warning that it is one."""

    def emit(self, record: logging.LogRecord) -> None:
        (warn if record.levelno >= logging.WARNING else say)(record.getMessage())


def say(text: str) -> None:
    typer.echo(f"hubplugin: {text}", err=True)


def warn(text: str) -> None:
    say(f"warning: {' '.join(text.split())}")
