"""What cannot be upgraded is refused in one line, and stays as it is."""

import subprocess
import sys

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from hubplugin import HubpluginError, StoreError, fit
from hubplugin_faiss import add, downgrade, for_gpu, upgrade
from tests.faiss.cases import IP, bytes_of, draw, filled, made, stored, written
from tests.refusals import refused

(X,) = draw(np.random.default_rng(1), 50, d=8)
OFFSETS = np.linspace(-0.1, 0.1, 50).astype(np.float32)


def flat(metric=IP, vectors=X):
    return filled("Flat", vectors, metric)


def with_ids(index):
    index.train(X)
    index.add_with_ids(X, 7 * np.arange(50))
    return index


def taken_as_bytes():
    index = faiss.IndexScalarQuantizer(8, faiss.ScalarQuantizer.QT_8bit_direct, IP)
    index.add(np.round(100 * np.abs(X)))
    return index


def without_order():
    """An index from which Faiss itself has removed entries, and mixed up the ids."""
    index = with_ids(faiss.index_factory(8, "IDMap,IVF4,Flat"))
    index.remove_ids(np.arange(0, 70, 7))
    return index


def fitted(metric, d=8):
    rng = np.random.default_rng(2)
    targets, bank = rng.normal(size=(40, d)), rng.normal(size=(30, d))
    return fit(targets, bank, "nnn", metric=metric, k=3)


INDEXES = {
    "IndexIVFFlat is not trained": lambda: faiss.index_factory(8, "IVF4,Flat"),
    "has metric 2, neither inner product": lambda: flat(faiss.METRIC_L1),
    "of real numbers, got IndexBinaryFlat": lambda: faiss.IndexBinaryFlat(8),
    "expected a faiss.Index of real numbers, got type": lambda: faiss.IndexFlat,
    "the ITQTransform before this IndexFlat": lambda: filled("ITQ8,Flat", X),
    "IndexLattice cannot carry offsets; leave": lambda: faiss.IndexLattice(8, 2, 4, 2),
    "leave it as it is and search with hubplugin_faiss.Corr": taken_as_bytes,
    "the ids of this IndexIVFFlat are not 0 ... 49": lambda: with_ids(
        faiss.index_factory(8, "IVF4,Flat")
    ),
    "no longer knows which entry has which id": without_order,
}


@pytest.mark.parametrize("says", INDEXES)
def test_an_index_that_cannot_be_upgraded_says_why_in_one_line(says):
    with refused(HubpluginError, says):
        upgrade(INDEXES[says](), OFFSETS)


GIVEN = {
    "IndexFlat is empty; add vectors": (X[:0], OFFSETS[:0]),
    "have shape [7], the index holds 50": (X, OFFSETS[:7]),
    "offsets: entry 0 is NaN": (X, np.full(50, np.nan)),
    "the model has 9 dimensions, the index has 8": (X, fitted("dot", 9)),
    "for euclidean, the index ranks by dot; fit with metric='dot'": (
        X,
        fitted("euclidean"),
    ),
    "row 0 has length 2 and Faiss does not": (2 * X, fitted("cosine")),
}


@pytest.mark.parametrize("says", GIVEN)
def test_offsets_or_a_model_that_do_not_suit_the_index_are_refused(says):
    vectors, given = GIVEN[says]
    with refused(HubpluginError, says):
        upgrade(flat(vectors=vectors), given)


def test_codes_whose_lengths_are_far_from_1_are_refused_by_cosine():
    says = r"row 0 has length [45]\.\d+ and Faiss does not"
    with refused(HubpluginError, says):
        upgrade(filled("SQ6", 5 * X), fitted("cosine"))


@pytest.mark.parametrize("use", [downgrade, for_gpu, lambda i: add(i, X, OFFSETS)])
def test_an_index_that_is_not_upgraded_has_no_offsets(use):
    with refused(StoreError, r"is not upgraded; upgrade\(index, model\) puts"):
        use(flat())


@pytest.mark.parametrize(
    ("says", "kind", "given"),
    [
        ("have 5 dimensions, the index has 8", "Flat", (X[:, :5], OFFSETS)),
        ("offsets have shape [3], the batch holds 50", "Flat", (X, OFFSETS[:3])),
        ("numbers its entries itself", "Flat", (X, OFFSETS, np.arange(50))),
        ("has its own ids: pass ids=", "IDMap2,Flat", (X, OFFSETS)),
        ("ids of shape (4,)", "IDMap2,Flat", (X, OFFSETS, np.arange(4))),
        ("row 0 has length 3", "Flat", (3 * X, fitted("cosine"))),
        ("model.centre_on(targets)", "Flat", (X, fit(None, X, "is"))),
    ],
)
def test_what_cannot_be_added_is_refused_and_nothing_is_added(says, kind, given):
    case = made(kind, IP, n=300, d=8)
    upgraded = upgrade(case.index, case.offsets)
    with refused(HubpluginError, says):
        add(upgraded, *given)
    assert upgraded.ntotal == 300


def test_a_model_fitted_without_targets_is_centred_on_the_index():
    model = fit(None, X[:20], "is")
    offsets = stored(upgrade(flat(), model))
    assert abs(offsets.mean()) < 1e-6
    assert offsets.std() > 1e-4


def test_an_upgrade_that_finds_less_than_is_promised_is_refused_unless_forced(tmp_path):
    vectors, bank = draw(np.random.default_rng(4), 2000, 300)
    index = filled("HNSW4", vectors)
    model = fit(vectors, bank, "nnn", k=3, alpha=2.0)
    before = bytes_of(index)
    file = written(tmp_path / "x.faiss", index)
    content = file.read_bytes()
    loses = pytest.raises(
        hubplugin.CorrectionRefused,
        match=r"lower recall@10 of bank queries from .*, and 0\.05 is the most",
    )
    with loses:
        upgrade(index, model)
    with loses:
        hubplugin.apply(hubplugin_faiss.open_store(file), model)
    assert bytes_of(index) == before
    assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]
    store = hubplugin_faiss.open_store(file)
    says = (
        r"recall@10 of bank queries from 0\.\d+ to 0\.\d+ .*a larger nprobe, efSearch"
    )
    with pytest.warns(UserWarning, match=says):
        hubplugin.apply(store, model, force=True)
    hubplugin.apply(store, fit(vectors, bank, "nnn", k=3), force=True)
    assert hubplugin.rollback(store).written
    assert hubplugin.refresh(store).stale == 0


def test_vectors_are_not_added_with_another_model():
    model, another = (
        fit(X, bank, "nnn", metric="dot", k=2) for bank in (X[:20], X[20:40])
    )
    upgraded = upgrade(flat(), model)
    says = "come from another model; add with that model"
    with refused(StoreError, says):
        add(upgraded, X[:3], another)
    assert upgraded.ntotal == 50
    add(upgraded, X[:3], model)
    assert upgraded.ntotal == 53


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
