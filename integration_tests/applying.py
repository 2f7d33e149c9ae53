"""A process that applies a correction, to be killed.

It imports little by itself: a fork server does that once.
"""

import multiprocessing
import os

import hubplugin_qdrant.transport
from hubplugin import apply, open_store
from hubplugin_qdrant import metadata
from integration_tests.galleries import APPLY, BANK, OTHER_BANK

BANKS = (BANK, OTHER_BANK)


def run(url, bank, environment, begun):
    """Apply BANKS[bank] to the store at `url`, in batches so small that a kill mostly
    falls between two."""
    os.environ.update(environment)
    hubplugin_qdrant.transport.BATCH = 10
    # So that a kill seldom falls into the wait for clients, where nothing is written.
    metadata.MANIFEST_SECONDS = 0.1
    begun.send(None)
    apply(open_store(url), BANKS[bank], **APPLY)
    os._exit(0)


def start(url, bank):
    """Return the process, which has begun.

    It is given the api key: a fork server has the environment of its own start.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch"])
    here, there = context.Pipe(duplex=False)
    environment = {
        name: os.environ[name] for name in ("QDRANT_API_KEY",) if name in os.environ
    }
    process = context.Process(target=run, args=(url, bank, environment, there))
    process.start()
    there.close()
    here.recv()
    return process
