"""A corrected client flags newcomers that look planted: admits them, keeps them from being found, or refuses them."""

from __future__ import annotations

import logging
import uuid

import numpy as np
import pytest
from qdrant_client import models

import hubplugin_qdrant
from hubplugin import InputError
from hubplugin.admission import Admission
from hubplugin_qdrant import QdrantStore
from hubplugin_qdrant.newcomers import flagged, listed_id
from tests.qdrant.conftest import ROWS, Photos

PLANTED, HONEST = 900, 901


def points(photos: Photos) -> list[models.PointStruct]:
    """A vector near the whole bank, and a copy of a target that few queries find."""
    rows = (PLANTED, photos.bank.mean(axis=0)), (HONEST, photos.gallery[83])
    return [photos.point(key, vector) for key, vector in rows]


def door(photos: Photos, policy: str, **given):
    """A corrected client with this admission. By 120 targets of 8 dimensions nothing planted exceeds all natural hubs,
    so that the share is stated."""
    photos.apply(robust=True)
    return photos.wrapped(admission=Admission(policy, share=0.05, **given))


def upsert(client, photos):
    client.upsert("photos", points(photos))


def upsert_batch(client, photos):
    given = points(photos)
    vectors = [point.vector for point in given]
    vectors = {photos.using: [each[photos.using] for each in vectors]} if photos.using else vectors
    batch = models.Batch(ids=[p.id for p in given], vectors=vectors, payloads=[p.payload for p in given])
    client.upsert("photos", batch)


def upload_points(client, photos):
    client.upload_points("photos", iter(points(photos)))


def upload_collection(client, photos):
    given = points(photos)
    vectors, payloads = (point.vector for point in given), (point.payload for point in given)
    client.upload_collection("photos", vectors, payloads, ids=iter([PLANTED, HONEST]))


def batch_update(client, photos):
    listed = (models.UpsertOperation(upsert=models.PointsList(points=[point])) for point in reversed(points(photos)))
    client.batch_update_points("photos", [*listed])


def update_vectors(client, photos):
    for point in points(photos):
        photos.plain.upsert("photos", [point.model_copy(update={"vector": {}})])
    client.update_vectors("photos", [models.PointVectors(id=p.id, vector=p.vector) for p in points(photos)])


WRITES = [
    upsert,
    pytest.param(upsert_batch, marks=pytest.mark.slow),
    upload_points,
    upload_collection,
    batch_update,
    pytest.param(update_vectors, marks=pytest.mark.slow),
]


def found(client, photos: Photos) -> bool:
    """Whether a search for the planted vector itself finds it."""
    query = photos.bank.mean(axis=0).tolist()
    answer = client.query_points("photos", query=query, using=photos.using or None, limit=10)
    return PLANTED in {point.id for point in answer.points}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_kept_out_is_listed_and_not_found_and_the_rest_is(photos, write):
    told = []
    client = door(photos, "quarantine", hook=lambda name, reason: told.append((name, reason)))
    write(client, photos)
    assert [name for name, _ in told] == [PLANTED]
    (event,) = QdrantStore(photos.plain, "photos", photos.using).quarantined().last.values()
    assert (event.id, event.who, event.why) == (PLANTED, "admission", told[0][1])
    assert event.when
    assert not found(client, photos)
    report = hubplugin_qdrant.inspect(photos.plain, "photos", using=photos.using, probes=0)
    assert (report.stale, report.missing) == (0, 0)
    hubplugin_qdrant.refresh(photos.plain, "photos", using=photos.using)
    assert not found(photos.wrapped(), photos)


@pytest.mark.parametrize("write", WRITES[:-1])
def test_a_refused_write_names_the_id_and_leaves_everything_as_it_was(photos, write):
    client = door(photos, "refuse")
    with pytest.raises(InputError, match=f"1 of 2 newcomers look planted, and none is written: {PLANTED}: "):
        write(client, photos)
    assert photos.plain.count("photos").count == ROWS
    assert not QdrantStore(photos.plain, "photos", photos.using).quarantined().events


def test_what_is_admitted_has_the_offset_of_the_model_and_is_logged(cosine, caplog):
    client = door(cosine, "admit")
    with caplog.at_level(logging.WARNING, "hubplugin.admission"):
        upsert(client, cosine)
    assert [record.args[0] for record in caplog.records] == [PLANTED]
    vectors = np.array([point.vector for point in points(cosine)], np.float32)
    expected = cosine.model.offsets(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    held = [cosine.stored(key)[cosine.version.field] for key in (PLANTED, HONEST)]
    np.testing.assert_allclose(held, expected, atol=1e-6)
    assert not QdrantStore(cosine.plain, "photos").quarantined().events


@pytest.mark.parametrize("write", ["upload_points", "upload_collection"])
def test_a_later_chunk_of_an_upload_is_refused_before_the_first_is_written(cosine, monkeypatch, write):
    monkeypatch.setattr("hubplugin_qdrant.write_operations.OFFSETS_AT_ONCE", 2)
    client = door(cosine, "refuse")
    given = [cosine.point(700 + row, cosine.gallery[83]) for row in range(5)] + points(cosine)[:1]
    points_or_vectors = given if write == "upload_points" else [point.vector for point in given]
    with pytest.raises(InputError, match="1 of 6 newcomers"):
        getattr(client, write)("photos", points_or_vectors, batch_size=2)
    assert cosine.plain.count("photos").count == ROWS


def test_of_a_long_upload_without_ids_the_one_in_a_later_chunk_is_kept_out(cosine, monkeypatch):
    monkeypatch.setattr("hubplugin_qdrant.write_operations.OFFSETS_AT_ONCE", 2)
    client = door(cosine, "quarantine")
    client.upload_collection("photos", [*cosine.gallery[[83] * 5], cosine.bank.mean(axis=0)])
    (listed,) = QdrantStore(cosine.plain, "photos").quarantined().last
    assert str(uuid.UUID(listed)) == listed
    report = hubplugin_qdrant.inspect(cosine.plain, "photos", probes=0)
    assert (report.stale, report.missing) == (0, 0)


def test_a_batch_that_wipes_payloads_first_is_refused_whole(cosine):
    client = door(cosine, "refuse")
    clear = models.ClearPayloadOperation(clear_payload=models.PointIdsList(points=[1]))
    planted = models.UpsertOperation(upsert=models.PointsList(points=points(cosine)[:1]))
    with pytest.raises(InputError, match="look planted"):
        client.batch_update_points("photos", [clear, planted])
    assert cosine.plain.retrieve("photos", [1])[0].payload["n"] == 1


def test_one_that_is_listed_is_not_listed_again(cosine):
    client = door(cosine, "quarantine")
    upsert(client, cosine)
    upsert(client, cosine)
    assert len(QdrantStore(cosine.plain, "photos").quarantined().events) == 1


def test_an_id_is_listed_as_the_server_writes_it():
    key = uuid.uuid4()
    assert {listed_id(key), listed_id(str(key)), listed_id(key.hex), listed_id(key.hex.upper())} == {str(key)}
    assert listed_id(7) == 7


def test_a_correction_by_groups_is_not_judged_and_says_so(cosine):
    cosine.apply()
    grouped = cosine.version.model_copy(update={"group_by": "colour"})
    with pytest.raises(InputError, match="group_by='colour': write to it with a client without admission"):
        flagged(Admission(), [1], [cosine.gallery[1]], [(grouped, cosine.model)])
