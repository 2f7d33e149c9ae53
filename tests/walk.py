"""How far a reader walks who follows one flow through the house: `python -m tests.walk`, part of `make lint`.

Each flow runs once on small fixed data. Of every function of the product that it calls, the first visit is noted; a
*move* is a step from one file to another between two first visits. The budgets bound the moves, and `--path` prints
the way, so that it also tells where to read.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).parent.parent
PRODUCT = tuple(f"{ROOT / folder}{os.sep}" for folder in ("hubplugin", "adapters"))
TARGETS, QUERIES, DIM = 640, 450, 48


@dataclass
class Walk:
    """The first visits of one flow, in their order: file and function."""

    visits: list[tuple[str, str]] = field(default_factory=list)

    @property
    def moves(self) -> int:
        return sum(one[0] != other[0] for one, other in pairwise(self.visits))

    def path(self) -> Iterator[str]:
        """A line for each stay in a file: the file, and the functions met there for the first time."""
        stays: list[tuple[str, list[str]]] = []
        for place, function in self.visits:
            if not stays or stays[-1][0] != place:
                stays.append((place, []))
            stays[-1][1].append(function)
        for place, functions in stays:
            yield f"    {place}: {', '.join(functions)}"


@contextmanager
def traced() -> Iterator[Walk]:
    """Notes the first visits of functions of the product, in all threads, until it is left."""
    walk, seen = Walk(), set[CodeType]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in seen:
            return
        seen.add(code)
        # Comprehensions and lambdas belong to the function around them, module bodies to their import.
        if code.co_filename.startswith(PRODUCT) and not code.co_name.startswith("<"):
            walk.visits.append(
                (str(Path(code.co_filename).relative_to(ROOT)), getattr(code, "co_qualname", code.co_name))
            )

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def vectors() -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors about a few centres: targets [640, d], and queries [450, d] at some distance from them."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(20, DIM))

    def some(rows: int, gap: float) -> np.ndarray:
        drawn = centres[rng.integers(0, len(centres), rows)] + 0.8 * rng.normal(size=(rows, DIM)) + gap
        return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)

    return some(TARGETS, 0.0), some(QUERIES, 0.5)


def import_all() -> None:
    """Imports the product, so that a walk does not show what importing runs."""
    for name in ("hubplugin", "hubplugin_faiss", "hubplugin_qdrant"):
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                with suppress(ImportError):  # of an extra that is not installed
                    importlib.import_module(module.name)


def fit_dbsn() -> Walk:
    import hubplugin

    targets, bank = vectors()
    with traced() as walk:
        hubplugin.fit(targets, bank, "dbsn")
    return walk


@cache
def apply_to_qdrant() -> tuple[Any, Walk]:
    """A collection in local mode, corrected, and the walk of `apply`."""
    from qdrant_client import QdrantClient, models

    import hubplugin_qdrant

    targets, bank = vectors()
    client = QdrantClient(":memory:")
    client.create_collection("photos", {"image": models.VectorParams(size=DIM, distance=models.Distance.COSINE)})
    client.upload_collection("photos", {"image": targets}, ids=range(TARGETS))
    # Local mode searches in Python; a calibration with few queries goes the same way as one with many.
    with mock.patch("hubplugin.calibration.QUERIES", 6), traced() as walk:
        hubplugin_qdrant.apply(client, "photos", bank, vector="image", storage="payload", method="dbsn")
    return client, walk


def query_points() -> Walk:
    from hubplugin_qdrant import HubQdrantClient

    client = HubQdrantClient.wrap(apply_to_qdrant()[0])
    query = vectors()[1][0].tolist()
    client.query_points("photos", query=query, using="image", limit=10)  # warm: the manifest is known from now on
    with traced() as walk:
        client.query_points("photos", query=query, using="image", limit=10)
    return walk


def upsert() -> Walk:
    from qdrant_client import models

    from hubplugin_qdrant import HubQdrantClient

    client = HubQdrantClient.wrap(apply_to_qdrant()[0])
    query = vectors()[1][0].tolist()
    client.query_points("photos", query=query, using="image", limit=10)
    with traced() as walk:
        client.upsert("photos", [models.PointStruct(id=TARGETS, vector={"image": query})])
    return walk


def upgrade() -> Walk:
    import faiss

    import hubplugin
    import hubplugin_faiss

    targets, bank = vectors()
    # "np": without the order of codes that polysemous searches need, which takes seconds and makes no other index.
    index = faiss.index_factory(DIM, f"IVF8,PQ{DIM}x4np", faiss.METRIC_INNER_PRODUCT)
    index.train(targets)
    index.add(targets)
    model = hubplugin.fit(targets, bank, "csls")
    with traced() as walk:
        hubplugin_faiss.upgrade(index, model)
    return walk


def refit() -> Walk:
    import faiss

    import hubplugin

    targets, bank = vectors()
    with tempfile.TemporaryDirectory() as folder:
        index = faiss.IndexFlatIP(DIM)
        index.add(targets)
        faiss.write_index(index, f"{folder}/photos.faiss")
        store = hubplugin.open_store(f"faiss:{folder}/photos.faiss?metric=cosine")
        hubplugin.apply(store, bank)
        with traced() as walk:
            hubplugin.refit(store, bank[::-1].copy())
    return walk


FLOWS: dict[str, tuple[Callable[[], Walk], int]] = {
    "fit dbsn": (fit_dbsn, 24),
    "query_points, warm": (query_points, 13),
    "upsert of one point": (upsert, 30),
    "upgrade of IVF8,PQ48x4": (upgrade, 76),
    "hubplugin_qdrant.apply": (lambda: apply_to_qdrant()[1], 184),
    "refit": (refit, 248),
}
"""Each flow, and the moves that it may take: no more than now. The goal of a refit is 190."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", action="store_true", help="print the way of each flow")
    shows_path = parser.parse_args().path
    warnings.simplefilter("ignore")
    import_all()
    over = []
    for name, (flow, budget) in FLOWS.items():
        walk = flow()
        files = {place for place, _ in walk.visits}
        print(f"{name}: {walk.moves} moves of {budget}, {len(walk.visits)} functions in {len(files)} files")
        if shows_path:
            print("\n".join(walk.path()))
        if walk.moves > budget:
            over.append(name)
    if over:
        raise SystemExit(
            f"longer walks than their budgets: {', '.join(over)}; `python -m tests.walk --path` shows the way"
        )


if __name__ == "__main__":
    main()
