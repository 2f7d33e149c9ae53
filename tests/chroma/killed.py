"""Kills `apply` on a Chroma collection at many moments: python killed.py FOLDER KILLS, where FOLDER holds `photos`.

After each kill a search must be entirely raw or entirely corrected, and the next run must finish. Prints how often it
was which.
"""

import collections
import os
import signal
import sys
import time
import warnings

import chromadb
import numpy as np

import hubplugin

warnings.simplefilter("ignore")


def child(work) -> int:
    """`work` in a process of its own, since Chroma's threads do not survive a fork: nothing is opened before."""
    process = os.fork()
    if process == 0:
        work()
        os._exit(0)
    return process


def applied(folder: str) -> None:
    store = hubplugin.open_store(f"chroma:{folder}/photos")
    hubplugin.apply(store, hubplugin.load(f"{folder}/next.hub"), force=True)


def state(folder: str) -> str:
    """What a search answers from: the ranking itself is compared with the model's, in float64."""
    store = hubplugin.open_store(f"chroma:{folder}/photos")
    queries, vectors = np.load(f"{folder}/queries.npy"), np.load(f"{folder}/vectors.npy").astype(np.float64)
    found, similarity = store.search(queries, 10), queries.astype(np.float64) @ vectors.T
    offsets = hubplugin.load(f"{folder}/next.hub").offsets(vectors.astype(np.float32)).astype(np.float64)
    for name, scores in (("raw", similarity), ("corrected", similarity + offsets)):
        nearest = np.sort(1 - scores, axis=1)[:, :10]
        if np.abs(nearest - np.array(found.scores)).max() < 1e-5:
            return name
    raise AssertionError("a search is neither raw nor corrected")


def told(folder: str) -> None:
    with open(f"{folder}/told", "w") as file:
        file.write(state(folder))


def looked(folder: str) -> str:
    assert os.waitpid(child(lambda: told(folder)), 0)[1] == 0
    return open(f"{folder}/told").read()


def main(folder: str, kills: int) -> None:
    rng, seen = np.random.default_rng(5), collections.Counter()
    start = time.monotonic()
    assert os.waitpid(child(lambda: applied(folder)), 0)[1] == 0
    whole = time.monotonic() - start
    assert looked(folder) == "corrected"
    for _ in range(kills):
        assert os.waitpid(child(lambda: hubplugin.open_store(f"chroma:{folder}/photos").remove()), 0)[1] == 0
        process, end = child(lambda: applied(folder)), time.monotonic() + rng.uniform(0.1, 1.0) * whole
        while time.monotonic() < end and not os.waitpid(process, os.WNOHANG)[0]:
            time.sleep(0.001)
        try:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
            seen["had ended"] += 1
        seen[looked(folder)] += 1
        assert os.waitpid(child(lambda: applied(folder)), 0)[1] == 0
        assert looked(folder) == "corrected"
    assert os.waitpid(child(lambda: hubplugin.open_store(f"chroma:{folder}/photos").remove()), 0)[1] == 0
    assert looked(folder) == "raw"
    print(
        dict(seen), f"run {whole:.1f} s", [each.name for each in chromadb.PersistentClient(folder).list_collections()]
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
