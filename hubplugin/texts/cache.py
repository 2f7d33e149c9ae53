"""Vectors of texts that were embedded before, on disk: a text is embedded once by a model.

A SQLite file for each model in $HUBPLUGIN_CACHE, or the user's folder for caches. It has digests of texts, not texts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

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
