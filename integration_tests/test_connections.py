"""Every way to speak to a server: REST and gRPC, with and without an api key, and TLS."""

import os
import subprocess
import sys

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin_qdrant import HubQdrantClient
from integration_tests.backends import Server
from integration_tests.galleries import AGREED, APPLY, BANK, QUERIES, TARGETS, K
from integration_tests.servers import Stalling
from integration_tests.waiting import wait_until
from tests.qdrant.conftest import apply_to


class There(Server):
    """A server that another backend has started."""

    def __init__(self, address):
        self.address = address


def corrected_by_command(gallery, tmp_path, **environment):
    """Corrects `gallery` by the command line, in a process that knows its URL and `environment`."""
    np.save(tmp_path / "bank.npy", BANK)
    command = [sys.executable, "-c", "from hubplugin.cli import main; main()", "apply", gallery.url]
    options = ["--bank", str(tmp_path / "bank.npy"), "--method", "dbsn", "--set", "tau=0.05"]
    kept = {name: value for name, value in os.environ.items() if name != "QDRANT_API_KEY"}
    return subprocess.run([*command, *options], env=kept | environment, capture_output=True, text=True)


def last_line(ran):
    """What the command line says of an error; qdrant-client may warn of an insecure connection before it."""
    assert "Traceback" not in ran.stderr
    line = ran.stderr.strip().splitlines()[-1]
    assert line.startswith("hubplugin: ")
    return line


@pytest.mark.needs("grpc")
def test_a_server_that_stops_answering_is_the_clients_own_error_for_that_time(backend, fill, storage):
    gallery = fill(using="code")
    given = {"vector": "code", "storage": storage}
    model = apply_to(backend.client(), gallery.name, BANK, **given, **APPLY).model
    between = Stalling(backend.address.http, backend.address.grpc)
    ports = dict(zip(("port", "grpc_port"), between.ports, strict=True))
    options = backend.address.options() | {"host": "127.0.0.1", "timeout": 2} | ports
    plain, hub = QdrantClient(**options), HubQdrantClient(**options)

    def refused(call):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
            call()
        return type(caught.value)

    point = models.PointStruct(id=gallery.ids[0], vector={"code": TARGETS[0].tolist()})
    assert gallery.agreement(gallery.found(hub), model) >= AGREED
    with between.stalled():
        expected = refused(lambda: plain.query_points(gallery.name, QUERIES[0], "code"))
        assert refused(lambda: hub.query_points(gallery.name, QUERIES[0], "code")) is expected
        assert refused(lambda: hub.upsert(gallery.name, [point])) is expected
    wait_until(lambda: _answers(hub, gallery))
    assert gallery.agreement(gallery.found(hub), model) >= AGREED
    assert gallery.health()[1:] == (0, 0)
    between.close()


def _answers(hub, gallery):
    try:
        return bool(hub.query_points(gallery.name, QUERIES[0], "code").points)
    except Exception:
        return False


@pytest.mark.needs("keyed")
def test_an_api_key_comes_from_the_environment_and_a_wrong_one_is_one_line(backend, tmp_path):
    address = backend.keyed()
    gallery = There(address).gallery()
    try:
        wrong = corrected_by_command(gallery, tmp_path, QDRANT_API_KEY="wrong-key-of-a-user")
        assert wrong.returncode == 1
        assert "the api key is missing, wrong or expired" in last_line(wrong)
        assert "wrong-key-of-a-user" not in wrong.stderr + wrong.stdout
        right = corrected_by_command(gallery, tmp_path, QDRANT_API_KEY=address.api_key)
        assert right.returncode == 0, right.stderr
        assert hubplugin.inspect(hubplugin_qdrant.open_store(address.client(), gallery.name)).missing == 0
    finally:
        gallery.drop()


@pytest.mark.needs("tls")
def test_a_server_with_tls_is_corrected_by_its_url(backend, tmp_path):
    address = backend.tls()
    gallery = There(address).gallery()
    try:
        done = corrected_by_command(gallery, tmp_path, SSL_CERT_FILE=str(address.authority))
        assert done.returncode == 0, done.stderr
        hub = HubQdrantClient(**address.options())
        assert len(hub.query_points(gallery.name, query=TARGETS[0], limit=K).points) == K
        untrusted = corrected_by_command(gallery, tmp_path)
        assert untrusted.returncode == 1
        assert "certificate" in last_line(untrusted).lower()
    finally:
        gallery.drop()
