"""Texts as a bank of vectors: embedded in batches, each text once."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from hubplugin.errors import InputError
from hubplugin.texts.cache import Cache
from hubplugin.texts.files import read_texts
from hubplugin.texts.models import Embedder, model_of
from hubplugin.vectors import Progress, VectorLike, Vectors, as_vectors

logger = logging.getLogger(__name__)

Embed: TypeAlias = Embedder | str | None
"""What embeds texts: a function from texts [b] to vectors [b, d], or its name: `sentence-transformers:NAME`,
`fastembed:NAME` or `module:function`. Under a name, vectors are kept on disk."""

BATCH = 256
"""Texts embedded at a time: progress is told after each, and what was embedded by then is kept."""


def vectors_of(
    bank: VectorLike | Sequence[str], embed: Embed, name: str = "query bank", progress: Progress | None = None
) -> Vectors:
    """`bank` as vectors; with `embed`, it is texts or a file of texts.

    Raises InputError as `embedded`, `read_texts` and `as_vectors` do.
    """
    if embed is None:
        return as_vectors(bank, name)  # type: ignore[arg-type]
    if isinstance(bank, (str, os.PathLike)):
        bank = read_texts(os.fspath(bank)).texts
    texts = list(bank)  # type: ignore[arg-type]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{name}: embed= is for texts; vectors are passed without it")
    return as_vectors(embedded(texts, embed, name, progress), name)  # type: ignore[arg-type]


def embedded(
    texts: Sequence[str],
    embed: Embedder | str,
    name: str = "query bank",
    progress: Progress | None = None,
    dim: int | None = None,
) -> np.ndarray:
    """The vectors of `texts`: float32 [len(texts), d]. A text that stands there twice is embedded once.

    dim: how many dimensions the gallery has; a model of others is refused after its first batch.
    Raises InputError for a model that cannot be had, and for what it returns if that is no matrix of so many rows.
    """
    model = model_of(embed) if isinstance(embed, str) else None
    cache = None if model is None else Cache(model.identity)
    known = {} if cache is None else cache.get(texts)
    lacking = [text for text in dict.fromkeys(texts) if text not in known]
    embedder = embed if model is None else model.load() if lacking else None
    logger.info("%s: %d texts, %d of them to be embedded", name, len(texts), len(lacking))
    for start in range(0, len(lacking), BATCH):
        batch = lacking[start : start + BATCH]
        vectors = _batch(embedder, batch, name)
        _require_dim(vectors.shape[1], dim, name)
        if cache is not None:
            cache.put(batch, vectors)
        known.update(zip(batch, vectors, strict=True))
        if progress is not None:
            progress("embedding texts", start + len(batch), len(lacking))
    found = [known[text] for text in texts]
    _require_dim(len(found[0]), dim, name)
    if len({len(vector) for vector in found}) > 1:
        raise InputError(f"{name}: its texts were embedded in vectors of different dimensions; expected one model")
    return np.stack(found)


def _require_dim(found: int, dim: int | None, name: str) -> None:
    if dim is not None and found != dim:
        raise InputError(
            f"{name}: the model makes vectors of {found} dimensions, the gallery has {dim}; "
            "name the model that embedded the gallery"
        )


def _batch(embedder: Any, texts: Sequence[str], name: str) -> np.ndarray:
    try:
        made = embedder(list(texts))
    except InputError:
        raise
    except Exception as error:  # whatever a model raises
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{name}: embedding its texts raised {type(error).__name__}: {reason}") from error
    vectors = as_vectors(made, f"{name}, as it was embedded").array()
    if len(vectors) != len(texts):
        raise InputError(f"{name}: of {len(texts)} texts the model made {len(vectors)} vectors; expected one each")
    return vectors
