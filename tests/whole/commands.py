"""The command as a user types it, and an index to type it at."""

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.galleries import flat_index, unit

COMMAND = Path(sys.executable).with_name("hubplugin")

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["tests.whole.commands", "torch", "qdrant_client", "hubplugin.jobs.results"]
)
"""Each command has a process of its own, forked from one that has imported what takes a second and computed nothing."""


def hubplugin(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What `hubplugin ARGUMENTS` does and says. What it imports is for tests that start an interpreter."""
    words = [str(COMMAND), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        process = PROCESSES.Process(
            target=_type, args=(words, os.getcwd(), dict(os.environ), said)
        )
        process.start()
        process.join()
        return subprocess.CompletedProcess(
            words, process.exitcode or 0, *(path.read_text() for path in said)
        )


def _type(
    words: list[str], folder: str, environment: dict[str, str], said: list[Path]
) -> None:
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = words
    from hubplugin import calibration
    from hubplugin.cli import main

    calibration.QUERIES = 6  # as in the process of the tests
    try:
        main()
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out


def write_photos(folder: Path, real: Mapping[str, np.ndarray]) -> np.ndarray:
    """Writes real vectors of length 1 as the flat index photos.faiss; returns them: [1200, 384]."""
    targets = unit(real["test_targets"])
    flat_index(folder / "photos.faiss", targets)
    return targets
