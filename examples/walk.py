"""The life of one correction on real data: record, diagnose, apply, evaluate, inspect, refit and roll back.

python examples/walk.py                                  # Qdrant in this process, in a folder
python examples/walk.py --url http://localhost:6333      # makes and deletes a collection on a server
python examples/walk.py --folder walk                    # keeps the report and the recorded queries
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from qdrant_client import QdrantClient, models

from hubplugin import Recorder
from hubplugin_qdrant import HubQdrantClient

DATA = Path(__file__).parent / "data"
COLLECTION = "hubplugin-walk"
RECORDED, LATER, MEASURED, COMPARED, CLICKED = 2000, 500, 300, 50, 400
"""The numbers of queries that are recorded before the first fit and after it, evaluated, compared side by side, and
clicked."""

FIRST = 1000
"""The number of targets in the gallery before it changes."""


class Walk:
    """A collection, and the commands and searches of its users. where: the arguments of a client."""

    def __init__(self, folder: Path, where: dict[str, Any]):
        self.folder, self.where = folder, where
        self.record = folder / "recorded"
        place = (
            str(where["url"]).replace("http", "qdrant", 1)
            if "url" in where
            else f"qdrant-local:{where['path']}"
        )
        self.store = f"{place}/{COLLECTION}?record={self.record}"
        read = {
            path.stem: np.load(path).astype(np.float32) for path in DATA.glob("*.npy")
        }
        self.asked, self.targets, self.measured = (
            read["bank_queries"],
            read["test_targets"],
            read["test_queries"],
        )
        self.names: list[str] = json.loads((DATA / "names.json").read_text())["test"]

    def typed(self, command: str, *arguments: object, status: int = 0) -> str:
        """Run a command on the store as a user would type it, show it, and return its output."""
        words = [command, self.store, *map(str, arguments)]
        print(f"\n$ hubplugin {' '.join(words)}", flush=True)
        run = subprocess.run(
            [sys.executable, "-m", "hubplugin", *words], capture_output=True, text=True
        )
        print(run.stdout.strip(), run.stderr.strip(), sep="\n", flush=True)
        if run.returncode != status:
            raise SystemExit(f"exit status {run.returncode}, expected {status}")
        if status:
            print(f"(exit status {status})")
        return run.stdout

    @contextlib.contextmanager
    def client(self, **options: Any) -> Iterator[HubQdrantClient]:
        """Open the client of the application. Local mode allows one process at a time."""
        client = HubQdrantClient(**self.where, record=self.record, **options)
        with contextlib.closing(client):
            yield client

    def fill(self, first: int, last: int) -> None:
        """Write targets as another program does, which knows nothing of hubplugin."""
        points = [
            models.PointStruct(
                id=row,
                vector=self.targets[row].tolist(),
                payload={"name": self.names[row]},
            )
            for row in range(first, last)
        ]
        with contextlib.closing(QdrantClient(**self.where)) as client:
            if not client.collection_exists(COLLECTION):
                vectors = models.VectorParams(
                    size=self.targets.shape[1], distance=models.Distance.COSINE
                )
                client.create_collection(COLLECTION, vectors)
            client.upload_points(COLLECTION, points, wait=True)

    def search(self, client: HubQdrantClient, queries: np.ndarray) -> None:
        for query in queries:
            client.query_points(COLLECTION, query.tolist(), limit=10)

    def click(self, client: HubQdrantClient, rows: range) -> None:
        """Search for the targets `rows`, and click each target that is found."""
        for row in rows:
            found = client.query_points(
                COLLECTION, self.measured[row].tolist(), limit=10
            ).points
            search = Recorder.id_of(
                self.measured[row]
            )  # goes to a browser with the results, and comes back with a click
            if row in [point.id for point in found]:
                client.click(COLLECTION, search, row)

    def first_ten(self, client: QdrantClient, queries: np.ndarray) -> list[list[Any]]:
        """Return the ids that each query finds."""
        found = (
            client.query_points(COLLECTION, query.tolist(), limit=10).points
            for query in queries
        )
        return [[point.id for point in points] for points in found]


def told(text: str) -> None:
    print(f"\n== {text}", flush=True)


def walk(one: Walk) -> None:
    told(
        f"The application searches a gallery of {FIRST} functions through the wrapped client, which records queries."
    )
    one.fill(0, FIRST)
    with one.client() as client:
        one.search(client, one.asked[:RECORDED])
    one.typed("bank")

    told("What is wrong with these searches?")
    one.typed("diagnose")

    told("Fit a correction on the recorded queries, and measure it in the store.")
    one.typed("apply")
    queries, truth = one.folder / "queries.npy", one.folder / "truth.npy"
    np.save(queries, one.measured[:MEASURED])
    np.save(truth, np.arange(MEASURED))
    given = (
        "--queries",
        queries,
        "--truth",
        truth,
        "--report",
        one.folder / "report.html",
    )
    one.typed("evaluate", *given)

    told("What do users see? Compare a plain client with a corrected one.")
    with one.client() as client:
        raw, corrected = (
            one.first_ten(each, one.measured[:COMPARED])
            for each in (client.raw, client)
        )
    same = [
        len({*before} & {*after}) / len(before)
        for before, after in zip(raw, corrected, strict=True)
    ]
    changed = [
        before[0] != after[0] for before, after in zip(raw, corrected, strict=True)
    ]
    print(
        f"{np.mean(same):.0%} of the results are the same. "
        f"{np.mean(changed):.0%} of the queries have another first result."
    )

    told("Another program adds targets, so an inspection asks for attention.")
    one.fill(FIRST, len(one.targets))
    one.typed("inspect", status=4)

    told(
        "Fit again, on newer queries and clicks. The new correction is activated if it is not worse."
    )
    with one.client() as client:
        one.search(client, one.asked[RECORDED : RECORDED + LATER])
        one.click(client, range(MEASURED, MEASURED + CLICKED))
    one.typed("bank")
    one.typed("refit", "--learn")
    one.typed("inspect")

    told(
        "Return to the previous model. Targets added since then get their offsets, too."
    )
    one.typed("rollback")
    one.typed("inspect")
    print(f"\nReport: {one.folder / 'report.html'}")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--url",
        help="a Qdrant server; by default Qdrant runs in this process, in a folder",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="a folder for the files; by default they are deleted at the end",
    )
    arguments = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        where = (
            {"url": arguments.url} if arguments.url else {"path": str(folder / "local")}
        )
        try:
            walk(Walk(folder, where))
        finally:
            with contextlib.closing(HubQdrantClient(**where)) as client:
                client.delete_collection(COLLECTION)  # and its metadata collection


if __name__ == "__main__":
    main()
