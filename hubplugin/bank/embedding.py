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
from hubplugin.vectors import Progress, as_vectors

Embedder: TypeAlias = Callable[[Sequence[str]], Any]
"""Texts [b] in, their vectors [b, d] out: an array, a tensor or lists."""

EXPECTED = "expected sentence-transformers:NAME, fastembed:NAME or module:function"


def embedder_of(spec: str) -> Embedder:
    """The model called `spec`. Raises InputError for a package, a model, a module or a function that is not there."""
    kind, colon, name = spec.partition(":")
    if not colon or not kind or not name:
        raise InputError(f"no embedding model is called {spec!r}: {EXPECTED}")
    return _of_framework(kind, name) if kind in FRAMEWORKS else _function(spec, kind, name)


def _of_framework(kind: str, name: str) -> Embedder:
    try:
        return FRAMEWORKS[kind](name)
    except ModuleNotFoundError as error:
        package = kind.removesuffix("-documents")
        raise InputError(f"{kind}:{name} needs a package that is missing ({error}); pip install {package}") from None
    except Exception as error:  # of whatever it fetches a model with
        raise InputError(f"{kind}:{name} cannot be loaded: {' '.join(str(error).split())[:300]}") from None


def _sentence_transformers(name: str) -> Embedder:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(name)
    encode = getattr(model, "encode_query", model.encode)  # from 5.0 on, with the model's own prompt for queries
    return lambda texts: encode(list(texts), show_progress_bar=False)


def _sentence_transformers_documents(name: str) -> Embedder:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(name)
    encode = getattr(model, "encode_document", model.encode)
    return lambda texts: encode(list(texts), show_progress_bar=False)


def _fastembed_documents(name: str) -> Embedder:
    from fastembed import TextEmbedding

    model = TextEmbedding(name)
    return lambda texts: list(model.passage_embed(list(texts)))


def _fastembed(name: str) -> Embedder:
    from fastembed import TextEmbedding

    model = TextEmbedding(name)
    return lambda texts: list(model.query_embed(list(texts)))


FRAMEWORKS: dict[str, Callable[[str], Embedder]] = {
    "sentence-transformers": _sentence_transformers,
    "fastembed": _fastembed,
    "sentence-transformers-documents": _sentence_transformers_documents,
    "fastembed-documents": _fastembed_documents,
}


def for_documents(spec: str) -> str:
    """The model called `spec` as it embeds documents, where it tells them from queries."""
    kind, _, name = spec.partition(":")
    return f"{kind}-documents:{name}" if f"{kind}-documents" in FRAMEWORKS else spec


def _function(spec: str, module: str, name: str) -> Embedder:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, and a command does not
    try:
        found = attrgetter(name)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise InputError(f"{spec!r}: {error}; {EXPECTED}") from None
    except AttributeError as error:
        raise InputError(f"{spec!r}: {error}") from None
    except Exception as error:  # whatever the module does when it is imported
        raise InputError(f"{spec!r}: importing it raised {type(error).__name__}: {error}") from None
    if not callable(found):
        raise InputError(f"{spec!r} is {type(found).__name__} and no function; it is called with a list of texts")
    embedder: Embedder = found
    return embedder


logger = logging.getLogger(__name__)

Embed: TypeAlias = Embedder | str | None
"""What embeds texts: a function from texts [b] to vectors [b, d], or its name: `sentence-transformers:NAME`,
`fastembed:NAME` or `module:function`."""

BATCH = 256
"""Texts embedded at a time: progress is told after each."""


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
    embedder = embedder_of(embed) if isinstance(embed, str) else embed
    different = list(dict.fromkeys(texts))
    logger.info("%s: %d texts, %d of them to be embedded", name, len(texts), len(different))
    parts: list[np.ndarray] = []
    for start in range(0, len(different), BATCH):
        batch = different[start : start + BATCH]
        parts.append(_batch(embedder, batch, name))
        found = parts[-1].shape[1]
        if dim is not None and found != dim:
            raise InputError(
                f"{name}: the model makes vectors of {found} dimensions, the gallery has {dim}; "
                "name the model that embedded the gallery"
            )
        if found != parts[0].shape[1]:
            raise InputError(f"{name}: its texts were embedded in vectors of different dimensions; expected one model")
        if progress is not None:
            progress("embedding texts", start + len(batch), len(different))
    place = {text: row for row, text in enumerate(different)}
    vectors: np.ndarray = np.concatenate(parts)[[place[text] for text in texts]]
    return vectors


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
