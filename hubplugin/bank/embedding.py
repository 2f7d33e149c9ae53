"""Embedding models by name: `sentence-transformers:NAME`, or any `module:function`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeAlias

import numpy as np

from hubplugin.errors import InputError
from hubplugin.vectors import Progress, as_vectors, one_line

Embedder: TypeAlias = Callable[[Sequence[str]], Any]
"""A function from texts [b] to vectors [b, d]: an array, a tensor or lists."""

Embed: TypeAlias = Embedder | str | None
"""A model that embeds texts, or its name.

The name is `sentence-transformers:NAME` or `module:function`."""

TRANSFORMERS = "sentence-transformers"
"""The word before the colon in the name of a sentence-transformers model."""

BATCH = 256
"""The number of texts in one batch; progress is reported after each batch."""


def embedder_of(spec: str) -> Embedder:
    """Return the model called `spec`.

    Raises InputError if its package, model, module or function does not exist.
    """
    kind, _, name = spec.partition(":")
    if not name:
        raise InputError(
            f"no embedding model is called {spec!r}: expected {kind}:FUNCTION or "
            f"{TRANSFORMERS}:NAME"
        )
    try:
        if kind == TRANSFORMERS:
            return _load_model(name)
        if str(Path.cwd()) not in sys.path:
            # `python -m` adds the working directory, and a command does not.
            sys.path.insert(0, str(Path.cwd()))
        function: Embedder = resolve_name(spec)
    except Exception as error:  # whatever a module or the loading of a model raises
        raise InputError(
            f"{spec!r} cannot be loaded: {type(error).__name__}: {one_line(error)[:300]}"
        ) from None
    return function


def _load_model(name: str) -> Embedder:
    """Return a function that embeds queries with a sentence-transformers model."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(name)
    # From 5.0 on there is a method for queries, with the model's own prompt.
    encode = getattr(model, "encode_query", model.encode)
    return lambda texts: encode(list(texts), show_progress_bar=False)


def embed_texts(
    texts: Sequence[str],
    embed: Embedder | str,
    name: str = "query bank",
    progress: Progress | None = None,
    dim: int | None = None,
) -> np.ndarray:
    """Embed texts, each distinct text once.

    Args:
        texts: The texts.
        embed: A function, or the name of a model.
        name: The name of the texts in error messages.
        progress: Called after each batch.
        dim: The number of dimensions of the gallery. A model with another number is
            refused after its first batch.

    Returns:
        The vectors, float32 [len(texts), d].

    Raises:
        InputError: The model cannot be loaded or fails, or does not return one vector
            for each text.
    """
    if isinstance(embed, str):
        embed = embedder_of(embed)
    distinct = list(dict.fromkeys(texts))
    count = len(distinct)
    batches: list[np.ndarray] = []
    for start in range(0, count, BATCH):
        batch = distinct[start : start + BATCH]
        try:
            output = embed(batch)
        except Exception as error:  # whatever a model raises
            raise InputError(
                f"{name}: embedding its texts raised {type(error).__name__}: "
                f"{one_line(error)[:300]}"
            ) from error
        vectors = as_vectors(output, f"{name}, as it was embedded").array()
        dim = dim or vectors.shape[1]  # without a gallery, that of the first batch
        if vectors.shape != (len(batch), dim):
            raise InputError(
                f"{name}: the model made {len(vectors)} vectors of {vectors.shape[1]} "
                f"dimensions from {len(batch)} texts; expected one of {dim} dimensions "
                "for each text: name the model that embedded the gallery"
            )
        batches.append(vectors)
        if progress is not None:
            progress("embedding texts", start + len(batch), count)
    row_of = {text: row for row, text in enumerate(distinct)}
    embedded: np.ndarray = np.concatenate(batches)[[row_of[text] for text in texts]]
    return embedded
