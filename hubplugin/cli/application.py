"""The frame of the command line: shared options, output and exit statuses.

A command returns a result, which the frame prints as text or JSON. The exit status is 0
if all is well, 1 after an error, 2 after wrong usage, 3 if the guard refused a
correction, 4 if the result needs attention, and 130 after Ctrl-C.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hubplugin._version import __version__
from hubplugin.atomic import lack_of_room
from hubplugin.cli.options import embedding
from hubplugin.compute import Compute
from hubplugin.errors import CorrectionRefused, HubpluginError, InputError, Parameter
from hubplugin.registry import without_secrets
from hubplugin.results import Result, Spell, Step

URL_OPTIONS = {"metric": "metric", "storage": "storage", "vector": "using"}
"""The names that some parameters have as options of a store's URL."""

ERROR, REFUSED, ATTENTION, STOPPED = 1, 3, 4, 130
"""Exit statuses other than 0; typer uses 2 for wrong usage."""

JSON_VERSION = 1
"""The version of the output of `--json`.

It increases if a name is removed or changes its meaning, but not if one is added."""


def as_typed(parameter: Parameter, command: Any) -> str:
    """Return `parameter` as people type it: an option of `command` or of a URL."""
    options = {option.name: option for option in command.params}
    name = parameter.name
    value = parameter.value
    if name in options:
        option = options[name]
        # A switch has no value: --learn stands for True, and --no-learn for False.
        if value is False and option.secondary_opts:
            return str(option.secondary_opts[0])
        if value is None or value is True:
            return str(option.opts[0])
        return f"{option.opts[0]} {value}"
    if name in URL_OPTIONS:
        return f"?{URL_OPTIONS[name]}={value or 'NAME'}"
    return str(parameter)


def say(text: str) -> None:
    """Print a line on stderr, in the name of the program."""
    typer.echo(f"hubplugin: {text}", err=True)


def warn(text: str) -> None:
    """Print a warning as one line on stderr."""
    say(f"warning: {' '.join(text.split())}")


class LogLines(logging.Handler):
    """Print each log message as a line, and mark warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        (warn if record.levelno >= logging.WARNING else say)(record.getMessage())


class Commands(TyperGroup):
    """The commands. Errors and warnings are lines on stderr, and name typed options."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: warn(str(message))
            try:
                return super().invoke(ctx)
            except HubpluginError as error:
                command = self.commands[str(ctx.invoked_subcommand)]
                say(error.render(lambda parameter: as_typed(parameter, command)))
                raise typer.Exit(
                    REFUSED if isinstance(error, CorrectionRefused) else ERROR
                ) from None
            except KeyboardInterrupt as stop:  # its text tells what a job has done
                say(f"stopped; {str(stop) or 'nothing was changed'}")
                raise typer.Exit(STOPPED) from None


STORE = (
    "STORE is a URL: faiss:FILE, qdrant://HOST:6333/COLLECTION, qdrant+https://..., qdrant-local:PATH/COLLECTION, "
    "postgresql://USER@HOST/DB?table=TABLE, chroma:PATH/COLLECTION, lancedb:PATH/TABLE. Add options after a ?, and put "
    "the URL in quotes. 'faiss:FILE?metric=cosine': the inner-product index contains unit vectors. "
    "'qdrant://...?using=VECTOR&storage=payload': which vector to correct, and where to store offsets (payload or "
    "vector). '...?grpc=6334': the port for gRPC, which is faster. '...?record=FOLDER': the folder in which a client "
    "records queries."
)

app = typer.Typer(
    cls=Commands,
    help="Fix hubness in vector search with one offset per target, kept in the store you already have: Faiss, Qdrant, "
    "PostgreSQL, Chroma or LanceDB. Start with: hubplugin diagnose STORE --bank FILE. It changes nothing.\n\n"
    + STORE,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    """Print the version and leave, if --version was typed."""
    if is_asked:
        typer.echo(f"hubplugin {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None: ...


def options_of_all(
    json: Annotated[
        bool, typer.Option("--json", help="Print figures as JSON instead of text.")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", help="Print only errors and results that need attention."
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="Print all details, and report progress on stderr."
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            "--device", help="Where to compute; auto tries cuda, then mps, then cpu."
        ),
    ] = "auto",
) -> None:
    """Declare the options that every command has."""


SHARED_OPTIONS = inspect.signature(options_of_all, eval_str=True).parameters


def command(function: Callable[..., Result]) -> Callable[..., Result]:
    """Register a function as a command of the same name, with the shared options.

    A parameter `compute` of the function is no option: it gets the `Compute` of the
    chosen device.
    """
    own = dict(inspect.signature(function, eval_str=True).parameters)
    takes_compute = own.pop("compute", None) is not None

    @functools.wraps(function)
    def run(
        *,
        json: bool,
        quiet: bool,
        verbose: bool,
        device: str,
        **arguments: Any,
    ) -> None:
        require_writable(arguments.get("report"))
        with _log_level(quiet, verbose), computing(device) as compute:
            if takes_compute:
                arguments["compute"] = compute
            result = function(**arguments)
        spell = functools.partial(spell_command, arguments)
        _write_report(result, arguments, spell)
        attention = bool(getattr(result, "attention", ()))
        if json or attention or not quiet:  # JSON is printed even with --quiet
            if json:
                frame = {"command": function.__name__, "version": JSON_VERSION}
                typer.echo(dumps({**frame, **result.as_json()}, allow_nan=False))
            else:
                typer.echo(result.as_text(verbose, has_colours(), spell))
        if attention:
            raise typer.Exit(ATTENTION)

    parameters = [*own.values(), *SHARED_OPTIONS.values()]
    for parameter in parameters:
        annotation: Any = parameter.annotation
        if getattr(annotation, "__origin__", None) in (bool, bool | None):
            annotation.__metadata__[0].metavar = ""  # typer would show <bool>
    signature = inspect.Signature(
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    )
    run.__signature__ = signature  # type: ignore[attr-defined]
    app.command(function.__name__)(run)
    return function


@contextmanager
def computing(device: str) -> Iterator[Compute]:
    """Yield the `Compute` of a job on `device`.

    Progress is shown as bars on a terminal and as lines elsewhere. With --quiet, it is
    not shown.
    """
    from hubplugin.progress import bars, lines

    if logging.getLogger("hubplugin").getEffectiveLevel() > logging.WARNING:
        yield Compute(device)
    elif sys.stderr.isatty():
        with bars() as progress:
            yield Compute(device, progress=progress)
    else:
        with lines(say) as progress:
            yield Compute(device, progress=progress)


REPEATED = ("bank", "answers", "embed", "pairs_from")
"""The arguments of a command that are repeated in the next command it suggests."""


def spell_command(arguments: Mapping[str, Any], step: Step) -> str:
    """Return the command line of a suggested step.

    The step has the store of the command that suggests it and, if it takes a bank, the
    same bank files.

    Args:
        arguments: The arguments of the command that suggests the step.
        step: The step.
    """
    group: Any = typer.main.get_command(app)
    store = arguments.get("store") or arguments["targets"]
    words = ["hubplugin", step.job, without_secrets(store)]
    options = {option.name: option for option in group.commands[step.job].params}
    repeated = dict(arguments)
    if not step.learn and repeated.pop("pairs_from", None) is not None:
        # Without the pairs, only a bank of texts needs the model.
        repeated["embed"] = embedding(repeated["bank"], repeated["embed"])
    if "bank" in options:
        if step.job == "apply" and "record=" not in store:
            # Before a first correction, there are mostly no recorded queries: a command
            # without a bank suggests the placeholder FILE.
            repeated.setdefault("bank", "FILE")
        for name in REPEATED:
            if repeated.get(name) is not None:
                words += [options[name].opts[0], repeated[name]]
    if step.learn:
        words.append("--learn")
    return shlex.join(words)


def _write_report(result: Result, arguments: Mapping[str, Any], spell: Spell) -> None:
    """Write the page of a result and the typed command, if a report is requested."""
    if arguments.get("report") is None:
        return
    # Passwords and keys in URLs do not belong in a report.
    words = [without_secrets(word) if ":" in word else word for word in sys.argv]
    typed = shlex.join(["hubplugin", *words[1:]])
    result.to_html(arguments["report"], typed, arguments.get("images"), spell)


def require_writable(path: Path | None) -> None:
    """Raise InputError if a file cannot be written, before a job does its work."""
    if path is None:
        return
    folder = Path(os.path.realpath(path)).parent
    if path.is_dir():
        reason = "it is a folder; expected a file"
    elif folder.is_dir():
        reason = lack_of_room(folder, needed=1)
    else:
        reason = "there is no folder"
    if reason:
        raise InputError(f"cannot write {str(path)!r}: {reason}")


def has_colours() -> bool:
    """Return True if stdout shows colours, and the user has not declined them."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


@contextmanager
def _log_level(quiet: bool, verbose: bool) -> Iterator[None]:
    """Set the level of logs and warnings during one command."""
    logger = logging.getLogger("hubplugin")
    before = logger.level
    level = logging.INFO if verbose else logging.WARNING
    logger.setLevel(logging.ERROR if quiet else level)
    try:
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.WARNING, handlers=[LogLines()])
    app()
