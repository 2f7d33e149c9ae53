"""What targets are called: by fields of a store, or by files."""

import json

import chromadb
import lancedb
import numpy as np
import pyarrow as pa
import pytest
from qdrant_client import QdrantClient, models

import hubplugin_qdrant
from hubplugin import InputError
from hubplugin.jobs.naming import LONGEST, display_names, names_of
from hubplugin.registry import open_store
from tests.galleries import flat_index, unit

VECTORS = unit(np.random.default_rng(0).normal(size=(30, 4)))
TITLES = [f"photo o'{row}" for row in range(30)]


def qdrant(folder):
    client = QdrantClient(":memory:")
    size = models.VectorParams(size=4, distance=models.Distance.COSINE)
    client.create_collection("photos", size)
    payload = [{"title": title, "year": 2000} for title in TITLES]
    client.upload_collection("photos", VECTORS, payload, ids=range(30))
    return hubplugin_qdrant.open_store(client, "photos"), [7, 3]


def chroma(folder):
    client = chromadb.PersistentClient(str(folder / "chroma"))
    collection = client.create_collection("photos")
    ids = [f"id '{row}" for row in range(30)]
    fields = [{"title": title, "year": 2000} for title in TITLES]
    collection.add(ids, VECTORS, fields)
    return open_store(f"chroma:{folder}/chroma/photos"), [ids[7], ids[3]]


def lance(folder):
    ids = [f"id '{row}" for row in range(30)]
    vectors = pa.FixedSizeListArray.from_arrays(VECTORS.ravel(), 4)
    years = pa.array([2000] * 30)
    rows = {"id": ids, "vector": vectors, "title": TITLES, "year": years}
    lancedb.connect(folder / "lance").create_table("photos", pa.table(rows))
    return open_store(f"lancedb:{folder}/lance/photos"), [ids[7], ids[3]]


@pytest.mark.parametrize("make", [qdrant, chroma, lance])
def test_targets_are_called_by_a_field_and_unasked_by_a_title(make, tmp_path):
    store, ids = make(tmp_path)
    called = [TITLES[7], TITLES[3]]
    unasked = names_of(store)
    assert unasked(ids) == called
    assert unasked.field == "title"
    assert names_of(store, "title")(ids) == called
    years = display_names(ids, names_of(store, "year"))
    assert years == [f"2000 [{id}]" for id in ids]
    with pytest.raises(
        InputError, match=r"no target has a field 'heading'.*title.*year"
    ):
        names_of(store, "heading")(ids)


def test_a_field_that_some_targets_have_may_be_lacking_in_others(tmp_path):
    client = QdrantClient(":memory:")
    size = models.VectorParams(size=4, distance=models.Distance.COSINE)
    client.create_collection("photos", size)
    payload = [{"title": "sea"}, {"year": 2000}]
    client.upload_collection("photos", VECTORS[:2], payload, ids=range(2))
    named = names_of(hubplugin_qdrant.open_store(client, "photos"))
    assert display_names([0], named) == ["sea [0]"]
    assert display_names([1], named) == ["1"]


def test_a_store_of_vectors_alone_asks_for_a_file(tmp_path):
    store = open_store(flat_index(tmp_path / "photos.faiss", VECTORS))
    assert names_of(store)([1]) == [None]
    with pytest.raises(
        InputError, match=r"'title'; there are none; pass .* a file, as show="
    ):
        names_of(store, "title")([1])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("names.txt", "sea\nhill\n"),
        ("names.json", '["sea", "hill"]'),
        ("ids.json", '{"0": "sea", "1": "hill"}'),
    ],
)
def test_targets_are_called_by_a_file(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    named = names_of(None, str(tmp_path / file))
    assert named([1, 0, 2]) == ["hill", "sea", None]
    assert display_names([1, 2], named) == ["hill [1]", "2"]


def test_a_long_text_is_shown_by_its_beginning_in_one_line():
    (name,) = display_names([1], lambda ids: ["a\n b" + 200 * "x"])
    assert name.startswith("a bxx")
    assert len(name) == LONGEST + len(" [1]")


def test_what_cannot_name_anything_is_told_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"there is no file 'names\.json'"):
        names_of(None, "names.json")
    (tmp_path / "number.json").write_text(json.dumps(3))
    with pytest.raises(InputError, match="holds int; expected a list, or texts by id"):
        names_of(None, str(tmp_path / "number.json"))
    assert names_of(None) is None
