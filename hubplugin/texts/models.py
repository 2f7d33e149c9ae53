"""Embedding models by name: `sentence-transformers:NAME`, `fastembed:NAME`, or any `module:function`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from hubplugin.errors import InputError

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


def _fastembed(name: str) -> Embedder:
    from fastembed import TextEmbedding

    model = TextEmbedding(name)
    return lambda texts: list(model.query_embed(list(texts)))


FRAMEWORKS: dict[str, Callable[[str], Embedder]] = {
    "sentence-transformers": _sentence_transformers,
    "fastembed": _fastembed,
}


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
