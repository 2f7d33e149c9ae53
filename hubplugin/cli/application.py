"""The command line's frame: what every command shares, and how it ends.

A command returns an `Answer`. Its exit status is 0 if all is well, 1 after an error, 2 where it was typed wrongly, 3 if
the guard refused a correction, 4 if the answer needs somebody's attention, and 130 after Ctrl-C.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from hubplugin._version import __version__
from hubplugin.errors import CorrectionRefused, HubpluginError, Parameter
from hubplugin.report import Report, as_text
from hubplugin.vectors import Progress

OF_A_URL = {"metric": "metric", "offset_key": "offset_key", "storage": "storage", "vector": "using"}
"""What a parameter is called behind a URL."""


def as_typed(parameter: Parameter, command: Any) -> str:
    """`parameter` as it is typed behind `command`: an option, or a part of the URL."""
    options = {option.name: option.opts[0] for option in command.params}
    name, value = parameter.name, parameter.value
    if name in options:
        return options[name] if value is None or value is True else f"{options[name]} {value}"
    return f"?{OF_A_URL[name]}={value or 'NAME'}" if name in OF_A_URL else str(parameter)


class LogLines(logging.Handler):
    """What is logged: a line each, and of a warning that it is one."""

    def emit(self, record: logging.LogRecord) -> None:
        (warn if record.levelno >= logging.WARNING else say)(record.getMessage())


def say(text: str) -> None:
    typer.echo(f"hubplugin: {text}", err=True)


def warn(text: str) -> None:
    say(f"warning: {' '.join(text.split())}")


ERROR, REFUSED, ATTENTION, STOPPED = 1, 3, 4, 130
"""Exit statuses beside 0; typer's own for wrong usage is 2."""

JSON_VERSION = 1
"""Version of what `--json` prints. It grows when a name in it changes its meaning or goes away, not when one comes."""


@dataclass(frozen=True)
class Answer:
    """What a command answers: `text` for people, or a report that becomes text, and `figures` for programs as plain
    JSON. attention: whether somebody should look at it, which is the command's exit status. of: the store whose URL
    stands before the text."""

    text: str | Report
    figures: Mapping[str, object] = field(default_factory=dict)
    attention: bool = False
    of: str = ""

    def as_text(self, width: int, verbose: bool) -> str:
        """`text`, for so many columns; verbose: with all details."""
        text = self.text if isinstance(self.text, str) else as_text(self.text, width, verbose)
        return f"{self.of}: {text}" if self.of else text


class Commands(TyperGroup):
    """The commands. Errors and warnings are one line each on stderr and speak of what is typed."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: warn(str(message))
            try:
                return super().invoke(ctx)
            except HubpluginError as error:
                command = self.commands[str(ctx.invoked_subcommand)]
                say(error.worded(lambda parameter: as_typed(parameter, command)))
                raise typer.Exit(REFUSED if isinstance(error, CorrectionRefused) else ERROR) from None
            except KeyboardInterrupt as stop:
                say(f"stopped; {str(stop) or 'nothing was changed'}")
                raise typer.Exit(STOPPED) from None


STORE = (
    "STORE is a URL: faiss:FILE, qdrant://HOST:6333/COLLECTION, qdrant+https://..., qdrant-local:PATH/COLLECTION, "
    "postgresql://USER@HOST/DB?table=TABLE, chroma:PATH/COLLECTION, lancedb:PATH/TABLE. Options "
    "follow behind a ?, in quotes. 'faiss:FILE?metric=dot' (or cosine) where the metric "
    "is detected wrongly. 'qdrant://...?using=VECTOR&storage=payload': which vector, and where offsets lie "
    "(payload or vector). '...?offset_key=KEY': under which payload key, where hub_offset is one of yours. "
    "'...?grpc=6334': the port for gRPC, which is faster. '...?record=FOLDER': where a client records queries."
)

app = typer.Typer(
    cls=Commands,
    help="Mends hubness in vector search: one offset per target, kept in the store that you have: Faiss, Qdrant, "
    "PostgreSQL, Chroma or LanceDB. Begin with: hubplugin diagnose STORE --bank FILE. It changes nothing.\n\n" + STORE,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hubplugin {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


Json = Annotated[bool, typer.Option("--json", help="Print figures as JSON instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors and what needs attention.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print all details, and say on stderr what is being done.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Threads that compute; by default what OMP_NUM_THREADS says, or all."),
]
SHARED = {"json": (Json, False), "quiet": (Quiet, False), "verbose": (Verbose, False), "threads": (Threads, None)}


FUNCTIONS: dict[str, Callable[..., Answer]] = {}
"""The function of each command, by the command's name."""


def groups_of(function: Callable[..., Answer]) -> dict[str, Any]:
    """The parameters of `function` that are groups of options which several commands have: dataclasses, by name."""
    parameters = inspect.signature(function, eval_str=True).parameters
    return {name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)}


def command(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Makes `function` a command of its name, with the options that every command has. Those of a group stand in the
    place of the group."""
    groups = groups_of(function)
    typed: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        typed += inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else [parameter]

    @functools.wraps(function)
    def run(*, json: bool, quiet: bool, verbose: bool, threads: int | None, **arguments: Any) -> None:
        if threads is not None:
            _use(threads)
        for name, group in groups.items():
            arguments[name] = group(**{each.name: arguments.pop(each.name) for each in fields(group)})
        with _loudness(quiet, verbose):
            answer = function(**arguments)
        _show(answer, function.__name__, json, quiet, verbose)
        if answer.attention:
            raise typer.Exit(ATTENTION)

    keyword = inspect.Parameter.KEYWORD_ONLY
    for name, (option, default) in SHARED.items():
        typed.append(inspect.Parameter(name, keyword, default=default, annotation=option))
    run.__signature__ = inspect.Signature([each.replace(kind=keyword) for each in typed])  # type: ignore[attr-defined]
    name = function.__name__.replace("_", "-")
    FUNCTIONS[name] = function
    app.command(name)(run)
    return function


def _use(threads: int) -> None:
    """Computes with so many threads. The libraries look at the environment when they are imported, which is later."""
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


@contextmanager
def progress_shown() -> Iterator[Progress | None]:
    """Progress as `--quiet` allows it: bars on a terminal, lines elsewhere."""
    from hubplugin.progress import bars, lines

    if logging.getLogger("hubplugin").getEffectiveLevel() > logging.WARNING:
        yield None
        return
    if not sys.stderr.isatty():
        yield lines(say)
        return
    with bars() as shown:
        yield shown


@contextmanager
def _loudness(quiet: bool, verbose: bool) -> Iterator[None]:
    """What is logged under `hubplugin` and warned of, for one command."""
    logger = logging.getLogger("hubplugin")
    before = logger.level
    logger.setLevel(logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING)
    try:
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _show(answer: Answer, name: str, as_json: bool, quiet: bool, verbose: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"command": name, "version": JSON_VERSION, **answer.figures}, allow_nan=False))
    elif answer.text and (not quiet or answer.attention):
        typer.echo(answer.as_text(Console().width, verbose))


def main() -> None:
    """Runs the command line; an error of hubplugin's is one line on stderr."""
    logging.basicConfig(level=logging.WARNING, handlers=[LogLines()])
    app()
