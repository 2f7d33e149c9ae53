"""Functions of the standard library, embedded by a real model once, and their exact
corrected ranking."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

import hubplugin
import hubplugin_qdrant
from hubplugin import OffsetModel

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # read at import
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import stdlib_search

from tests.core.formulas import similarity

SHOUT = "def shout(text):\n    return text.upper() + '!'"


def embed(texts):
    return np.array(stdlib_search.embed(texts), np.float64)


@dataclass
class Search:
    """A search over `functions` under `model`, in float64 and straight from the
    definition."""

    functions: list[stdlib_search.Function]
    model: OffsetModel

    @property
    def questions(self):
        return [function.question for function in self.functions[:12]]

    def best(self, question, raw=False):
        """Return the names of the five best."""
        targets = embed([function.code for function in self.functions])
        (scores,) = similarity(embed([question]), targets, "cosine")
        if not raw:
            scores += self.model.offsets(targets.astype(np.float32))
        return [self.functions[row].name for row in np.argsort(-scores)[:5]]

    def check(self, ask):
        """Assert that `ask` finds the corrected ranking of each question, which is not
        the raw one."""
        found = [ask(question) for question in self.questions]
        assert found == [self.best(question) for question in self.questions]
        assert found != [self.best(question, raw=True) for question in self.questions]

    def check_shout(self, offset):
        """Assert that `offset` is that of SHOUT."""
        (expected,) = self.model.offsets(embed([SHOUT]).astype(np.float32))
        assert offset == pytest.approx(float(expected), abs=1e-6)


@pytest.fixture(scope="session")
def functions():
    found = stdlib_search.functions()
    embed([text for function in found for text in (function.code, function.question)])
    return found[:64]


def corrected(client, collection, using, functions):
    """Correct a collection of `functions`; so few that the guard would want more."""
    store = hubplugin_qdrant.open_store(client, collection, using)
    bank = stdlib_search.query_bank()
    done = hubplugin.apply(store, bank, "is", force=True)
    return Search(functions, done.model)


def stored_offsets(client, collection):
    """Return the offset that lies with each point: in its payload, or as the last
    component of its augmented vector."""
    offsets = {}
    for point in client.scroll(collection, limit=1000, with_vectors=True)[0]:
        under = (point.payload or {}).get("hub_offset")
        held = [*under.values()] if under else point.vector["hub_v1"]
        offsets[UUID(str(point.id))] = held[-1]
    return offsets
