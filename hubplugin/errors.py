"""The errors that hubplugin raises.

Each message is one line: what was given, what was expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """A parameter in an error message. A CLI can replace it by the name of its option.

    name: The name in the signature.
    value: The value to pass or the value given, or None to show only the name.
    """

    name: str
    value: object = None

    def __str__(self) -> str:
        return f"{self.name}=" if self.value is None else f"{self.name}={self.value!r}"


def install(extra: str) -> str:
    """Return the advice for a user who lacks the packages of an `extra`.

    hubplugin is not on a package index: `pip install 'hubplugin[extra]'` would find
    nothing, or another package of that name.
    """
    return f"in a clone of hubplugin: pip install '.[{extra}]'"


class HubpluginError(Exception):
    """The base class of all errors that hubplugin raises on purpose.

    Unusable input is refused before anything is written. If a job is stopped while it
    writes to a store, run it again: it continues from what is already written.

    The arguments are the parts of the message, texts and `Parameter` objects:

        InputError("method 'dualis' needs vectors of answers: pass ", Parameter("answers"))
    """

    def __str__(self) -> str:
        return self.render(str)

    def render(self, named: Callable[[Parameter], str]) -> str:
        """Return the message, with each parameter replaced by the text from `named`."""
        return "".join(
            named(part) if isinstance(part, Parameter) else str(part)
            for part in self.args
        )


@contextmanager
def telling(changes: str) -> Iterator[None]:
    """Put `changes` into the message of a Ctrl-C: what was changed, and how to go on.

    If the interrupt already has a message, from a part of the work, it is kept.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        raise stop if stop.args else KeyboardInterrupt(changes) from None


class InputError(HubpluginError, ValueError):
    """Raised for vectors, parameters or ground truth that cannot be used."""


class ZeroVector(InputError):
    """Raised for a vector of length 0, which has no cosine similarity."""


class EmptyInput(InputError):
    """Raised for input without any vectors."""


class ClusterError(HubpluginError):
    """Raised if an executor's workers are lost, or fail although vectors are valid."""


class ModelFileError(HubpluginError):
    """Raised for a model file that is damaged, or that another version wrote."""


class StoreError(HubpluginError):
    """Raised for a store that is missing, unreachable, unusable or in the wrong state."""


class CorrectionRefused(HubpluginError):
    """Raised if the guard rejects the bank or the correction. Nothing was written."""
