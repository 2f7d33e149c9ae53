"""What targets are called, by files; and searches under a filter."""

import json

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import InputError, StoreError
from hubplugin.abilities import Filtered, able
from hubplugin.jobs.naming import naming
from hubplugin.registry import open_store
from tests.galleries import flat_index


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
    return open_store(flat_index(tmp_path / "photos.faiss", np.eye(2, dtype=np.float32)))


@pytest.mark.parametrize(
    ("file", "text"),
    [("names.txt", "sea\nhill\n"), ("names.json", '["sea", "hill"]'), ("ids.json", '{"0": "sea", "1": "hill"}')],
)
def test_targets_are_called_by_a_file(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    assert naming(str(tmp_path / file))([1, 0, 2]) == ["hill", "sea", None]


def test_what_cannot_name_anything_is_told_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"--names: there is no file 'payload\.title'"):
        naming("payload.title", "--names")
    (tmp_path / "number.json").write_text(json.dumps(3))
    with pytest.raises(InputError, match="holds int; expected a list, or texts by id"):
        naming(str(tmp_path / "number.json"))
    assert naming(None) is None


def test_a_filtered_store_finds_only_what_meets_its_condition(photos, index):
    condition = '{"must": [{"key": "title", "match": {"value": "sea"}}]}'
    assert photos.filtered(condition).search(np.ones((1, 2)), 3).ids == [[0]]
    assert len(photos.search(np.ones((1, 2)), 3).ids[0]) == 3
    with pytest.raises(InputError, match="is no Qdrant filter in JSON"):
        photos.filtered('{"musst": []}')
    with pytest.raises(StoreError, match="searches without filters"):
        able(index, Filtered).filtered(condition)
