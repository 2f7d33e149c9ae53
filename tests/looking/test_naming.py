"""What targets are called: by fields of a store, or by files."""

import json

import numpy as np
import pytest
from qdrant_client import QdrantClient

import hubplugin_qdrant
from hubplugin import InputError
from hubplugin.jobs.naming import LONGEST, display_names, names_of
from hubplugin.metric import Metric
from tests.galleries import collection, flat_store
from tests.keepers import DIM, InChroma, InLanceDB, InQdrant
from tests.refusals import refused

VECTORS = np.eye(9, DIM, dtype=np.float32) + 0.1


@pytest.mark.parametrize("kind", [InQdrant, InChroma, InLanceDB])
def test_targets_are_called_by_a_field_and_unasked_by_a_title(kind, tmp_path):
    user = kind(str(tmp_path), Metric.COSINE)
    user.create()
    ids = [user.key(number) for number in range(9)]
    user.put(ids, VECTORS)
    called = [f"photo o'{key}" for key in ids]
    for key, title in zip(ids, called, strict=True):
        user.entitle(key, title)
    store = user.open()
    unasked = names_of(store)
    assert unasked([ids[7], ids[3]]) == [called[7], called[3]]
    assert unasked.field == "title"
    assert names_of(store, "title")(ids[:2]) == called[:2]
    with refused(InputError, "have no field 'heading'.*title"):
        names_of(store, "heading")
    if kind is InQdrant:
        assert display_names(ids[:2], names_of(store, "n")) == [
            f"1 [{id}]" for id in ids[:2]
        ]


def test_a_field_that_some_targets_have_may_be_lacking_in_others():
    client = QdrantClient(":memory:")
    collection(client, VECTORS[:2], [{"title": "sea"}, {"year": 2000}])
    named = names_of(hubplugin_qdrant.open_store(client, "photos"))
    assert display_names([0], named) == ["sea [0]"]
    assert display_names([1], named) == ["1"]


def test_a_store_of_vectors_alone_asks_for_a_file(tmp_path):
    store = flat_store(tmp_path, VECTORS)
    assert names_of(store)([1]) == [None]
    with refused(InputError, "'title'; there are none; .*a file, as show="):
        names_of(store, "title")


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


def test_a_target_without_letters_in_its_title_is_called_by_its_id():
    assert display_names([1, 2, 3], lambda ids: [" \n", "", "sea"]) == [
        *("1", "2", "sea [3]"),
    ]


def test_a_long_text_is_shown_by_its_beginning_in_one_line():
    (name,) = display_names([1], lambda ids: ["a\n b" + 200 * "x"])
    assert name.startswith("a bxx")
    assert len(name) == LONGEST + len(" [1]")


def test_what_cannot_name_anything_is_told_in_one_line(tmp_path):
    with refused(InputError, "there is no file 'names.json'"):
        names_of(None, "names.json")
    (tmp_path / "number.json").write_text(json.dumps(3))
    with refused(InputError, "holds int; expected a list, or texts by id"):
        names_of(None, str(tmp_path / "number.json"))
    assert names_of(None) is None
