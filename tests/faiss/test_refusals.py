"""What cannot be upgraded is refused in one line, and stays as it is."""

import subprocess
import sys

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
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
    "binary": (
        lambda: faiss.IndexBinaryFlat(8),
        "of real numbers, got IndexBinaryFlat",
    ),
    "type": (
        lambda: faiss.IndexFlat,
        "expected a faiss.Index of real numbers, got type",
    ),
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
    index = make()
    unwritable = "type", "binary", "no rule", "nested"
    before = None if name in unwritable else faiss.serialize_index(index)
    with pytest.raises(hubplugin.HubpluginError) as caught:
        hubplugin_faiss.upgrade(index, GIVEN.get(name, OFFSETS))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    if before is not None:
        np.testing.assert_array_equal(faiss.serialize_index(index), before)


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
            match=r"take recall@10 of bank queries from .*, and 0\.05 is the most",
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


def test_a_loss_that_is_not_refused_is_a_warning_with_what_helps():
    rng = np.random.default_rng(4)
    vectors, bank = (cases.unit(rng.normal(size=(rows, 16))) for rows in (3000, 300))
    model = hubplugin.fit(vectors, bank, "nnn", k=3, alpha=1.0)
    says = (
        r"recall@10 of bank queries from 0\.\d+ to 0\.\d+ .*a larger nprobe, efSearch"
    )
    with pytest.warns(UserWarning, match=says):
        hubplugin_faiss.upgrade(cases.filled("HNSW8", vectors), model, force=True)


def test_ids_of_vectors_are_given_once():
    index = faiss.index_factory(8, "IVF4,Flat", IP)
    index.train(X)
    index.add_with_ids(X[:40], 20 + np.arange(40))
    upgraded = hubplugin_faiss.upgrade(index, fitted("dot"), force=True)
    with pytest.raises(hubplugin.StoreError, match="has ids of its own: pass ids="):
        hubplugin_faiss.add(upgraded, X[40:], fitted("dot"))
    hubplugin_faiss.add(upgraded, X[40:], fitted("dot"), ids=100 + np.arange(10))
    assert upgraded.ntotal == 50


def test_what_torch_patches_in_faiss_does_not_matter():
    pytest.importorskip("torch")
    program = (
        "import faiss, faiss.contrib.torch_utils, numpy as np, hubplugin_faiss\n"
        "x = np.random.default_rng(0).normal(size=(600, 8)).astype('f4')\n"
        "for kind in ('Flat', 'IVF4,Flat', 'IVF4,PQ4x4fs', 'HNSW8', 'PQ4x4,RFlat'):\n"
        "    index = faiss.index_factory(8, kind, faiss.METRIC_INNER_PRODUCT)\n"
        "    index.train(x); index.add(x)\n"
        "    index = hubplugin_faiss.upgrade(index, np.zeros(600))\n"
        "    hubplugin_faiss.add(index, x[:5], np.zeros(5))\n"
        "    hubplugin_faiss.downgrade(index)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
