"""The worst hubs of an evaluation, and their images."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hubplugin.errors import InputError
from hubplugin.evaluation.result import RAW, Hub
from hubplugin.measures import hubness

HUBS = 20
THUMBNAIL = 160


def worst_hubs(
    occurrences: Mapping[str, np.ndarray], names: Sequence[object] | None, thumbnails: Sequence[object] | None
) -> list[Hub]:
    """The targets that the raw search finds most often. occurrences: the k-occurrence [n] under each method."""
    return [
        Hub(
            row=int(row),
            name=str(names[row]) if names is not None else f"target {row}",
            found_by={label: int(occurrence[row]) for label, occurrence in occurrences.items()},
            thumbnail=None if thumbnails is None else _data_uri(thumbnails[row]),
        )
        for row in hubness.hubs(occurrences[RAW], HUBS)
    ]


def anti_hubs(occurrence: np.ndarray, names: Sequence[object] | None) -> list[str]:
    """Some of the targets that no query finds, by name. occurrence: the k-occurrence [n] of the raw search."""
    never = np.flatnonzero(occurrence == 0)
    some = never[np.linspace(0, len(never) - 1, min(len(never), HUBS)).astype(int)]
    return [str(names[row]) if names is not None else f"target {row}" for row in some.tolist()]


def _data_uri(path: str | os.PathLike[str] | None) -> str | None:
    """The image at `path`, at most 160 pixels wide and high, as text that a page can hold."""
    if not path:
        return None
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(Path(path)) as image:
            small = image.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"thumbnail {os.fspath(path)!r} cannot be read as an image: {error}") from None
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    content = io.BytesIO()
    small.save(content, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()
