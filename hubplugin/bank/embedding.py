"""Embedding models by name: `sentence-transformers:NAME`, `fastembed:NAME`, or any `module:function`."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hubplugin.errors import InputError
from hubplugin.vectors import Progress, as_vectors, one_line

logger = logging.getLogger(__name__)

Embedder: TypeAlias = Callable[[Sequence[str]], Any]
"""Texts [b] in, their vectors [b, d] out: an array, a tensor or lists."""

Embed: TypeAlias = Embedder | str | None
"""What embeds texts, or its name: `sentence-transformers:NAME`, `fastembed:NAME` or `module:function`."""

EXPECTED = "expected sentence-transformers:NAME, fastembed:NAME or module:function"

DOCUMENTS = "-documents"
"""Behind the name of a framework: its model embeds documents, which some models tell from queries."""

BATCH = 256
"""Texts embedded at a time: progress is told after each."""


def embedder_of(spec: str) -> Embedder:
    """The model called `spec`. Raises InputError for a package, a model, a module or a function that is not there."""
    kind, _, name = spec.partition(":")
    if not kind or not name:
        raise InputError(f"no embedding model is called {spec!r}: {EXPECTED}")
    framework = kind.removesuffix(DOCUMENTS)
    if framework not in FRAMEWORKS:
        return _import_function(spec, kind, name)
    try:
        return FRAMEWORKS[framework](name, kind.endswith(DOCUMENTS))
    except ModuleNotFoundError as error:
        raise InputError(
            f"{kind}:{name} needs a package that is missing ({error}); pip install {framework}"
        ) from None
    except Exception as error:  # of whatever it fetches a model with
        raise InputError(
            f"{kind}:{name} cannot be loaded: {one_line(error)[:300]}"
        ) from None


def _load_sentence_transformers(name: str, documents: bool) -> Embedder:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(name)
    # From 5.0 on there is a method for either, with the model's own prompt.
    encode = getattr(
        model, "encode_document" if documents else "encode_query", model.encode
    )
    return lambda texts: encode(list(texts), show_progress_bar=False)


def _load_fastembed(name: str, documents: bool) -> Embedder:
    from fastembed import TextEmbedding

    model = TextEmbedding(name)
    embed = model.passage_embed if documents else model.query_embed
    return lambda texts: list(embed(list(texts)))


FRAMEWORKS = {
    "sentence-transformers": _load_sentence_transformers,
    "fastembed": _load_fastembed,
}


def for_documents(spec: str) -> str:
    """The model called `spec` as it embeds documents, where it tells them from queries."""
    kind, _, name = spec.partition(":")
    return f"{kind}{DOCUMENTS}:{name}" if kind in FRAMEWORKS else spec


def _import_function(spec: str, module: str, name: str) -> Embedder:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(
            0, str(Path.cwd())
        )  # as `python -m` does, and a command does not
    try:
        function: Any = attrgetter(name)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise InputError(f"{spec!r}: {error}; {EXPECTED}") from None
    except Exception as error:  # the function is not there, or whatever the module does when it is imported
        raise InputError(
            f"{spec!r}: importing it raised {type(error).__name__}: {one_line(error)}"
        ) from None
    if not callable(function):
        raise InputError(
            f"{spec!r} is {type(function).__name__} and no function; it is called with a list of texts"
        )
    embedder: Embedder = function
    return embedder


def embed_texts(
    texts: Sequence[str],
    embed: Embedder | str,
    name: str = "query bank",
    progress: Progress | None = None,
    dim: int | None = None,
) -> np.ndarray:
    """Embeds texts. A text that stands there twice is embedded once.

    Args:
        texts: the texts.
        embed: a function, or the name of a model.
        name: what errors call the texts.
        progress: is told.
        dim: how many dimensions the gallery has; a model of others is refused after its first batch.

    Returns:
        float32 [len(texts), d].

    Raises:
        InputError: the model cannot be had, or returns no matrix of so many rows.
    """
    embedder = embedder_of(embed) if isinstance(embed, str) else embed
    row_of = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    different, parts = list(row_of), list[np.ndarray]()
    logger.info(
        "%s: %d texts, %d of them to be embedded", name, len(texts), len(different)
    )
    for start in range(0, len(different), BATCH):
        batch = different[start : start + BATCH]
        batch_vectors = _vectors_of(batch, embedder, name)
        if dim not in (None, batch_vectors.shape[1]):
            other = "its first batch" if parts else "the gallery"
            raise InputError(
                f"{name}: the model makes vectors of {batch_vectors.shape[1]} dimensions, {other} has {dim}; "
                "name the model that embedded the gallery"
            )
        dim = batch_vectors.shape[1]
        parts.append(batch_vectors)
        if progress is not None:
            progress("embedding texts", start + len(batch), len(different))
    vectors: np.ndarray = np.concatenate(parts)[[row_of[text] for text in texts]]
    return vectors


def _vectors_of(texts: list[str], embedder: Embedder, name: str) -> np.ndarray:
    try:
        output = embedder(texts)
    except InputError:
        raise
    except Exception as error:  # whatever a model raises
        reason = one_line(error)[:300]
        raise InputError(
            f"{name}: embedding its texts raised {type(error).__name__}: {reason}"
        ) from error
    vectors = as_vectors(output, f"{name}, as it was embedded").array()
    if len(vectors) != len(texts):
        raise InputError(
            f"{name}: of {len(texts)} texts the model made {len(vectors)} vectors; expected one each"
        )
    return vectors
