"""What `fit` takes, and what it refuses."""

import numpy as np
import pytest

from hubplugin import Bank, Compute, InputError, OffsetModel, apply, fit, inspect, load
from hubplugin.compute import Similarities
from tests.galleries import assert_near, flat_store, normal, unit
from tests.refusals import refused

X = np.eye(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"method": "sinkhorn"},
            "unknown method 'sinkhorn': use one of blend, is, sn, dbsn",
        ),
        (
            {"method": "is", "tau": 0},
            "tau=0 is refused: Input should be greater than 0",
        ),
        ({"method": "is", "tau": float("nan")}, "finite"),
        ({"method": "nnn", "k": 0}, "k=0 is refused"),
        (
            {"method": "nnn", "tau": 0.1},
            "'tau' is neither an argument nor a parameter of method 'nnn', which takes answers, k, alpha",
        ),
        (
            {"method": "sn"},
            "this needs the gallery, and none was given: pass targets=",
        ),
        (
            {"method": "dualis"},
            "the bank has no vectors of its answers: pass answers=",
        ),
        (
            {"method": X},
            "method must be a name, not ndarray; a gallery is given as targets=",
        ),
        (
            {"method": "dis"},
            "unknown method 'dis': use one of blend, is",
        ),
        ({"method": "is", "metric": "manhattan"}, "use one of cosine, dot, euclidean"),
        (
            {"method": "is", "targets": X, "compute": Compute("abacus")},
            "device 'abacus' is not usable here",
        ),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_in_one_line(arguments, says):
    with refused(InputError, says):
        fit(**{"targets": None, "bank": X, **arguments})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"memory": "much"}, "memory='much': expected 1,048,576 or more"),
        ({"memory": 1000}, "memory=1000: expected 1,048,576 or more"),
        (
            {"precision": "double"},
            "precision='double' is unknown; use one of auto, float64",
        ),
    ],
)
def test_what_cannot_be_computed_with_is_refused_in_one_line(arguments, says):
    with refused(InputError, says):
        Compute(**arguments)


def test_a_model_is_described_by_what_was_given_and_no_longer_than_it_need_be():
    described = repr(fit(None, X, "is", tau=0.04419417382415922))
    assert "is(tau=0.04419), cosine, bank (4, 4)" in described
    assert "dn(lam=0.5), cosine, bank (1, 4)" in repr(fit(None, X, "dn"))


def test_a_fit_without_targets_is_centred_when_it_is_given_some(rng):
    bank, targets = (rng.normal(size=(rows, 6)) for rows in (20, 30))
    late = fit(None, bank, "is")
    assert late.gallery is None
    expected = fit(targets, bank, "is").offsets(targets)
    found = late.centre_on(targets).offsets(targets)
    np.testing.assert_array_equal(found, expected)


def test_progress_counts_up_to_the_whole(rng):
    seen = []
    bank, targets = (rng.normal(size=(rows, 6)) for rows in (20, 30))
    compute = Compute(progress=lambda *step: seen.append(step))
    fit(targets, bank, "sn", iterations=3, compute=compute)
    assert [step for step in seen if step[1] == step[2] == 30]
    assert {what for what, _, _ in seen} == {
        "Sinkhorn iteration 1",
        "Sinkhorn iteration 2 of 3",
        "Sinkhorn iteration 3 of 3",
        "log-sum-exp",
    }


@pytest.mark.filterwarnings("error")
def test_a_read_only_memory_map_and_a_model_from_a_file_are_used_without_a_warning(
    tmp_path, rng
):
    np.save(tmp_path / "x.npy", normal(rng, 30, 6))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    fit(mapped, mapped, "sn", metric="dot").save(tmp_path / "m.hub")
    assert load(tmp_path / "m.hub").offsets(mapped).shape == (30,)


@pytest.fixture
def sets(rng):
    """Gallery [300, 8] and bank [60, 8]."""
    return [normal(rng, rows, 8) for rows in (300, 60)]


def with_zeros(vectors, rows):
    """`vectors` with zero vectors that then lie in `rows`."""
    found = np.zeros((len(vectors) + len(rows), *vectors.shape[1:]), np.float32)
    found[np.delete(np.arange(len(found)), rows)] = vectors
    return found


def prepared(queries, answers=None):
    return Bank(queries, answers).prepare("cosine", Compute())


def test_zero_vectors_are_left_out_of_a_fit_and_have_the_offset_0(sets):
    gallery, bank = sets
    rows = [0, 7, 301]
    expected = fit(gallery, bank)
    more = with_zeros(gallery, rows)
    said = "targets: 3 zero vectors are left out, and get the offset 0"
    with pytest.warns(UserWarning, match=said):
        model = fit(more, bank)
    assert model.gallery == expected.gallery
    offsets = with_zeros(expected.offsets(gallery), rows)
    for found in (model.offsets(more), model.fitted):
        assert_near(found, offsets, 1e-6)
    assert model.offsets(np.zeros((2, 8))).tolist() == [0, 0]
    with refused(InputError, "targets: all 4 rows are zero vectors"):
        fit(np.zeros((4, 8)), bank)


def test_answers_stay_with_their_queries_where_zero_vectors_are_left_out(sets, rng):
    gallery, bank = sets
    answers = rng.permutation(300)[:60]
    more = with_zeros(gallery, [0, 7])
    rows = np.delete(np.arange(302), [0, 7])[answers]
    found = prepared(bank, rows).against(more)
    np.testing.assert_array_equal(found.clicks, answers)


def test_zero_vectors_in_a_bank_are_refused_by_their_row(sets):
    _, bank = sets
    some = with_zeros(bank, [5])
    said = "query bank: row 5 is a zero vector, which has no cosine similarity; remove"
    with refused(InputError, said):
        prepared(some)
    with refused(InputError, "target bank: row 5 is"):
        prepared(bank, some)


def test_other_terms_and_files_have_none_and_nobody_can_write_to_them(sets):
    targets, bank = sets
    model = fit(targets, bank, "is")
    assert OffsetModel.from_bytes(model.to_bytes()).fitted is None
    assert fit(None, bank, "is").fitted is None
    with pytest.raises(ValueError, match="read-only"):
        model.fitted[0] = 0


def test_what_a_store_gets_is_not_computed_again(sets, monkeypatch, tmp_path):
    passes = []
    whole = Similarities.tiles

    def tiles(self, targets, label, **options):
        passes.append(label)
        return whole(self, targets, label, **options)

    monkeypatch.setattr(Similarities, "tiles", tiles)
    targets, bank = map(unit, sets)
    store = flat_store(tmp_path, targets)
    done = apply(store, bank, force=True)
    assert "offsets" not in passes
    assert done.missing == len(targets)
    assert not inspect(store).stale
