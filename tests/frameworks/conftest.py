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

    def scores(
        self, question: str, package: str | None = None, raw: bool = False
    ) -> dict[str, float]:
        """The score of each name, best first."""
        texts = [function.code for function in self.functions]
        targets = np.array(stdlib_search.embed(texts), np.float64)
        query = np.array(stdlib_search.embed([question]), np.float64)[0]
        query /= np.linalg.norm(query)
        similarities = targets @ query / np.linalg.norm(targets, axis=1)
        scores = similarities + (
            0 if raw else self.model.offsets(targets.astype(np.float32))
        )
        found = {
            function.name: float(score)
            for function, score in zip(self.functions, scores, strict=True)
        }
        kept = [
            name for name in found if package is None or name.startswith(f"{package}.")
        ]
        return {
            name: found[name] for name in sorted(kept, key=lambda name: -found[name])
        }

    def best(self, question: str, **how) -> list[str]:
        return list(self.scores(question, **how))[:5]


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
