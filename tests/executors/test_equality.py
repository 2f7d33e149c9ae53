"""A fit in shards gives the offsets of a fit on one machine, as long as its sample is the gallery."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hubplugin

SETTINGS = [
    ("blend", {}),
    ("blend", {"answers": "kept"}),
    ("blend", {"sample": 700}),
    ("is", {}),
    ("is", {"answers": "left out"}),
    ("sn", {}),
    ("sn", {"tau": 0.005}),
    ("sn", {"sample": 700}),
    ("dbsn", {}),
    ("dbsn", {"answers": "left out"}),
    ("dualis", {}),
    ("nnn", {}),
    ("nnn", {"answers": "left out"}),
    ("csls", {}),
    ("dn", {}),
    ("dn", {"answers": "left out"}),
    ("blend", {"metric": "dot"}),
    ("nnn", {"metric": "euclidean"}),
]


def offsets(bank, method, gallery, second, **more):
    """Of the gallery, by a fit on one machine; by one in shards where they are given."""
    model = hubplugin.fit(
        more.pop("shards_at", gallery),
        hubplugin.Bank(bank, second),
        method,
        **more,
    )
    return model, model.offsets(gallery)


@pytest.mark.parametrize(("method", "parameters"), SETTINGS)
def test_offsets_are_those_of_one_machine(
    method, parameters, real, gallery, parts, serial
):
    bank, second = real["bank_queries"][:200], real["bank_targets"][1000:1150]
    one, expected = offsets(bank, method, gallery, second, **parameters)
    other, found = offsets(
        bank, method, gallery, second, shards_at=parts[8], executor=serial, **parameters
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert other.parameters == one.parameters
    assert other.gallery.count == len(gallery)
    assert other.gallery.cap == pytest.approx(one.gallery.cap, abs=1e-5)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(
        lambda sizes: sum(sizes) > 1
    ),
    seed=st.integers(0, 99),
)
def test_any_division_into_shards(sizes, seed, tmp_path, serial):
    rng = np.random.default_rng(seed)
    bank, targets = (
        rng.normal(size=(30, 6)),
        rng.normal(size=(sum(sizes), 6)).astype(np.float32),
    )
    ends = np.cumsum(sizes)
    paths = [
        tmp_path / f"{seed}-{'-'.join(map(str, sizes))}-{number}.npy"
        for number in range(len(sizes))
    ]
    for path, part in zip(paths, np.split(targets, ends[:-1]), strict=True):
        np.save(path, part)
    _, expected = offsets(bank, "blend", targets, None)
    _, found = offsets(bank, "blend", targets, None, shards_at=paths, executor=serial)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_one_file_is_divided(gallery, real, tmp_path, serial):
    where = tmp_path / "all.npy"
    np.save(where, gallery)
    bank = real["bank_queries"][:150]
    _, expected = offsets(bank, "blend", gallery, None)
    _, found = offsets(
        bank, "blend", gallery, None, shards_at=where, executor=serial, shards=5
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def apart(offsets: np.ndarray, exact: np.ndarray) -> float:
    """Root mean square difference, beside the spread of what is exact; a constant makes none."""
    return float((offsets - exact).std() / exact.std())


@pytest.mark.parametrize("has_second", [False, True])
def test_a_sample_gives_nearly_the_offsets_of_the_whole(
    has_second, gallery, parts, real, serial, monkeypatch, caplog
):
    """Answers are those of the whole gallery, so that of a log no other entries are left out."""
    bank, second = (
        real["test_queries"][:400],
        real["bank_targets"][1000:1150] if has_second else None,
    )
    _, exact = offsets(bank, "blend", gallery, second)
    _, sampled = offsets(bank, "blend", gallery, second, sample=len(gallery) // 3)
    monkeypatch.setattr("hubplugin.executors.SAMPLE", len(gallery) // 3)
    model, found = offsets(
        bank, "blend", gallery, second, shards_at=parts[8], executor=serial
    )
    assert apart(found, exact) < 1.2 * apart(sampled, exact)
    assert model.gallery.count == len(gallery)
    assert model.fitted is None
    assert "the correction is fitted on a sample of" in caplog.text


def test_the_guard_sees_the_bank_as_in_one_process(
    gallery, parts, real, serial, monkeypatch
):
    from hubplugin.executors import read_by_workers, shards_of
    from hubplugin.guard import profile_of
    from hubplugin.methods import METHODS

    log = hubplugin.Bank(real["test_queries"][:400]).prepare(
        "cosine", hubplugin.Compute()
    )
    alone = profile_of(log.against(gallery))
    monkeypatch.setattr("hubplugin.executors.SAMPLE", len(gallery) // 3)
    by_workers = profile_of(
        read_by_workers(log, parts[8], shards_of(parts[8]), METHODS["blend"](), serial)
    )
    assert by_workers.spacing == pytest.approx(alone.spacing, rel=1e-6)
    assert by_workers.kind == alone.kind


def test_what_is_no_executor_is_refused_in_one_line(parts, real):
    with pytest.raises(
        hubplugin.InputError,
        match=r"executor='threads' is none; pass a concurrent.futures.Executor",
    ):
        hubplugin.fit(parts[3], real["bank_queries"], executor="threads")
