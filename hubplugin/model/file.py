"""Read and write model files: safetensors with a JSON header and a checksum of both."""

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

FORMAT = 9
"""The version of the model file. A reader refuses all others, so that it never mistakes
part of a model for the whole: version 4 had no query map, 5 had models that moved
targets, 7 had activation sets, and 8 said of a map whether it whitens."""

LARGEST = 1e38
"""The largest number used as float32, whose range ends at 3.4e38."""

Model = TypeVar("Model")

Header: TypeAlias = dict[str, Any]
"""The JSON header of a model file."""


def to_bytes(header: Header, tensors: dict[str, np.ndarray]) -> bytes:
    """Return the bytes of a model file with `header` and `tensors`."""
    from safetensors.numpy import save

    # The digest covers the header without these two entries.
    origin = {"hubplugin": __version__, "sha256": digest(header, tensors)}
    return save(tensors, metadata={"hubplugin": json.dumps(header | origin)})


def from_bytes(
    content: bytes, name: str, build: Callable[[Header, dict[str, np.ndarray]], Model]
) -> Model:
    """Build a model from the bytes of a model file.

    Args:
        content: The bytes.
        name: The name of the file in error messages.
        build: Builds the model from the header and the tensors.

    Raises:
        ModelFileError: The bytes are damaged, not a model, or of another version.
    """
    from safetensors.numpy import load

    try:
        tensors = load(content)
        # A safetensors file begins with 8 bytes: the length of the JSON header that
        # follows. Our header is a text in its metadata.
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
        expected = header.pop("sha256")
        # The digest covers the header without the two entries that are popped here.
        if expected != digest(header, tensors):
            raise ModelFileError(
                f"{name} is damaged: its content does not match its checksum; "
                "fit it again"
            )
        return build(header, tensors)
    except ModelFileError:
        raise
    except Exception as error:  # bytes that are not a model can raise any error
        raise ModelFileError(
            f"{name} is damaged or not a hubplugin model: {error!r}; fit it again"
        ) from None


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file. Raises ModelFileError if the file is unreadable."""
    try:
        with atomic.open_own(os.path.realpath(path)) as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"cannot read model file {os.fspath(path)!r}: {atomic.reason(error)}"
        ) from None


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, completely or not at all. If `path` is a link, follow it.

    Raises ModelFileError if writing fails; an existing file then stays unchanged.
    """
    try:
        atomic.write(os.path.realpath(path), content)
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        raise ModelFileError(
            f"cannot write model file {os.fspath(path)!r}: {atomic.reason(error)}"
        ) from None


def digest(header: Header, tensors: dict[str, np.ndarray]) -> str:
    """Return the SHA-256 of a model, in hex digits."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for key in sorted(tensors):
        digest.update(f"{key}{tensors[key].shape}{tensors[key].dtype.str}".encode())
        digest.update(np.ascontiguousarray(tensors[key]).data)
    return digest.hexdigest()
