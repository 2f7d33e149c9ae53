"""What a service pays while it is corrected: python -m benchmarks.qdrant_live URL --points 100000

A thread searches a collection of its own, raw and by a plain client, twenty times a
second, and asks once a second how much of it is indexed. Meanwhile another process
applies a correction, fits it anew and rolls it back. Each task of a job, as progress
names it, gets a line: how long it took, what a search took then, and the least share that
was indexed. After each job come the 95th percentiles of ten seconds each. `--seconds FILE`
writes median and 95th percentile of each second, which `python -m
benchmarks.live_picture` draws. With `--nice`, jobs run at the lowest priority. With
`--copy`, they correct a copy, and the collection that is searched stays as it is.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from qdrant_client import QdrantClient, models

COLLECTION = "hubplugin-live"
DIM = 384
EVERY = 0.05
"""Seconds from one search to the next."""

WINDOW = 10
"""Seconds whose searches give one 95th percentile: of twenty searches in one second, it
would be hardly more than the slowest."""

TIMES = 3
"""The goal: how many times the quiet 95th percentile that of a window may be."""

JOB = """
import sys, time, numpy as np, hubplugin
url, job, bank = sys.argv[1:]
told = [""]

def progress(task, done, total):
    if task != told[0]:
        told[0] = task
        print(time.time(), task, flush=True)

store, compute = hubplugin.open_store(url), hubplugin.Compute(progress=progress)
if job in ("rollback", "remove"):
    getattr(hubplugin, job)(store, compute=compute)
else:
    given = {"force": True, "compute": compute}
    getattr(hubplugin, job)(store, np.load(bank), "dbsn", tau=0.05, **given)
"""


def draw(count: int, seed: int) -> np.ndarray:
    """Return clustered vectors [count, DIM] of unit length."""
    centres = np.random.default_rng(0).normal(size=(200, DIM))
    rng = np.random.default_rng(seed)
    vectors = centres[rng.integers(200, size=count)]
    vectors = vectors + 0.9 * rng.normal(size=(count, DIM))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors, np.float32)


def fill(client: QdrantClient, name: str, points: int, prevent: bool) -> None:
    client.delete_collection(name)
    client.delete_collection(f"{name}--hub")
    vector = models.VectorParams(size=DIM, distance=models.Distance.COSINE)
    client.create_collection(name, {"text": vector})
    rows = ({"n": row} for row in range(points))
    started = time.monotonic()
    vectors = {"text": draw(points, 1)}
    ids = range(points)
    client.upload_collection(name, vectors, rows, ids, batch_size=500, wait=True)
    rate = points / (time.monotonic() - started)
    print(f"uploaded {points:,} points at {rate:,.0f} a second", flush=True)
    wait_until_green(client, name)
    print(f"indexed after {time.monotonic() - started:.0f} s", flush=True)
    if prevent:
        changes = models.OptimizersConfigDiff(prevent_unoptimized=True)
        client.update_collection(name, optimizers_config=changes)


def wait_until_green(client: QdrantClient, name: str) -> None:
    """Return once the collection has been green for some seconds."""
    green = 0
    while green < 6:
        is_green = client.get_collection(name).status == "green"
        green = green + 1 if is_green else 0
        time.sleep(0.5)


class Load(threading.Thread):
    """Plain searches, one after the other: `took` has when each began, and its ms.

    indexed: Moments, and the vectors that were indexed by then.
    tasks: Moments, and the task that began then.
    """

    def __init__(
        self, search: Callable[[list[float]], object], count_indexed: Callable[[], int]
    ):
        super().__init__(daemon=True)
        self.tasks: list[tuple[float, str]] = []
        self._search = search
        self._count_indexed = count_indexed
        self._ended = threading.Event()
        self.took: list[tuple[float, float]] = []
        self.indexed: list[tuple[float, int]] = []

    def run(self) -> None:
        queries = draw(500, 2).tolist()
        due = time.time()
        while not self._ended.is_set():
            query = queries[len(self.took) % len(queries)]
            began = time.time()
            self._search(query)
            self.took.append((began, 1000 * (time.time() - began)))
            if len(self.took) % 20 == 0:
                self.indexed.append((time.time(), self._count_indexed()))
            due = max(due + EVERY, time.time())
            time.sleep(max(0.0, due - time.time()))

    def end(self) -> None:
        self._ended.set()
        self.join()

    def between(self, first: float, last: float) -> np.ndarray:
        return np.array([ms for began, ms in self.took if first <= began < last])


HEAD = f"{'':<34}{'seconds':>8}{'p50 ms':>9}{'p95 ms':>9}{'worst s p50':>12}{'least indexed':>15}"


def print_task(load: Load, name: str, first: float, last: float) -> None:
    """Print what searches took during a task: all, and the worst second's share."""
    ms = load.between(first, last)
    if not len(ms):
        return
    seconds = [load.between(at, at + 1) for at in np.arange(first, last)]
    medians = [np.median(each) for each in seconds if len(each) > 5]
    worst = max(medians, default=np.nan)
    middle, high = np.quantile(ms, [0.5, 0.95])
    indexed = [count for at, count in load.indexed if first <= at < last]
    least = min(indexed, default=load.indexed[-1][1])
    line = f"{name:<34}{last - first:>8.0f}{middle:>9.1f}{high:>9.1f}{worst:>12.1f}"
    print(f"{line}{least:>15,}", flush=True)


def print_windows(load: Load, name: str, quiet: float, first: float) -> None:
    """Print the 95th percentiles of the windows since `first`, and how many miss."""
    starts = np.arange(first, load.took[-1][0] - WINDOW, WINDOW)
    windows = [load.between(at, at + WINDOW) for at in starts]
    highs = np.array([np.quantile(ms, 0.95) for ms in windows if len(ms)])
    if not len(highs):
        print(f"{name}: took less than {WINDOW} s")
        return
    missed = int((highs > TIMES * quiet).sum())
    print(
        f"{name}: p95 of {WINDOW} s: median {np.median(highs):.1f}, worst "
        f"{highs.max():.1f} ms; {missed} of {len(highs)} above {TIMES} x {quiet:.1f} ms"
    )


def run_job(load: Load, command: list[str], job: str) -> float:
    """Run a job in a process of its own, print its tasks, and return when it ended."""
    began = time.time()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [line.split(maxsplit=1) for line in process.stdout]
    if process.returncode:
        raise SystemExit(f"{job} ended with status {process.returncode}")
    ended = time.time()
    moments = [(float(at), task.strip()) for at, task in lines]
    moments = [(began, "start"), *moments, (ended, "")]
    load.tasks += [(at, f"{job}: {task}") for at, task in moments if task]
    load.tasks.append((ended, ""))
    for (first, task), (last, _) in itertools.pairwise(moments):
        print_task(load, f"{job}: {task}", first, last)
    print_task(load, f"{job}: all", began, ended)
    return ended


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="of the server's REST, such as 127.0.0.1:6333")
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--storage", default="payload")
    parser.add_argument(
        "--options", default="", help="more of the store's URL, &pace=all"
    )
    parser.add_argument("--jobs", nargs="*", default=["apply", "refit", "rollback"])
    parser.add_argument("--nice", action="store_true", help="jobs give way")
    parser.add_argument("--copy", action="store_true", help="correct a copy")
    parser.add_argument("--keep", action="store_true", help="search what is there")
    parser.add_argument("--prevent-unoptimized", action="store_true")
    parser.add_argument("--seconds", help="a file of CSV")
    given = parser.parse_args(arguments)
    client = QdrantClient(url=f"http://{given.url}", timeout=600)
    print(
        f"Qdrant {client.info().version}, {platform.processor() or platform.machine()}"
    )
    corrected = COLLECTION
    if given.copy:
        corrected += "-copy"
    if not given.keep:
        for name in dict.fromkeys([COLLECTION, corrected]):
            fill(client, name, given.points, given.prevent_unoptimized)
    load = Load(
        lambda query: client.query_points(COLLECTION, query, "text", limit=10),
        lambda: client.get_collection(corrected).indexed_vectors_count or 0,
    )
    load.start()
    time.sleep(25)
    began = load.took[0][0]
    print(HEAD)
    since = time.time()
    print_task(load, "quiet", began + 5, since)
    quiet = float(np.quantile(load.between(began + 5, since), 0.95))
    url = f"qdrant://{given.url}/{corrected}?using=text&storage={given.storage}"
    command = [sys.executable, "-c", JOB, url + given.options]
    if given.nice:
        command = ["nice", "-n", "19", *command]
    with tempfile.TemporaryDirectory() as folder:
        for number, job in enumerate(given.jobs):
            bank = f"{folder}/{number}.npy"
            np.save(bank, draw(1000, 10 + number))
            first = time.time()
            ended = run_job(load, [*command, job, bank], job)
            print_windows(load, job, quiet, first)
            indexed = client.get_collection(corrected).indexed_vectors_count
            print(f"{job} left {indexed:,} vectors indexed", flush=True)
            wait_until_green(client, corrected)
            print_task(load, f"{job}: until green", ended, time.time())
    load.end()
    if given.seconds:
        write_seconds(load, began, given.seconds)


def write_seconds(load: Load, began: float, file: str) -> None:
    """Write a row for each second: what searches took, and the task that went on."""
    with open(file, "w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(["second", "searches", "p50", "p95", "task"])
        for at in np.arange(began, load.took[-1][0]):
            ms = load.between(at, at + 1)
            tasks = [task for since, task in load.tasks if since <= at]
            quantiles = ["", ""]
            if len(ms):
                quantiles = np.quantile(ms, [0.5, 0.95]).round(1).tolist()
            task = tasks[-1] if tasks else ""
            rows.writerow([round(at - began), len(ms), *quantiles, task])


if __name__ == "__main__":
    main()
