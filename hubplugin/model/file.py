"""The model file: safetensors with a JSON header, a checksum over both, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np

from hubplugin import atomic
from hubplugin._version import __version__
from hubplugin.errors import ModelFileError

FORMAT = 6
"""Version of the model file. A reader refuses others, so that none takes a model for a part of it: 4 knew no query map,
and 5 had models that moved targets, too."""

LARGEST = 1e38
"""Numbers are used as float32, which ends at 3.4e38."""

Model = TypeVar("Model")

Header: TypeAlias = dict[str, Any]
"""The JSON header of a model file."""


def to_bytes(header: Header, tensors: dict[str, np.ndarray]) -> bytes:
    """A model file with this `header` and these `tensors`."""
    from safetensors.numpy import save

    origin = {"hubplugin": __version__, "sha256": digest(header, tensors)}
    return save(tensors, metadata={"hubplugin": json.dumps(header | origin)})


def from_bytes(
    content: bytes, name: str, build: Callable[[Header, dict[str, np.ndarray]], Model]
) -> Model:
    """Builds a model from the bytes of a model file.

    Args:
        content: the bytes.
        name: what errors call the file.
        build: makes the model of its header and its tensors.

    Raises:
        ModelFileError: the bytes are damaged, are no model, or come from another version.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{name} is damaged or not a hubplugin model: {str(error)!r}; fit it again"
        ) from None
    if "hubplugin" not in metadata:
        raise ModelFileError(
            f"{name} is a safetensors file, but not a hubplugin model; fit one with hubplugin.fit"
        )
    try:
        header = json.loads(metadata["hubplugin"])
        _check(header, tensors, name)
        return build(header, tensors)
    except Unusable as error:
        raise ModelFileError(f"{name} is damaged: {error}; fit it again") from None
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ModelFileError(
            f"{name} is damaged: its header cannot be read ({error!r}); fit it again"
        ) from None


class Unusable(ValueError):
    """Part of a file that no fit writes."""


def require(usable: object, what: str) -> None:
    """Raises Unusable, which calls the part `what`, where it is not `usable`."""
    if not usable:
        raise Unusable(f"its {what} cannot be used")


def is_number(value: object, least: float = -LARGEST, *, whole: bool = False) -> bool:
    """Whether `value` is a number from `least` on that float32 holds, `whole` if it is to be."""
    kinds = (int,) if whole else (int, float)
    return (
        isinstance(value, kinds)
        and not isinstance(value, bool)
        and least <= value <= LARGEST
    )


def are_numbers(array: object, *shape: int | None, infinite: bool = False) -> bool:
    """Whether `array` holds floats of this `shape`, where None is any length above 0; if `infinite`, they need not be
    finite."""
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.kind != "f"
        or array.ndim != len(shape)
        or not array.size
    ):
        return False
    fits = all(
        length in (None, actual)
        for length, actual in zip(shape, array.shape, strict=True)
    )
    return fits and bool(
        (~np.isnan(array)).all() if infinite else np.isfinite(array).all()
    )


def _check(header: Header, tensors: dict[str, np.ndarray], name: str) -> None:
    """Raises ModelFileError for another format, a wrong checksum, or a header that could fool a terminal."""
    if not printable(header):
        raise ModelFileError(
            f"{name} is damaged: its header holds control characters; fit it again"
        )
    written, version = header["format"], header.pop("hubplugin")
    if written != FORMAT:
        mend = "upgrade hubplugin" if written > FORMAT else "fit it again"
        raise ModelFileError(
            f"{name} has format {written}, written by hubplugin {version}; this version "
            f"({__version__}) reads format {FORMAT}: {mend}"
        )
    if header.pop("sha256") != digest(header, tensors):
        raise ModelFileError(
            f"{name} is damaged: its content does not match its checksum; fit it again"
        )


def read(path: str | os.PathLike[str]) -> bytes:
    """The content of the file `path`. Raises ModelFileError if it cannot be read."""
    try:
        with atomic.open_own(os.path.realpath(path)) as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"cannot read model file {os.fspath(path)!r}: {_reason(error)}"
        ) from None


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file with this `content` whole or not at all; where `path` is a link, the file that it leads to.

    Raises ModelFileError if it cannot; the file that was there before is then untouched.
    """
    try:
        atomic.write(os.path.realpath(path), content)
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        raise ModelFileError(
            f"cannot write model file {os.fspath(path)!r}: {_reason(error)}"
        ) from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def printable(part: object) -> bool:
    """Whether all texts in a part of a header, the keys too, can be shown on a terminal as they are."""
    if isinstance(part, dict):
        return all(printable(key) and printable(value) for key, value in part.items())
    if isinstance(part, list):
        return all(map(printable, part))
    return not isinstance(part, str) or part.isprintable()


def digest(header: Header, tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for key in sorted(tensors):
        digest.update(f"{key}{tensors[key].shape}{tensors[key].dtype.str}".encode())
        digest.update(np.ascontiguousarray(tensors[key]).data)
    return digest.hexdigest()
