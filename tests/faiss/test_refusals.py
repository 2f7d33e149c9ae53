"""What cannot be upgraded is refused in one line, and stays as it is."""

import warnings

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from hubplugin_faiss import calibration
from tests.faiss import cases
from tests.faiss.cases import IP, L2

X = cases.unit(np.random.default_rng(1).normal(size=(50, 8)))
OFFSETS = np.linspace(-0.1, 0.1, 50).astype(np.float32)


def flat(metric: int = IP, vectors: np.ndarray = X) -> faiss.Index:
    return cases.filled("Flat", vectors, metric)


def with_ids(index: faiss.Index) -> faiss.Index:
    index.train(X)
    index.add_with_ids(X, 7 * np.arange(50))
    return index


def taken_as_bytes() -> faiss.Index:
    index = faiss.IndexScalarQuantizer(8, faiss.ScalarQuantizer.QT_8bit_direct, IP)
    index.add(np.round(100 * np.abs(X)))
    return index


def put_together(kind: str) -> faiss.Index:
    index = getattr(faiss, kind)(8)
    (index.add_shard if kind == "IndexShards" else index.add_replica)(flat())
    return index


REFUSED = {
    "empty": (
        lambda: faiss.IndexFlatIP(8),
        "IndexFlatIP is empty; add vectors, then upgrade it",
    ),
    "untrained": (
        lambda: faiss.index_factory(8, "IVF4,Flat"),
        "IndexIVFFlat is not trained",
    ),
    "count": (
        flat,
        "have shape [7], the index holds 50: expected an OffsetModel, or one for each",
    ),
    "nan": (flat, "offsets: entry 3 is NaN"),
    "metric": (
        lambda: flat(faiss.METRIC_L1),
        "has metric 2, neither inner product nor L2",
    ),
    "binary": (lambda: faiss.IndexBinaryFlat(8), "IndexBinaryFlat holds bits"),
    "type": (lambda: faiss.IndexFlat, "expected a faiss index, got type"),
    "no way back": (
        lambda: cases.filled("ITQ8,Flat", X),
        "the ITQTransform before this IndexFlat cannot be turned",
    ),
    "no rule": (
        lambda: faiss.IndexLattice(8, 2, 4, 2),
        "IndexLattice cannot carry offsets; leave it as",
    ),
    "bytes": (
        taken_as_bytes,
        "leave it as it is and search with hubplugin_faiss.CorrectedSearch",
    ),
    "shards": (
        lambda: put_together("IndexShards"),
        "merge its shards into one index (first.merge_from(",
    ),
    "replicas": (
        lambda: put_together("IndexReplicas"),
        "upgrade one replica, index.at(0), and build the",
    ),
    "nested": (
        lambda: faiss.IndexIDMap(faiss.IndexLattice(8, 2, 4, 2)),
        "IndexLattice cannot carry offsets",
    ),
    "ids": (
        lambda: with_ids(faiss.index_factory(8, "IVF4,Flat")),
        "the ids of this IndexIVFFlat are not 0 ... 49",
    ),
}
GIVEN = {
    "empty": OFFSETS[:0],
    "count": OFFSETS[:7],
    "nan": np.where(np.arange(50) == 3, np.nan, OFFSETS),
}
"""Instead of OFFSETS."""


@pytest.mark.parametrize("name", REFUSED)
def test_an_index_that_cannot_be_upgraded_says_why_in_one_line(name):
    make, says = REFUSED[name]
    index, unwritable = (
        make(),
        ("type", "binary", "no rule", "nested", "shards", "replicas"),
    )
    before = None if name in unwritable else faiss.serialize_index(index)
    with pytest.raises(hubplugin.HubpluginError) as caught:
        hubplugin_faiss.upgrade(index, GIVEN.get(name, OFFSETS))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    if before is not None:
        np.testing.assert_array_equal(faiss.serialize_index(index), before)


def test_a_file_whose_vectors_cannot_be_read_back_is_refused_in_one_line(tmp_path):
    file = cases.written(tmp_path / "x.faiss", cases.filled("ITQ8,Flat", X))
    with pytest.raises(
        hubplugin.StoreError,
        match=r"the ITQTransform before this IndexFlat.* cannot be turned back",
    ):
        hubplugin.apply(hubplugin_faiss.open_store(file), X, "csls", force=True)


@pytest.mark.parametrize("kind", ["SQ0", "IVF4,SQ0", "IDMap2,SQ0", "SQ0,RFlat"])
def test_codes_without_room_are_refused_in_one_line_by_every_way_in(kind, tmp_path):
    index = cases.filled(kind, X)
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    for way in (
        lambda: hubplugin_faiss.upgrade(index, OFFSETS),
        lambda: hubplugin_faiss.upgrade(index, fitted("dot")),
        lambda: hubplugin.apply(
            hubplugin_faiss.open_store(tmp_path / "x.faiss", metric="dot"),
            fitted("dot"),
        ),
    ):
        with pytest.raises(
            hubplugin.StoreError,
            match=r"codes of type QT_0bit in this Index\w+ cannot carry offsets",
        ):
            way()


def test_an_index_on_a_gpu_is_refused_with_the_way_to_the_cpu(monkeypatch):
    monkeypatch.setattr(faiss, "GpuIndex", faiss.IndexFlat, raising=False)
    with pytest.raises(
        hubplugin.StoreError,
        match=r"IndexFlat is on a GPU, .*faiss\.index_gpu_to_cpu\(index\)",
    ):
        hubplugin_faiss.upgrade(flat(), OFFSETS)


def fitted(metric: str, d: int = 8) -> hubplugin.OffsetModel:
    rng = np.random.default_rng(2)
    return hubplugin.fit(
        rng.normal(size=(40, d)), rng.normal(size=(30, d)), "nnn", metric=metric, k=3
    )


@pytest.mark.parametrize(
    ("index", "model", "says"),
    [
        (flat(), fitted("dot", 9), "the model has 9 dimensions, the index has 8"),
        (
            flat(L2),
            fitted("dot"),
            "the model is for dot, the index ranks by L2; fit with metric='euclidean'",
        ),
        (
            flat(),
            fitted("euclidean"),
            "the model is for euclidean, the index ranks by inner product",
        ),
        (
            flat(IP, 2 * X),
            fitted("cosine"),
            "the model is for cosine, but row 0 has length 2 and Faiss does not",
        ),
        (
            cases.filled("SQ6", 5 * X),
            fitted("cosine"),
            "its codes stand for vectors of about length 5",
        ),
    ],
)
def test_a_model_that_does_not_suit_the_index_is_refused(index, model, says):
    with pytest.raises(hubplugin.InputError) as caught:
        hubplugin_faiss.upgrade(index, model)
    assert says in str(caught.value)


def test_downgrade_and_add_need_an_upgraded_index():
    for call in (
        lambda: hubplugin_faiss.downgrade(flat()),
        lambda: hubplugin_faiss.add(flat(), X, OFFSETS),
    ):
        with pytest.raises(hubplugin.StoreError) as caught:
            call()
        assert "is not upgraded; upgrade(index, model) puts offsets into it" in str(
            caught.value
        )


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        (
            "Flat",
            {"vectors": X[:, :5], "model_or_offsets": OFFSETS},
            "have 5 dimensions, the index has 8",
        ),
        (
            "Flat",
            {"vectors": X, "model_or_offsets": OFFSETS[:3]},
            "offsets have shape [3], the batch holds 50",
        ),
        (
            "Flat",
            {"vectors": X, "model_or_offsets": OFFSETS, "ids": np.arange(50)},
            "numbers its entries itself",
        ),
        (
            "IDMap2,Flat",
            {"vectors": X, "model_or_offsets": OFFSETS},
            "has ids of its own: pass ids=",
        ),
        (
            "IDMap2,Flat",
            {"vectors": X, "model_or_offsets": OFFSETS, "ids": np.arange(4)},
            "ids of shape (4,)",
        ),
        (
            "Flat",
            {"vectors": 3 * X, "model_or_offsets": fitted("cosine")},
            "row 0 has length 3",
        ),
        (
            "Flat",
            {"vectors": X, "model_or_offsets": hubplugin.fit(None, X, "is")},
            "model = model.centre_on(targets)",
        ),
    ],
)
def test_what_cannot_be_added_is_refused_and_nothing_is_added(kind, arguments, says):
    case = cases.made(kind, IP, n=300, d=8)
    upgraded = hubplugin_faiss.upgrade(case.index, case.offsets)
    with pytest.raises(hubplugin.HubpluginError) as caught:
        hubplugin_faiss.add(upgraded, **arguments)
    assert says in str(caught.value)
    assert upgraded.ntotal == 300


def test_a_model_fitted_without_targets_is_centred_on_the_index():
    offsets = cases.stored(
        hubplugin_faiss.upgrade(flat(), hubplugin.fit(None, X[:20], "is"))
    )
    assert abs(offsets.mean()) < 1e-6
    assert offsets.std() > 1e-4


BANK = cases.unit(np.random.default_rng(5).normal(size=(300, 16)))


def poor_graph() -> tuple[faiss.Index, hubplugin.OffsetModel]:
    rng = np.random.default_rng(4)
    vectors, bank = (
        cases.unit(rng.normal(size=(2000, 16))),
        cases.unit(rng.normal(size=(300, 16))),
    )
    return cases.filled("HNSW4", vectors), hubplugin.fit(
        vectors, bank, "nnn", k=3, alpha=2.0
    )


def test_a_graph_says_with_which_search_it_finds_what_it_found():
    rng = np.random.default_rng(4)
    vectors, bank = (
        cases.unit(rng.normal(size=(3000, 16))),
        cases.unit(rng.normal(size=(300, 16))),
    )
    index = cases.filled("HNSW8", vectors)
    model = hubplugin.fit(vectors, bank, "nnn", k=3, alpha=1.0)
    says = r"queries is 0\.\d+ against the exact .* brings it back, in \d\.\d times the time of a search: faiss\.Param"
    with pytest.warns(UserWarning, match=says) as caught:
        upgraded = hubplugin_faiss.upgrade(index, model, force=True)
    inner = faiss.downcast_index(upgraded.index)
    assert inner.hnsw.efSearch == 16
    exec(
        str(caught[0].message).rpartition(": ")[2], {"index": upgraded, "faiss": faiss}
    )
    raw = cases.similarities(bank, vectors, IP)
    before = cases.recall(index.search(bank, 10)[1], cases.best(raw))
    assert inner.hnsw.efSearch > 16
    assert (
        cases.recall(
            upgraded.search(bank, 10)[1], cases.best(raw + model.offsets(vectors))
        )
        > before - 0.003
    )


def lists_of_which_few_are_visited(
    alpha: float,
) -> tuple[faiss.Index, hubplugin.OffsetModel]:
    """Targets that offsets lift lie in other lists than a query, so that lists in their raw order hide them."""
    rng = np.random.default_rng(1)
    vectors, bank = (
        cases.unit(rng.normal(size=(4000, 16))),
        cases.unit(rng.normal(size=(300, 16))),
    )
    index = cases.filled(
        "IVF64(SQ8),SQ8", vectors
    )  # residual codes behind such centroids are not ranked
    index.nprobe = 16
    return index, hubplugin.fit(vectors, bank, "nnn", k=3, alpha=alpha)


def test_lists_that_lose_say_which_nprobe_makes_up_for_it_and_what_it_costs(tmp_path):
    index, model = lists_of_which_few_are_visited(alpha=1.0)
    file = cases.written(tmp_path / "x.faiss", index)
    says = r"brings it back, in \d\.\d times the time of a search: faiss\.ParameterSpace\(\)\..*\"nprobe=(\d+)\"\)"
    with pytest.warns(UserWarning, match=says) as caught:
        hubplugin.apply(hubplugin_faiss.open_store(file), model)
    upgraded = hubplugin_faiss.read_index(file)[0]
    assert faiss.extract_index_ivf(upgraded).nprobe == 16
    before, found = cases.loss_of_recall(index, upgraded, model)
    exec(
        str(caught[0].message).rpartition(": ")[2], {"index": upgraded, "faiss": faiss}
    )
    assert found < before - 0.01
    # Beyond doubt: other queries lose more than those of the bank, which lists are ranked by.
    assert cases.loss_of_recall(index, upgraded, model)[1] > before
    faiss.write_index(upgraded, str(file))  # in which Faiss keeps the setting
    assert faiss.extract_index_ivf(hubplugin_faiss.read_index(file)[0]).nprobe > 16
    assert hubplugin.refresh(hubplugin_faiss.open_store(file)).stale == 0


@pytest.mark.filterwarnings("ignore:recall@10")
def test_a_loss_that_no_wider_search_makes_up_for_is_refused_where_it_is_small_too(
    monkeypatch,
):
    index, model = lists_of_which_few_are_visited(alpha=1.5)
    monkeypatch.setattr(calibration, "FACTORS", ())
    with pytest.raises(
        hubplugin.CorrectionRefused,
        match=r"0\.01 is the most where no search up to four times as wide",
    ):
        hubplugin_faiss.upgrade(index, model)
    hubplugin_faiss.upgrade(index, model, force=True)


@pytest.mark.filterwarnings("ignore:recall@10")
def test_an_upgrade_that_finds_less_than_is_promised_is_refused_unless_forced(tmp_path):
    index, model = poor_graph()
    file, before = tmp_path / "x.faiss", faiss.serialize_index(index)
    faiss.write_index(index, str(file))
    content = file.read_bytes()
    for way in (
        lambda: hubplugin_faiss.upgrade(index, model),
        lambda: hubplugin.apply(hubplugin_faiss.open_store(file), model),
    ):
        with pytest.raises(
            hubplugin.CorrectionRefused,
            match=r"take recall@10 of bank queries from .*, and 0\.05 ",
        ):
            way()
    np.testing.assert_array_equal(faiss.serialize_index(index), before)
    assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]
    hubplugin.apply(hubplugin_faiss.open_store(file), model, force=True)
    hubplugin.apply(
        hubplugin_faiss.open_store(file),
        hubplugin.fit(BANK, BANK, "nnn", k=3),
        force=True,
    )
    assert hubplugin.rollback(hubplugin_faiss.open_store(file)).written
    assert hubplugin.refresh(hubplugin_faiss.open_store(file)).stale == 0


@pytest.mark.parametrize(
    "kind",
    ["IVF8,PQ6x8np,RFlat", "IDMap2,HNSW16", "PCA12,IVF8,Flat", "HNSW16,Flat,RFlat"],
)
def test_a_wider_search_is_tried_by_one_factor_and_leaves_all_settings_as_they_were(
    kind,
):
    upgraded = hubplugin_faiss.upgrade(
        cases.made(kind, IP).index, cases.made(kind, IP).offsets
    )
    now, seen = calibration.settings(upgraded), []
    if "R" in kind:
        faiss.downcast_index(upgraded).k_factor = now["k_factor_rf"] = 1.5

    def lacks() -> float:
        seen.append(calibration.settings(upgraded))
        return 3 - len(seen)

    call, number = calibration.wider_search(upgraded, lacks)
    assert calibration.settings(upgraded) == now
    assert number == 3
    assert all(list(seen[i].values()) > list(now.values()) for i in range(3))
    exec(call, {"index": upgraded, "faiss": faiss})
    assert calibration.settings(upgraded) == seen[2]


def test_what_the_documentation_says_of_plain_faiss_works():
    case = cases.made("IVF8,Flat", IP)
    upgraded = hubplugin_faiss.upgrade(case.index, case.offsets)
    faiss.ParameterSpace().set_index_parameter(upgraded, "nprobe", 5)
    inner = faiss.extract_index_ivf(upgraded)
    assert inner.nprobe == 5
    inner.make_direct_map()
    np.testing.assert_allclose(upgraded.reconstruct(3), case.vectors[3], atol=1e-6)
    copy = faiss.deserialize_index(faiss.serialize_index(upgraded))
    np.testing.assert_array_equal(
        copy.search(case.queries, 5)[1], upgraded.search(case.queries, 5)[1]
    )


def test_vectors_are_not_added_with_another_model():
    models = [
        hubplugin.fit(X, X[rows], "nnn", metric="dot", k=2)
        for rows in (slice(0, 20), slice(20, 40))
    ]
    upgraded = hubplugin_faiss.upgrade(flat(), models[0])
    with pytest.raises(
        hubplugin.StoreError, match="are those of another model; add with that one"
    ):
        hubplugin_faiss.add(upgraded, X[:3], models[1])
    assert upgraded.ntotal == 50
    hubplugin_faiss.add(upgraded, X[:3], models[0])
    assert upgraded.ntotal == 53


def test_ids_that_faiss_has_lost_are_told_in_one_line():
    index = with_ids(faiss.index_factory(8, "IDMap,IVF4,Flat"))
    index.remove_ids(np.arange(0, 70, 7))
    with pytest.raises(hubplugin.StoreError, match="has lost which entry has which id"):
        hubplugin_faiss.upgrade(index, fitted("dot"))


def test_a_model_whose_bank_and_targets_were_swapped_is_noticed():
    bank = X[:20] + np.float32(0.01)
    swapped, right = hubplugin.fit(bank, X, "is"), hubplugin.fit(X, bank, "is")
    with pytest.warns(
        UserWarning,
        match="bank of 50 and 20 targets, and is given to a gallery of 50: if the two were",
    ):
        hubplugin_faiss.upgrade(flat(), swapped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hubplugin_faiss.upgrade(flat(), right)
