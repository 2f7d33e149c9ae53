"""`hubplugin explain` as it is typed."""

import json

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import apply
from tests.whole.commands import hubplugin

pytestmark = pytest.mark.slow

DIM = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corrected collection in local mode, and a file of queries."""
    folder, rng = tmp_path_factory.mktemp("searching"), np.random.default_rng(1)
    client = QdrantClient(path=str(folder / "local"))
    client.create_collection(
        "photos", models.VectorParams(size=DIM, distance=models.Distance.COSINE)
    )
    client.upload_collection("photos", rng.normal(size=(120, DIM)), wait=True)
    apply(
        hubplugin_qdrant.open_store(client, "photos"),
        rng.normal(size=(120, DIM)),
        "is",
        force=True,
    )
    client.close()
    np.save(folder / "queries.npy", rng.normal(size=(3, DIM)))
    np.save(folder / "other.npy", rng.normal(size=(3, DIM + 1)))
    return folder


def typed(made, *arguments):
    return hubplugin("explain", f"qdrant-local:{made / 'local'}/photos", *arguments)


def test_explain_prints_a_request_to_paste_for_a_file_an_id_or_the_first_point(made):
    first = np.load(made / "queries.npy")[0]
    for arguments in (["--vector", made / "queries.npy"], ["--id", 7], []):
        printed = typed(made, *arguments)
        assert printed.returncode == 0, printed.stderr
        assert printed.stdout.startswith(
            "curl -X POST http://localhost:6333/collections/photos/points/query"
        )
        body = json.loads(printed.stdout.split("-d '")[1].split("'\n")[0])
        asked = body["prefetch"][0]["query"]
        if "--id" in arguments:
            assert asked == {"nearest": 7}
        else:
            assert np.allclose(asked, first) == bool(arguments)
            assert len(asked) == DIM
    printed = json.loads(typed(made, "--id", 7, "--k", 3, "--json").stdout)
    printed = printed["request"]
    assert (printed["method"], printed["path"]) == (
        "POST",
        "/collections/photos/points/query",
    )
    assert printed["body"]["limit"] == 3
    for arguments, message in (
        (["--vector", made / "other.npy"], "--vector has 7 dimensions, qdrant-local:"),
        (
            ["--vector", made / "queries.npy", "--id", 1],
            "--vector and --id both name the query",
        ),
    ):
        failed = typed(made, *arguments)
        assert failed.returncode == 1
        assert message in failed.stderr
        assert len(failed.stderr.splitlines()) == 1
