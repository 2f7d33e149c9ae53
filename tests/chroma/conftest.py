import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """HOST:PORT of a Chroma server of its own package."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("chroma")
    program = Path(sys.executable).with_name("chroma")
    place = ["--path", folder, "--host", "localhost", "--port", str(port)]
    command = [program, "run", *place]
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            for _ in range(300):
                with socket.socket() as probe:
                    if probe.connect_ex(("localhost", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"localhost:{port}"
        finally:
            process.terminate()


@pytest.fixture(autouse=True)
def few_calibration_queries():
    """All of them, as in use: this store searches quickly."""
