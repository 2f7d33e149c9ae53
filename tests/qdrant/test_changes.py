"""What others write while a correction is written is found without reading every vector again."""

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from hubplugin import Compute
from hubplugin_qdrant.points import changed_ids
from hubplugin_qdrant.transport import READERS, Transport
from tests.qdrant.conftest import DIM, FEW, ROWS, Photos, clustered, served

pytestmark = pytest.mark.filterwarnings("ignore:Payload indexes have no effect")


@pytest.fixture(params=[each[:3] for each in FEW], ids=lambda given: " ".join((given[1].value, given[2])))
def photos(request):
    using, distance, storage = request.param
    return Photos(QdrantClient(":memory:"), using, distance, storage)


@pytest.fixture
def as_a_server(photos, monkeypatch):
    """Local mode, taken for a server, which makes no index."""
    served(photos.plain)
    monkeypatch.setattr("hubplugin_qdrant.transport.SERVER_SECONDS", 0)
    monkeypatch.setattr("hubplugin_qdrant.transport.BATCH", 50)


def vector_of(photos, row):
    return {photos.using: row.tolist()} if photos.using else row.tolist()


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_the_vectors_that_have_changed_are_named_and_no_others(photos, size):
    store = photos.store()
    read = list(store.scan())
    turned = photos.gallery[[5, 70]] + size * clustered(9, 2)
    for row, vector in zip([5, 70], turned, strict=True):
        photos.plain.update_vectors("photos", [models.PointVectors(id=row, vector=vector_of(photos, vector))])
    photos.plain.delete("photos", [6])
    found = [id for batch in read for id in changed_ids(store.transport, photos.using, store.metric, batch)]
    assert found == [5, 70]


def test_whatever_others_write_during_a_run_has_its_offset_afterwards(photos, as_a_server, monkeypatch):
    rng, plain, done, scans = np.random.default_rng(5), photos.plain, [], []
    given = [rng.normal(size=DIM).astype(np.float32) for _ in range(4)]

    def others(what, count, total):
        if what == "closing" and 0 < len(done) < 3:  # twice, so that the second pass finds the same point again
            plain.update_vectors("photos", [models.PointVectors(id=3, vector=vector_of(photos, given[len(done)]))])
            done.append(what)
        if what == "writing offsets" and not done:
            done.append(what)
            plain.update_vectors("photos", [models.PointVectors(id=60, vector=vector_of(photos, given[0]))])
            plain.upsert("photos", [photos.point(61, given[3]), photos.point(900, given[3])])
            plain.delete("photos", [62])

    scroll = plain.scroll

    def scanned(*args, **named):
        if named["with_vectors"]:
            scans.append(str(args[1:]))
        return scroll(*args, **named)

    monkeypatch.setattr(plain, "scroll", scanned)
    photos.apply(compute=Compute(progress=others))
    assert (plain.count("photos").count, photos.wrong()) == (ROWS, (0, 0))
    before = next(number for number, given in enumerate(scans) if "has_id" in given)
    assert before <= 2 * READERS  # a page of each slice: of the gallery, and for the calibration


def test_a_second_reading_is_made_where_exact_searches_are_forbidden(photos, as_a_server, monkeypatch):
    plain = photos.plain
    limits = models.StrictModeConfig(enabled=True, search_allow_exact=False)

    def limited(transport, name):
        info = plain.get_collection(name)
        return info.model_copy(update={"config": info.config.model_copy(update={"strict_mode_config": limits})})

    monkeypatch.setattr(Transport, "_described_as", limited)
    changed = np.ones(DIM, np.float32)

    def others(what, count, total):
        if what == "writing offsets":
            plain.update_vectors("photos", [models.PointVectors(id=3, vector=vector_of(photos, changed))])

    photos.apply(compute=Compute(progress=others))
    assert photos.wrong() == (0, 0)
