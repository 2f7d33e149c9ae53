"""A kill at any moment of `apply` leaves searches entirely raw or entirely corrected; the next run finishes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hubplugin

pytestmark = pytest.mark.slow

KILLS = 20


def test_twenty_kills(tmp_path, rng):
    vectors = rng.normal(size=(8, 24))[rng.integers(8, size=2000)] + rng.normal(size=(2000, 24))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    filling = (
        "import chromadb, numpy as np, sys; v = np.load(sys.argv[1] + '/vectors.npy'); "
        "c = chromadb.PersistentClient(sys.argv[1]).create_collection('photos', configuration="
        "{'hnsw': {'space': 'cosine', 'ef_search': 2000}}); "
        "c.add(ids=[str(n) for n in range(len(v))], embeddings=v)"
    )
    np.save(tmp_path / "vectors.npy", vectors)
    np.save(tmp_path / "queries.npy", vectors[:20])
    hubplugin.fit(vectors, vectors[:300] + 0.05, "is").save(tmp_path / "next.hub")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", filling, str(tmp_path)], check=True, env=environment)
    script = Path(__file__).with_name("killed.py")
    result = subprocess.run(
        [sys.executable, script, str(tmp_path), str(KILLS)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "'raw'" in result.stdout, result.stdout  # a kill came before the switch
    assert result.stdout.endswith("['photos']\n"), result.stdout
