"""What a shard's user asks beside the conformance suite: filters, payloads, copies, and errors in one line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hubplugin
from hubplugin import apply, inspect, open_store

edge = pytest.importorskip("qdrant_edge", reason="pip install '.[edge]' to test Qdrant Edge")

from hubplugin_qdrant.edge import EdgeStore  # noqa: E402

ROWS, DIM, K = 200, 16, 10


@pytest.fixture
def shard(tmp_path):
    rng = np.random.default_rng(3)
    path = tmp_path / "shard"
    path.mkdir()
    config = edge.EdgeConfig({name: edge.EdgeVectorParams(DIM, edge.Distance.Euclid) for name in ("image", "text")})
    opened = edge.EdgeShard.create(str(path), config)
    rows = rng.normal(size=(ROWS, 2, DIM)).astype(np.float32)
    points = [
        edge.Point(row, {"image": image.tolist(), "text": text.tolist()}, {"row": row, "parity": row % 2})
        for row, (image, text) in enumerate(rows)
    ]
    opened.update(edge.UpdateOperation.upsert_points(points))
    yield opened
    opened.close()


@pytest.fixture
def store(shard, tmp_path):
    return EdgeStore(shard, tmp_path / "shard", "image")


@pytest.fixture
def bank():
    return np.random.default_rng(4).normal(size=(60, DIM)).astype(np.float32)


def images(store):
    return np.concatenate([batch.vectors for batch in store.scan()])


def similarities(store, model, query):
    targets = images(store).astype(np.float64)
    return -((targets - query) ** 2).sum(axis=1) / 2 + model.offsets(targets)


def test_a_filtered_query_ranks_what_the_filter_leaves(store, bank):
    model = apply(store, bank, "is", tau=0.5, force=True).model
    even = edge.Filter(must=[edge.FieldCondition("parity", match=edge.MatchValue(0))])
    found = store.query(bank[0], K, filter=even)
    best = np.sort(similarities(store, model, bank[0])[::2])[::-1][:K]
    np.testing.assert_allclose([-point.score * abs(point.score) / 2 for point in found], best, rtol=1e-4)


def test_scores_are_distances_and_the_threshold_holds_for_the_corrected_one(store, bank):
    apply(store, bank, "is", tau=0.5, force=True)
    found = store.query(bank[0], 50)
    limit = found[20].score
    within = store.query(bank[0], 50, score_threshold=limit + 1e-4)
    assert [point.id for point in within] == [point.id for point in found if point.score <= limit + 1e-4]


def test_pages_follow_one_another(store, bank):
    apply(store, bank, "is", tau=0.5, force=True)
    pages = [point.id for start in range(0, 60, 20) for point in store.query(bank[0], 20, offset=start)]
    assert pages == [point.id for point in store.query(bank[0], 60)]


def test_offsets_do_not_show_in_payloads(store, bank):
    apply(store, bank, "is", tau=0.5, force=True)
    for point in store.query(bank[0], K, with_payload=True):
        assert point.payload == {"row": point.id, "parity": point.id % 2}


@pytest.mark.parametrize("value", [5, "Berlin", None, {}, {"city": 3}, {"v1": "one"}, [1, 2]], ids=repr)
def test_a_payload_key_that_the_user_has_is_refused_and_stays(store, shard, bank, tmp_path, value):
    shard.update(edge.UpdateOperation.overwrite_payload([17], {"hub_offset": value}))
    for dry_run in (True, False):
        with pytest.raises(
            hubplugin.StoreError, match=r"'hub_offset' holds something of yours, in point 17; .*offset_key="
        ):
            apply(store, bank, "is", tau=0.5, force=True, dry_run=dry_run)
    assert not (tmp_path / "shard" / "hub").exists()
    assert shard.retrieve([17], True, False)[0].payload["hub_offset"] == value


def test_another_key_holds_the_offsets_of_a_shard(store, shard, bank, tmp_path):
    shard.update(edge.UpdateOperation.set_payload([17, 18], {"hub_offset": 5}))
    other = EdgeStore(shard, tmp_path / "shard", "image", offset_key="nudge")
    model = apply(other, bank, "is", tau=0.5, force=True).model
    best = np.argsort(-similarities(other, model, bank[0]))[:K]
    found = store.query(bank[0], K, with_payload=True)  # which takes the key from the manifest
    assert [point.id for point in found] == best.tolist()
    assert all("nudge" not in point.payload for point in found)
    assert shard.retrieve([17], True, False)[0].payload.keys() == {"row", "parity", "hub_offset", "nudge"}
    assert store.explain(bank[0], K).request["body"]["with_payload"] == {"exclude": ["nudge"]}
    assert (inspect(store).missing, inspect(store).stale) == (0, 0)
    store.remove()
    expected = [{"row": 16, "parity": 0}, {"row": 17, "parity": 1, "hub_offset": 5}]
    assert [record.payload for record in shard.retrieve([16, 17], True, False)] == expected


def test_a_removal_from_a_shard_leaves_what_others_wrote_under_our_key(store, shard, bank):
    apply(store, bank, "is", tau=0.5, force=True)
    values = {1: {"v77": 1.5}, 2: "text", 3: {"city": 1}, 4: [], 5: None}
    for key, value in values.items():
        shard.update(edge.UpdateOperation.overwrite_payload([key], {"hub_offset": value}))
    shard.update(edge.UpdateOperation.set_payload([6], {"city": 2}, "hub_offset"))
    store.remove()
    left = shard.retrieve(list(range(ROWS)), True, False)
    found = {record.id: record.payload["hub_offset"] for record in left if "hub_offset" in record.payload}
    assert found == values | {6: {"city": 2}}


def test_each_vector_of_a_shard_has_its_own_correction(store, shard, bank, tmp_path):
    text = EdgeStore(shard, tmp_path / "shard", "text")
    apply(store, bank, "is", tau=0.5, force=True)
    apply(text, bank, "nnn", k=5, force=True)
    corrected = text.search(bank, K)
    store.remove()
    assert store.correction() is None
    assert text.search(bank, K) == corrected
    assert inspect(text).missing == 0
    text.remove()
    assert [record.payload for record in shard.retrieve([7], True, False)] == [{"row": 7, "parity": 1}]
    assert not (tmp_path / "shard" / "hub").exists()
    assert shard.info().payload_schema == {}


def test_a_copy_of_the_folder_is_corrected(store, shard, bank, tmp_path):
    apply(store, bank, "is", tau=0.5, force=True)
    corrected = store.search(bank, K)
    shard.flush()
    shutil.copytree(tmp_path / "shard", tmp_path / "copy")
    assert open_store(f"qdrant-edge:{tmp_path / 'copy'}?using=image").search(bank, K) == corrected


def test_threads_that_search_while_others_write_find_whole_answers(store, shard, bank):
    apply(store, bank, "is", tau=0.5, force=True)
    fresh = np.random.default_rng(5).normal(size=(100, DIM)).astype(np.float32)

    def write(row):
        point = edge.Point(ROWS + row, {"image": fresh[row].tolist(), "text": fresh[row].tolist()})
        shard.update(edge.UpdateOperation.upsert_points([point]))

    def read(row):
        scores = [point.score for point in store.query(fresh[row], K)]
        return len(scores) == K and scores == sorted(scores)

    with ThreadPoolExecutor(20) as pool:
        written = [pool.submit(write, row) for row in range(100)]
        assert all(pool.map(read, range(100)))
        for done in written:
            done.result()
    assert (inspect(store).count, inspect(store).missing) == (ROWS + 100, 100)


def test_a_damaged_manifest_is_one_line_that_names_it(store, bank, tmp_path):
    apply(store, bank, "is", tau=0.5, force=True)
    (tmp_path / "shard" / "hub" / "manifest.json").write_text("{")
    with pytest.raises(hubplugin.StoreError, match=r"hub/manifest\.json is damaged"):
        store.search(bank, K)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("qdrant-edge:{0}/nowhere", "there is no shard in that folder"),
        ("qdrant-edge:{0}/shard?using=sound", "no dense vector 'sound'; there are: 'image', 'text'"),
        ("qdrant-edge:{0}/shard", "name one of its dense vectors with vector=; there are: 'image', 'text'"),
        ("qdrant-edge:{0}/shard?vector=image", "no more than .using=VECTOR"),
    ],
)
def test_a_url_that_leads_nowhere_says_what_there_is(shard, tmp_path, url, said):
    shard.close()
    with pytest.raises(hubplugin.HubpluginError, match=said):
        open_store(url.format(tmp_path))


@pytest.mark.slow
def test_a_shard_that_another_process_holds_is_one_line(shard, tmp_path):
    program = "import sys; from hubplugin.registry import open_store; open_store(sys.argv[1])"
    ran = subprocess.run(
        [sys.executable, "-c", program, f"qdrant-edge:{tmp_path / 'shard'}?using=image"], capture_output=True, text=True
    )
    assert "another process has the shard open" in ran.stderr.splitlines()[-1]
    assert ran.stderr.splitlines()[-1].startswith("hubplugin.errors.StoreError: qdrant-edge:")


def test_vectors_that_cannot_carry_offsets_are_refused(tmp_path):
    (tmp_path / "shard").mkdir()
    parameters = {
        "colbert": edge.EdgeVectorParams(
            DIM, edge.Distance.Dot, multivector_config=edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim)
        ),
        "city": edge.EdgeVectorParams(DIM, edge.Distance.Manhattan),
    }
    opened = edge.EdgeShard.create(str(tmp_path / "shard"), edge.EdgeConfig(parameters))
    for using, said in (("colbert", "multi-vector"), ("city", "ranks by Manhattan")):
        with pytest.raises(hubplugin.StoreError, match=said):
            EdgeStore(opened, tmp_path / "shard", using)


def test_the_engine_ranks_by_the_formula_that_explain_prints(store, bank):
    apply(store, bank, "is", force=True)
    explained = store.explain(bank[0], K)
    body, key = explained.request["body"], store.active_version().key
    (candidates,) = body["prefetch"]
    assert (candidates["using"], candidates["limit"]) == ("image", store.active_version().candidates(K))
    assert body["query"] == {
        "formula": {"sum": [{"mult": [-0.5, "$score", "$score"]}, key]},
        "defaults": {key: 0.0},
    }
    assert "sqrt(-2 s)" in explained.text


def test_without_a_correction_there_is_nothing_to_explain(store, bank):
    with pytest.raises(hubplugin.StoreError, match="no correction is active"):
        store.explain(bank[0])
