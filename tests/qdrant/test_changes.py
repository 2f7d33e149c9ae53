"""What others write while a correction is written has its offset, too."""

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from hubplugin import Compute
from tests.qdrant.conftest import DIM, FEW, ROWS, Photos, served

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


def test_whatever_others_write_during_a_run_has_its_offset_afterwards(photos, as_a_server):
    rng, plain, done = np.random.default_rng(5), photos.plain, []
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

    photos.apply(compute=Compute(progress=others))
    assert (plain.count("photos").count, photos.wrong()) == (ROWS, (0, 0))
