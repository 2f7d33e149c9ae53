"""Where offsets go if nobody says: what is chosen, and what is told of it."""

import re

import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import InputError, open_store
from tests.qdrant.conftest import DIM, ROWS, Photos, apply_to, served

CODES = models.ScalarQuantization(
    scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8)
)


def filled(using="image", **vector):
    client = QdrantClient(":memory:")
    parameters = models.VectorParams(size=DIM, distance=models.Distance.DOT, **vector)
    client.create_collection("photos", {using: parameters} if using else parameters)
    client.upload_collection(
        "photos", {using: Photos.gallery} if using else Photos.gallery
    )
    return client


def apply(client, **given):
    return apply_to(client, "photos", Photos.bank, method="is", force=True, **given)


@pytest.mark.parametrize(
    ("using", "vector", "server", "storage", "why"),
    [
        (
            "image",
            {},
            "1.18.0",
            "vector",
            "as fast as a raw one, and the server adds it in place",
        ),
        (
            "image",
            {},
            "1.17.1",
            "payload",
            r"this one is 1\.17\) can add vectors to a collection from 1\.18 on",
        ),
        (
            "image",
            {"quantization_config": CODES},
            "1.18.0",
            "payload",
            "quantised to save memory",
        ),
        ("", {}, "1.18.0", "payload", "local mode takes no unnamed vectors"),
        pytest.param(
            *("image", {"datatype": "turbo8"}, "1.18.0", "payload", "is of turbo8"),
            marks=pytest.mark.skipif(
                not hasattr(models.Datatype, "TURBO8"), reason="an older qdrant-client"
            ),
        ),
    ],
    ids=["named", "older server", "quantised", "unnamed", "small numbers"],
)
def test_a_second_vector_is_added_where_nothing_speaks_against_it(
    using, vector, server, storage, why, monkeypatch
):
    client = filled(using, **vector)
    monkeypatch.setattr(
        client, "info", lambda: models.VersionInfo(title="", version=server)
    )
    tried, done = str(apply(client, dry_run=True)), apply(client)
    assert hubplugin_qdrant.open_store(client, "photos").storage == storage
    for told in (tried, str(done)):
        flat = " ".join(told.split())
        assert flat.count("storage=") == 1
        assert re.search(f" storage='{storage}': .*{why}", flat)


def test_an_unnamed_vector_of_a_server_gets_a_second_one_on_request_only():
    client = served(filled(""))
    told = " ".join(str(apply(client, dry_run=True)).split())
    assert (
        "storage='payload': a second vector beside an unnamed one leaves a trace"
        in told
    )
    told = str(apply(client, dry_run=True, storage="vector"))
    vector = "a vector 'hub_v1' of 9 dimensions beside the unnamed one"
    assert vector in " ".join(told.split())


def test_a_url_takes_the_storage_too(tmp_path):
    client = QdrantClient(path=str(tmp_path))
    client.create_collection(
        "photos", {"image": models.VectorParams(size=DIM, distance=models.Distance.DOT)}
    )
    client.close()
    for options, storage in (
        ("", "vector"),
        ("?storage=payload", "payload"),
        ("?storage=auto", "vector"),
    ):
        store = open_store(f"qdrant-local:{tmp_path}/photos{options}")
        assert store.storage == storage
        store.client.close()
    with pytest.raises(
        InputError, match="storage='both': use 'auto', 'payload' or 'vector'"
    ):
        open_store(f"qdrant-local:{tmp_path}/photos?storage=both")


@pytest.mark.parametrize(
    ("storage", "least"), [("vector", ROWS * (DIM + 1) * 4), ("payload", ROWS * 8)]
)
def test_the_cost_is_told_before_and_after(storage, least):
    client = filled()
    for told in (
        str(apply(client, storage=storage, dry_run=True)),
        str(apply(client, storage=storage)),
    ):
        (line,) = [line for line in told.splitlines() if " take about " in line]
        number, unit = line.split(" take about ")[1].split(" of ")[0].split()
        assert float(number) * {"bytes": 1, "kB": 1000}[unit] >= least
