"""Embedding models by name: `sentence-transformers:NAME`, `fastembed:NAME`, or any `module:function`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import logging
import os
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hubplugin.errors import InputError
from hubplugin.vectors import Progress, as_vectors

Embedder: TypeAlias = Callable[[Sequence[str]], Any]
"""Texts [b] in, their vectors [b, d] out: an array, a tensor or lists."""

EXPECTED = "expected sentence-transformers:NAME, fastembed:NAME or module:function"


@dataclass(frozen=True)
class Model:
    """A model that embeds queries. identity: what names it and, of a module, its source: texts that were embedded under
    another one are embedded anew. load: the embedder, once it is needed."""

    identity: str
    load: Callable[[], Embedder]


def model_of(spec: str) -> Model:
    """The model called `spec`; a model of a framework is loaded only when it is needed, since that takes seconds.

    Raises InputError for a module or function that is not there.
    """
    kind, colon, name = spec.partition(":")
    if not colon or not kind or not name:
        raise InputError(f"no embedding model is called {spec!r}: {EXPECTED}")
    if kind in FRAMEWORKS:
        return Model(spec, functools.partial(_of_framework, kind, name))
    function = _function(spec, kind, name)
    return Model(f"{spec} {_source(kind)}", lambda: function)


def _of_framework(kind: str, name: str) -> Embedder:
    try:
        return FRAMEWORKS[kind](name)
    except ModuleNotFoundError as error:
        raise InputError(f"{kind}:{name} needs a package that is missing ({error}); pip install {kind}") from None
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


def _source(module: str) -> str:
    """A name for what stands in the file of `module`."""
    file = inspect.getsourcefile(sys.modules[module]) if module in sys.modules else None
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


logger = logging.getLogger(__name__)


def folder() -> Path:
    """Where vectors are kept."""
    given = os.environ.get("HUBPLUGIN_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hubplugin")


class Cache:
    """The vectors of the model called `identity`. Where the disk refuses, nothing is found and nothing kept."""

    def __init__(self, identity: str):
        self._path = folder() / f"embeddings-{_digest(identity).hex()[:32]}.sqlite"
        self._failed = False

    def get(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Those of `texts` that are known, each with its vector [d]."""
        if not self._path.exists():
            return {}
        try:
            with closing(self._open()) as known:
                rows = ((text, known.execute(_GET, (_digest(text),)).fetchone()) for text in texts)
                return {text: np.frombuffer(row[0], np.float32) for text, row in rows if row is not None}
        except (sqlite3.Error, OSError, ValueError) as error:
            self._fail(error)
            return {}

    def put(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        """Keeps the vectors [b, d] of `texts`."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with closing(self._open()) as known, known:
                pairs = zip(texts, np.ascontiguousarray(vectors, np.float32), strict=True)
                known.executemany(_PUT, ((_digest(text), vector.tobytes()) for text, vector in pairs))
        except (sqlite3.Error, OSError) as error:
            self._fail(error)

    def _open(self) -> sqlite3.Connection:
        opened = sqlite3.connect(self._path, timeout=30)
        opened.execute(_MAKE)
        return opened

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("vectors of texts are not kept in %s: %s", self._path, error)


_MAKE = "CREATE TABLE IF NOT EXISTS vectors (text BLOB PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID"
_GET = "SELECT vector FROM vectors WHERE text = ?"
_PUT = "INSERT OR REPLACE INTO vectors VALUES (?, ?)"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


Embed: TypeAlias = Embedder | str | None
"""What embeds texts: a function from texts [b] to vectors [b, d], or its name: `sentence-transformers:NAME`,
`fastembed:NAME` or `module:function`. Under a name, vectors are kept on disk."""

BATCH = 256
"""Texts embedded at a time: progress is told after each, and what was embedded by then is kept."""


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
