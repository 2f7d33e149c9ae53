"""A run that the test kills: `python -m tests.pgvector.killed URL SEED`."""

import sys

import numpy as np

import hubplugin
import hubplugin_pgvector.store

if __name__ == "__main__":
    hubplugin_pgvector.store.PAGE = 50
    store = hubplugin.open_store(sys.argv[1])
    rng = np.random.default_rng(int(sys.argv[2]))
    print("ready", flush=True)
    hubplugin.apply(store, rng.normal(size=(60, store.dim)).astype(np.float32), "is", force=True)
