"""What targets are called: by the payload of a real engine, by files, and by nothing that is there."""

from __future__ import annotations

import json

import faiss
import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import InputError, StoreError
from hubplugin.abilities import Filtered, able
from hubplugin.jobs.naming import naming
from hubplugin.registry import open_store


@pytest.fixture
def photos():
    client = QdrantClient(":memory:")
    client.create_collection("photos", models.VectorParams(size=2, distance=models.Distance.COSINE))
    payloads = [{"title": "sea", "by": {"name": "Ann"}}, {"title": 7}, {}]
    client.upload_points(
        "photos",
        [models.PointStruct(id=row, vector=[1.0, row / 3], payload=each) for row, each in enumerate(payloads)],
    )
    return hubplugin_qdrant.open_store(client, "photos")


@pytest.fixture
def index(tmp_path):
    index = faiss.IndexFlatIP(2)
    index.add(np.eye(2, dtype=np.float32))
    faiss.write_index(index, str(tmp_path / "photos.faiss"))
    return open_store(f"faiss:{tmp_path / 'photos.faiss'}")


def test_points_are_called_by_their_payload_in_the_order_that_was_asked_for(photos):
    assert naming("payload.title", photos)([2, 1, 0]) == [None, "7", "sea"]
    assert naming("payload.by.name", photos)([0, 99]) == ["Ann", None]


def test_points_of_a_shard_are_called_by_their_payload(tmp_path):
    edge = pytest.importorskip("qdrant_edge", reason="pip install '.[edge]' to test Qdrant Edge")
    from hubplugin_qdrant.edge import EdgeStore

    (tmp_path / "shard").mkdir()
    config = edge.EdgeConfig({"": edge.EdgeVectorParams(2, edge.Distance.Cosine)})
    shard = edge.EdgeShard.create(str(tmp_path / "shard"), config)
    shard.update(edge.UpdateOperation.upsert_points([edge.Point(5, [1.0, 0.0], {"title": "sea"})]))
    assert naming("payload.title", EdgeStore(shard, tmp_path / "shard"))([5, 6]) == ["sea", None]
    shard.close()


@pytest.mark.parametrize(
    ("file", "text"),
    [("names.txt", "sea\nhill\n"), ("names.json", '["sea", "hill"]'), ("ids.json", '{"0": "sea", "1": "hill"}')],
)
def test_targets_are_called_by_a_file(index, tmp_path, file, text):
    (tmp_path / file).write_text(text)
    assert naming(str(tmp_path / file), index)([1, 0, 2]) == ["hill", "sea", None]


def test_what_cannot_name_anything_is_told_in_one_line(index, tmp_path):
    with pytest.raises(InputError, match=r"--names 'title' is no file, and no payload\.KEY"):
        naming("title", index, "--names")
    with pytest.raises(StoreError, match="nothing but a vector; name them by a file"):
        naming("payload.title", index)([0])
    (tmp_path / "number.json").write_text(json.dumps(3))
    with pytest.raises(InputError, match="holds int; expected a list, or texts by id"):
        naming(str(tmp_path / "number.json"), index)
    assert naming(None, index) is None


def test_a_filtered_store_finds_only_what_meets_its_condition(photos, index):
    condition = '{"must": [{"key": "title", "match": {"value": "sea"}}]}'
    assert photos.filtered(condition).search(np.ones((1, 2)), 3).ids == [[0]]
    assert len(photos.search(np.ones((1, 2)), 3).ids[0]) == 3
    with pytest.raises(InputError, match="is no Qdrant filter in JSON"):
        photos.filtered('{"musst": []}')
    with pytest.raises(StoreError, match="searches without filters"):
        able(index, Filtered).filtered(condition)
