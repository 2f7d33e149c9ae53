"""Functions of the standard library, embedded by a real model once, and their exact corrected ranking."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin import OffsetModel

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # read at import
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import stdlib_search

SHOUT = "def shout(text):\n    return text.upper() + '!'"


@dataclass
class Search:
    """What a search over `functions` should find under `model`, in float64 and straight from the definition."""

    functions: list[stdlib_search.Function]
    model: OffsetModel

    @property
    def questions(self) -> list[str]:
        return [function.question for function in self.functions[:12]]

    def offset(self, text: str) -> float:
        return float(
            self.model.offsets(np.array(stdlib_search.embed([text]), np.float32))[0]
        )

    def best(self, question: str, raw: bool = False) -> list[str]:
        """The names of the five best."""
        texts = [function.code for function in self.functions]
        targets = np.array(stdlib_search.embed(texts), np.float64)
        query = np.array(stdlib_search.embed([question]), np.float64)[0]
        lengths = np.linalg.norm(targets, axis=1) * np.linalg.norm(query)
        scores = targets @ query / lengths
        if not raw:
            scores += self.model.offsets(targets.astype(np.float32))
        return [self.functions[row].name for row in np.argsort(-scores)[:5]]


@pytest.fixture(scope="session")
def functions() -> list[stdlib_search.Function]:
    found = stdlib_search.functions()
    stdlib_search.embed(
        [text for function in found for text in (function.code, function.question)]
    )
    return found[:64]


def corrected(
    client: QdrantClient,
    collection: str,
    using: str,
    functions: list[stdlib_search.Function],
) -> Search:
    """Corrects a collection of `functions`; so few that the guard would want more."""
    hubplugin.apply(
        hubplugin_qdrant.open_store(client, collection, using),
        stdlib_search.query_bank(),
        "is",
        force=True,
    )
    found = hubplugin_qdrant.open_store(client, collection, vector=using).correction()
    assert found is not None
    return Search(functions, found.model)


def stored_offsets(client: QdrantClient, collection: str) -> dict[UUID, float]:
    """The offset that lies with each point: in its payload, or as the last component of its augmented vector."""
    points, _ = client.scroll(collection, limit=1000, with_vectors=True)

    def offset(point: models.Record) -> float:
        under = (point.payload or {}).get("hub_offset")
        return next(iter(under.values())) if under else point.vector["hub_v1"][-1]

    return {UUID(str(point.id)): offset(point) for point in points}
