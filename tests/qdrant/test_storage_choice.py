"""Where offsets go if nobody says: what is chosen, and what is told of it."""

import re

import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import InputError, open_store
from tests.qdrant.conftest import DIM, DOT, ROWS, Photos, apply_to, named

CODES = models.ScalarQuantization(
    scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8)
)


def filled(using="image", **vector):
    client = QdrantClient(":memory:")
    parameters = models.VectorParams(size=DIM, distance=DOT, **vector)
    client.create_collection("photos", named(using, parameters))
    client.upload_collection("photos", named(using, Photos.gallery))
    return client


def told(client, **given):
    """Return what an `apply` prints, in one line."""
    done = apply_to(client, "photos", Photos.bank, method="is", force=True, **given)
    return " ".join(str(done).split())


@pytest.mark.parametrize(
    ("using", "vector", "server", "storage", "why"),
    [
        ("image", {}, "1.18.0", "vector", "as fast as a raw search"),
        ("image", {}, "1.17.1", "payload", r"this one is 1\.17\) .* from 1\.18 on"),
        ("image", {"quantization_config": CODES}, "1.18.0", "payload", "quantised"),
        ("", {}, "1.18.0", "payload", "local mode takes no unnamed vectors"),
        ("image", {"datatype": "turbo8"}, "1.18.0", "payload", "is of turbo8"),
    ],
    ids=["named", "older server", "quantised", "unnamed", "small numbers"],
)
def test_a_second_vector_is_added_where_nothing_speaks_against_it(
    using, vector, server, storage, why, monkeypatch
):
    client = filled(using, **vector)
    info = models.VersionInfo(title="", version=server)
    monkeypatch.setattr(client, "info", lambda: info)
    for text in (told(client, dry_run=True), told(client)):
        assert text.count("storage=") == 1
        assert re.search(f" storage='{storage}': .*{why}", text)
    assert hubplugin_qdrant.open_store(client, "photos").storage == storage


def test_a_url_takes_the_storage_too(tmp_path):
    client = QdrantClient(path=str(tmp_path))
    parameters = models.VectorParams(size=DIM, distance=DOT)
    client.create_collection("photos", {"image": parameters})
    client.close()
    url = f"qdrant-local:{tmp_path}/photos"
    for options, storage in (
        ("", "vector"),
        ("?storage=payload", "payload"),
        ("?storage=auto", "vector"),
    ):
        store = open_store(url + options)
        assert store.storage == storage
        store.client.close()
    with pytest.raises(InputError, match="use 'auto', 'payload' or 'vector'"):
        open_store(f"{url}?storage=both")


@pytest.mark.parametrize(
    ("storage", "least"), [("vector", ROWS * (DIM + 1) * 4), ("payload", ROWS * 8)]
)
def test_the_cost_is_told_before_and_after(storage, least):
    client = filled()
    for dry_run in (True, False):
        text = told(client, storage=storage, dry_run=dry_run)
        ((number, unit),) = re.findall(" take about ([^ ]+) ([a-zA-Z]+) of ", text)
        assert float(number) * {"bytes": 1, "kB": 1000}[unit] >= least
