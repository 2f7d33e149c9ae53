"""The errors that hubplugin raises: one line each, naming what was given, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """A parameter in the text of an error: data, so that a CLI can name its own option.

    name: as in the signature. value: what to pass or what was given, None if the name
    alone is meant.
    """

    name: str
    value: object = None

    def __str__(self) -> str:
        return f"{self.name}=" if self.value is None else f"{self.name}={self.value!r}"


def install(extra: str) -> str:
    """Say what to do if the packages of an `extra` are missing.

    hubplugin is on no package index: `pip install 'hubplugin[extra]'` would find nothing,
    or something else of that name.
    """
    return f"in a clone of hubplugin: pip install '.[{extra}]'"


class HubpluginError(Exception):
    """Any error that hubplugin raises on purpose.

    Input that cannot be used is refused before anything is written. A job on a store that
    is stopped while it writes leaves what it wrote by then, and takes it up when it is run
    again.

    Its args are the parts of its text, str and `Parameter`:

        InputError("method 'dualis' needs vectors of answers: pass ", Parameter("answers"))
    """

    def __str__(self) -> str:
        return self.render(str)

    def render(self, named: Callable[[Parameter], str]) -> str:
        """Return the text, with each parameter as `named` has it."""
        return "".join(
            named(part) if isinstance(part, Parameter) else str(part)
            for part in self.args
        )


@contextmanager
def telling(changes: str) -> Iterator[None]:
    """Let Ctrl-C say which `changes` were made by then, and how to go on.

    An interrupt that says so already, of a part of the work, stays as it is.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        raise stop if stop.args else KeyboardInterrupt(changes) from None


class InputError(HubpluginError, ValueError):
    """Vectors, parameters or ground truth that cannot be used as given."""


class ZeroVector(InputError):
    """A vector of length 0, which has no cosine similarity."""


class EmptyInput(InputError):
    """Raised for input without any vectors."""


class ClusterError(HubpluginError):
    """Workers of an executor that were lost, or failed for no fault of the vectors."""


class ModelFileError(HubpluginError):
    """A model file that is damaged, or that another version wrote."""


class StoreError(HubpluginError):
    """A store that is missing, unreachable, in the wrong state, or cannot carry offsets."""


class CorrectionRefused(HubpluginError):
    """The guard objects to the bank or the correction. Nothing was written."""
