"""A kill at any moment of `apply` leaves searches entirely raw or entirely corrected; the next run finishes."""

import collections
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import hubplugin

pytestmark = pytest.mark.slow

KILLS = 20


def start(folder, *steps):
    """`steps` in an interpreter of their own: threads of Chroma, and what it holds of a folder, end with a process."""
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("killed.py"), folder, *steps],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_lines(process, *expected):
    """What `process` says to its end, which begins with the lines `expected`."""
    output, errors = process.communicate()
    state = f"status {process.returncode}, {output!r}\n{errors}"
    assert process.returncode == 0, state
    assert output.splitlines()[: len(expected)] == [*expected], state
    return output.splitlines()


def test_twenty_kills(tmp_path, rng):
    vectors = rng.normal(size=(8, 24))[rng.integers(8, size=2000)] + rng.normal(
        size=(2000, 24)
    )
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(
        np.float32
    )
    filling = (
        "import chromadb, numpy as np, sys; v = np.load(sys.argv[1] + '/vectors.npy'); "
        "c = chromadb.PersistentClient(sys.argv[1]).create_collection('photos', configuration="
        "{'hnsw': {'space': 'cosine', 'ef_search': 2000}}); "
        "c.add(ids=[str(n) for n in range(len(v))], embeddings=v)"
    )
    np.save(tmp_path / "vectors.npy", vectors)
    np.save(tmp_path / "queries.npy", vectors[:20])
    hubplugin.fit(vectors, vectors[:300] + 0.05, "is").save(tmp_path / "next.hub")
    subprocess.run([sys.executable, "-c", filling, tmp_path], check=True)
    whole = start(tmp_path, "look", "apply")
    assert whole.stdout.readline() == "raw\n", whole.communicate()
    begun = time.monotonic()
    read_lines(whole, "applied")
    seconds, seen = time.monotonic() - begun, collections.Counter()
    for _ in range(KILLS):
        killed = start(tmp_path, "look", "remove", "apply")
        before = [killed.stdout.readline() for _ in range(2)]
        assert before == ["corrected\n", "photos\n"], (
            before,
            killed.poll(),
            killed.communicate(),
        )
        time.sleep(rng.uniform(0.05, 0.9) * seconds)
        killed.kill()
        killed.communicate()
        seen["had ended" if killed.returncode == 0 else "killed"] += 1
        state, _ = read_lines(start(tmp_path, "look", "apply"))
        seen[state] += 1
    read_lines(start(tmp_path, "look", "remove"), "corrected", "photos")
    read_lines(start(tmp_path, "look"), "raw")
    assert seen["raw"], seen  # a kill came before the switch
