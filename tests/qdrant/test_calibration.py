"""How widely a corrected search looks: as widely as the raw index's own recall asks
for, and no wider."""

import itertools

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
import hubplugin_qdrant
from hubplugin import InputError
from hubplugin.calibration import recall
from hubplugin.metric import Metric
from hubplugin.store import Hits
from hubplugin_qdrant.calibration import calibrate, draw_keys
from hubplugin_qdrant.manifest import QdrantManifest, QdrantVersion
from hubplugin_qdrant.requests import rewrite
from tests.galleries import collection

POINTS, QUERIES, K = 2000, 30, 10
IDS = np.arange(QUERIES * K).reshape(QUERIES, K)


def version(storage, **fields):
    given = {"number": 1, "vector": "", "metric": Metric.COSINE, "dim": 8}
    return QdrantVersion(storage=storage, model="", parts=1, **given, **fields)


class Index:
    """An index that finds a share `raw_recall` of what is there, and a corrected one
    that finds a result only within so many candidates, or by such an ef, as that result
    needs."""

    largest_ef = 4096
    exact_allowed = True

    def __init__(self, needed, raw_recall=1.0):
        self.needed = np.broadcast_to(needed, QUERIES * K).reshape(QUERIES, K)
        self.raw_recall = 0.8 * raw_recall  # until the server has completed its graph
        self.completed = raw_recall
        self.asked = []

    def search_raw(self, limit=K, exact=False):
        assert self.exact_allowed or not exact
        lost = 0 if exact else round(QUERIES * K * (1 - self.raw_recall))
        if not exact:
            self.raw_recall = self.completed
        return self.hits(lost <= IDS)

    def search_corrected(self, version, limit=K, exact=False):
        assert self.exact_allowed or not exact
        width = version.candidates(K)
        if version.storage == "vector":
            width = version.hnsw_ef or 100
        if not exact:
            self.asked.append(width)
        return self.hits((self.needed <= width) | exact)

    def hits(self, found):
        scores = [list(range(K, 0, -1))] * QUERIES
        return Hits(np.where(found, IDS, -1).tolist(), scores)


@pytest.mark.parametrize("storage", ["payload", "vector"])
@pytest.mark.parametrize("raw_recall", [1.0, 0.9, 0.8])
def test_the_width_is_the_least_that_reaches_the_share_of_the_raw_recall(
    storage, raw_recall
):
    needed = np.random.default_rng(0).uniform(100, 1500, size=QUERIES * K)
    index = Index(needed, raw_recall)
    found = calibrate(version(storage), POINTS, index)
    wanted = int(np.ceil(0.99 * raw_recall * QUERIES * K - 1e-9))
    least = np.sort(needed)[wanted - 1]
    width = found.hnsw_ef if storage == "vector" else found.candidates(K)
    assert least <= width <= 1.25 * least + 1
    assert found.raw_recall == pytest.approx(raw_recall)
    assert found.recall == pytest.approx((needed <= width).mean())
    assert max(index.asked) <= 8 * least


@pytest.mark.parametrize("points", [4, 12, 400])
def test_of_few_points_every_one_is_a_candidate_and_nothing_is_searched(points):
    index = Index(0.0)
    assert calibrate(version("payload"), points, index).candidates(K) == max(points, K)
    assert index.asked == []


@pytest.mark.parametrize(
    ("needed", "limit", "candidates", "largest_ef", "ef"),
    [
        (0.0, None, K, 4096, None),
        (np.inf, None, POINTS, 4096, 4096),
        (np.inf, 100, 100, 200, 200),
        (np.inf, 1, 1, 64, None),
    ],
    ids=["needs nothing", "never reaches", "strict mode", "stricter mode"],
)
def test_no_search_is_wider_than_there_are_points_or_strict_mode_allows(
    needed, limit, candidates, largest_ef, ef
):
    index = Index(needed)
    index.largest_ef = largest_ef
    found = calibrate(version("payload", max_candidates=limit), POINTS, index)
    assert found.candidates(K) == candidates
    assert calibrate(version("vector"), POINTS, index).hnsw_ef == ef


def test_shard_keys_are_searched_as_often_as_they_have_points():
    keys = draw_keys({"small": 10, "empty": 0, 7: 60, "large": 130}, 40)
    assert {key: keys.count(key) for key in set(keys)} == {
        "small": 2,
        7: 12,
        "large": 26,
    }
    assert draw_keys({}, 40) == draw_keys({"empty": 0}, 40) == []


class Codes(Index):
    """An index that finds no more than a tenth, with which a corrected search is
    content at once."""

    def search_corrected(self, version, limit=K, exact=False):
        is_wide = exact and limit != K
        return self.hits((self.needed <= version.candidates(K)) | is_wide)


@pytest.mark.parametrize("limit", [None, 100])
def test_exact_searches_find_everything_however_much_the_index_misses(limit):
    needed = np.random.default_rng(0).uniform(10, 150, size=QUERIES * K)
    index = Codes(needed, raw_recall=0.1)
    found = calibrate(version("payload", max_candidates=limit), POINTS, index)
    assert found.candidates(K) < 50
    width = found.candidates(K, exact=True)
    if limit is None:
        assert 4 * needed.max() <= width <= 16 * needed.max()
    else:
        assert width == limit


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        (None, 20),
        (models.SearchParams(exact=True), 70),
        ({"quantization": {"ignore": True}}, 70),
    ],
    ids=["usual", "exact", "without codes"],
)
def test_a_search_that_asks_for_exactness_gets_the_candidates_for_it(params, limit):
    widths = {"oversampling": 2.0, "exact_oversampling": 7.0}
    known = QdrantManifest(active={"": version("payload", **widths)})
    request = models.QueryRequest(query=[1.0] * 8, limit=K, params=params)
    assert rewrite(request, known)[0].prefetch[0].limit == limit


def test_where_exact_searches_are_forbidden_none_is_made():
    index = Index(300.0)
    index.exact_allowed = False
    found = calibrate(version("payload"), POINTS, index)
    assert 300 <= found.candidates(K) <= 375
    assert (found.recall, found.raw_recall) == (1.0, None)


def test_results_that_score_the_same_as_the_last_count_as_well():
    exact = Hits([[*range(12)]], [[9.0] * 8 + [1.0] * 4])
    for seventh, share in ((7, 1.0), (20, 0.9)):
        found = Hits([[0, 1, 2, 3, 4, 5, 6, seventh, 10, 11]], [])
        assert recall(found, exact) == share


@pytest.mark.parametrize("pace", [0, -1, 1.5, "half"])
def test_a_pace_out_of_its_range_is_refused(cosine, pace):
    with pytest.raises(InputError, match=f"pace={pace!r}: expected a"):
        hubplugin_qdrant.open_store(cosine.plain, "photos", pace=pace)


def test_the_recall_that_is_reached_is_told_and_a_refresh_finds_the_same_width():
    rng = np.random.default_rng(1)
    client, bank = QdrantClient(":memory:"), rng.normal(size=(100, 8))
    collection(client, rng.normal(size=(600, 8)))
    store = hubplugin_qdrant.open_store(client, "photos")
    hubplugin.apply(store, bank, "is", force=True)
    first = store.active()
    assert first.raw_recall == 1.0
    assert first.recall >= 0.99
    assert f"{first.recall:.3f} of the exact corrected top 10" in first.where()
    hubplugin.refresh(store)
    assert store.active().oversampling == first.oversampling


def widths_beside(writes, busy=range(0)):
    """Return the widths that are calibrated while others write.

    Beside each of the `busy` searches `writes` points come, move and go.
    """
    rng = np.random.default_rng(0)
    vectors, bank = rng.normal(size=(2, 1200, 8)) + 0.3
    client = QdrantClient(":memory:")
    collection(client, vectors[:600])
    others, search = iter(range(600, 1200)), client.query_batch_points
    searches = itertools.count()

    def beside_a_writer(*given, **named):
        if next(searches) not in busy:
            return search(*given, **named)
        for key in itertools.islice(others, writes):
            vector = vectors[key].tolist()
            come = models.PointStruct(id=key, vector=vector)
            move = models.PointStruct(id=key - 600, vector=vector)
            client.upsert("photos", [come, move])
            client.delete("photos", [key - 300])
        return search(*given, **named)

    client.query_batch_points = beside_a_writer
    store = hubplugin_qdrant.open_store(client, "photos")
    hubplugin.apply(store, bank[:100], "nnn", force=True)
    return np.array([store.active().oversampling, store.active().exact_oversampling])


@pytest.mark.parametrize("first", [0, 6])
def test_beside_a_writer_the_width_is_that_of_a_quiet_collection(first):
    quiet = widths_beside(0)
    beside = widths_beside(4, range(first, 20))
    assert (np.abs(np.log(beside / quiet)) <= np.log(1.26)).all()
