"""A run that the test kills: `python -m tests.pgvector.killed URL MODEL`."""

import sys

import hubplugin
import hubplugin_pgvector.store
from hubplugin.jobs.write import write

if __name__ == "__main__":
    hubplugin_pgvector.store.PAGE = 50
    store, model = hubplugin.open_store(sys.argv[1]), hubplugin.load(sys.argv[2])
    print("ready", flush=True)
    write(store, model, compute=hubplugin.Compute("numpy"))
