"""From a log to a correction that is looked after: every step of one collection's life, on real data.

python examples/walk.py                                  # Qdrant in this process, in a folder
python examples/walk.py --url http://localhost:6333      # makes and deletes a collection on a server
python examples/walk.py --folder walk                    # keeps the report and what was recorded
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
"""How many queries are asked and recorded before the first fit, how many after it; how many are evaluated, how many are
searched raw and corrected, side by side, and in how many somebody clicks what was looked for."""

FIRST = 1000
"""How many targets the gallery has before it changes."""


class Walk:
    """The collection, and what is typed and asked on the way. where: the arguments of a client."""

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
        """Runs a command on the store as it is typed, shows it, and returns what it prints."""
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
        """What the application searches with; local mode lets one process in at a time."""
        client = HubQdrantClient(**self.where, record=self.record, **options)
        with contextlib.closing(client):
            yield client

    def fill(self, first: int, last: int) -> None:
        """Another program, which knows nothing of hubplugin, writes targets."""
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
        """The queries that look for the targets `rows` are asked, and whoever is shown what he looks for clicks it."""
        for row in rows:
            found = client.query_points(
                COLLECTION, self.measured[row].tolist(), limit=10
            ).points
            search = Recorder.id_of(
                self.measured[row]
            )  # goes to a browser beside what was found, and comes back
            if row in [point.id for point in found]:
                client.click(COLLECTION, search, row)

    def first_ten(self, client: QdrantClient, queries: np.ndarray) -> list[list[Any]]:
        """The ids that each query finds."""
        found = (
            client.query_points(COLLECTION, query.tolist(), limit=10).points
            for query in queries
        )
        return [[point.id for point in points] for points in found]


def told(text: str) -> None:
    print(f"\n== {text}", flush=True)


def walk(one: Walk) -> None:
    told(
        f"a gallery of {FIRST} functions, which the application searches through the wrapped client, recording"
    )
    one.fill(0, FIRST)
    with one.client() as client:
        one.search(client, one.asked[:RECORDED])
    one.typed("bank")

    told("what is wrong with these searches?")
    one.typed("diagnose")

    told("a correction from the record, and what it does in place")
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

    told("what users see: the same searches by a plain client and by a corrected one")
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
        f"{np.mean(same):.0%} of the results are the same, {np.mean(changed):.0%} of the first places others"
    )

    told("another program adds targets, and an inspection complains")
    one.fill(FIRST, len(one.targets))
    one.typed("inspect", status=4)

    told(
        "a new fit, on what has been asked since, too, and what was clicked; it is activated if it is not worse"
    )
    with one.client() as client:
        one.search(client, one.asked[RECORDED : RECORDED + LATER])
        one.click(client, range(MEASURED, MEASURED + CLICKED))
    one.typed("bank")
    one.typed("refit", "--learn")
    one.typed("inspect")

    told(
        "and back to the model before, which gives the targets that came since their offsets, too"
    )
    one.typed("rollback")
    one.typed("inspect")
    print(f"\nthe report: {one.folder / 'report.html'}")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--url",
        help="a Qdrant server; by default Qdrant runs in this process, in a folder",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where files are kept; by default they are deleted at the end",
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
