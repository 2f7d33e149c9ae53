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

FORMAT = 7
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
    from safetensors.numpy import load

    try:
        tensors = load(content)
        length = int.from_bytes(content[:8], "little")
        outer = json.loads(content[8 : 8 + length])
        header = json.loads(outer["__metadata__"]["hubplugin"])
        version = header.pop("hubplugin")
        if header["format"] != FORMAT:
            raise ModelFileError(
                f"{name} has format {header['format']!r}, written by hubplugin "
                f"{version!r}; this version ({__version__}) reads format {FORMAT}: "
                "use that version of hubplugin, or fit it again"
            )
        if header.pop("sha256") != digest(header, tensors):
            raise ModelFileError(
                f"{name} is damaged: its content does not match its checksum; "
                "fit it again"
            )
        return build(header, tensors)
    except ModelFileError:
        raise
    except Exception as error:  # whatever bytes that are no model lead to
        raise ModelFileError(
            f"{name} is damaged or not a hubplugin model: {error!r}; fit it again"
        ) from None


def read(path: str | os.PathLike[str]) -> bytes:
    """The content of the file `path`. Raises ModelFileError if it cannot be read."""
    try:
        with atomic.open_own(os.path.realpath(path)) as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"cannot read model file {os.fspath(path)!r}: {error}"
        ) from None


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file with this `content` whole or not at all; where `path` is a link, the file that it leads to.

    Raises ModelFileError if it cannot; the file that was there before is then untouched.
    """
    try:
        atomic.write(os.path.realpath(path), content)
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        raise ModelFileError(
            f"cannot write model file {os.fspath(path)!r}: {error}"
        ) from None


def digest(header: Header, tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for key in sorted(tensors):
        digest.update(f"{key}{tensors[key].shape}{tensors[key].dtype.str}".encode())
        digest.update(np.ascontiguousarray(tensors[key]).data)
    return digest.hexdigest()
