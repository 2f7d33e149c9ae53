"""Every way to speak to a server: REST and gRPC, with and without an api key, and TLS."""

import os
import subprocess
import sys

import numpy as np
import pytest

from hubplugin_qdrant import HubQdrantClient
from integration_tests.backends import Server
from integration_tests.galleries import BANK, K


class RunningServer(Server):
    """A server that another backend has started."""

    def __init__(self, address):
        self.address = address


def correct_by_command(gallery, tmp_path, **environment):
    """Corrects `gallery` by the command line, in a process that knows its URL and `environment`."""
    np.save(tmp_path / "bank.npy", BANK)
    command = [
        sys.executable,
        "-c",
        "from hubplugin.cli import main; main()",
        "apply",
        gallery.url,
    ]
    options = [
        "--bank",
        str(tmp_path / "bank.npy"),
        "--method",
        "dbsn",
        "--set",
        "tau=0.05",
    ]
    inherited = {
        name: value for name, value in os.environ.items() if name != "QDRANT_API_KEY"
    }
    return subprocess.run(
        [*command, *options],
        env=inherited | environment,
        capture_output=True,
        text=True,
    )


def last_line(run):
    """What the command line says of an error; qdrant-client may warn of an insecure connection before it."""
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    line = run.stderr.strip().splitlines()[-1]
    assert line.startswith("hubplugin: ")
    return line


@pytest.mark.needs("managed")
def test_an_api_key_comes_from_the_environment_and_a_wrong_one_is_one_line(
    backend, tmp_path
):
    address = backend.keyed()
    gallery = RunningServer(address).gallery()
    try:
        wrong = correct_by_command(
            gallery, tmp_path, QDRANT_API_KEY="wrong-key-of-a-user"
        )
        assert "the api key is missing, wrong or expired" in last_line(wrong)
        assert "wrong-key-of-a-user" not in wrong.stderr + wrong.stdout
        right = correct_by_command(gallery, tmp_path, QDRANT_API_KEY=address.api_key)
        assert right.returncode == 0, right.stderr
        assert gallery.health()[1] == 0
    finally:
        gallery.drop()


@pytest.mark.needs("managed")
def test_a_server_with_tls_is_corrected_by_its_url(backend, tmp_path):
    address = backend.tls()
    gallery = RunningServer(address).gallery()
    try:
        done = correct_by_command(
            gallery, tmp_path, SSL_CERT_FILE=str(address.authority)
        )
        assert done.returncode == 0, done.stderr
        assert all(
            len(points) == K
            for points in gallery.search(HubQdrantClient(**address.options()))
        )
        assert "certificate" in last_line(correct_by_command(gallery, tmp_path)).lower()
    finally:
        gallery.drop()
