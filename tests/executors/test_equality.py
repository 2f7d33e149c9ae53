"""A fit in shards gives the offsets of a fit on one machine, as long as its sample is the gallery."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hubplugin
from hubplugin.executors import read_by_workers, shards_of
from hubplugin.guard import profile_of
from hubplugin.methods import METHODS
from tests.galleries import assert_near

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


def offsets(bank, method, gallery, second=None, shards_at=None, **more):
    """Of the gallery, by a fit on one machine; by one in shards where they are given."""
    where = gallery if shards_at is None else shards_at
    model = hubplugin.fit(where, hubplugin.Bank(bank, second), method, **more)
    return model, model.offsets(gallery)


def assert_same(bank, method, gallery, in_shards, second=None, **more):
    """A fit `in_shards` is that of one machine. Returns both models."""
    one, expected = offsets(bank, method, gallery, second, **more)
    other, found = offsets(bank, method, gallery, second, **in_shards, **more)
    assert_near(found, expected)
    return one, other


@pytest.mark.parametrize(("method", "parameters"), SETTINGS)
def test_offsets_are_those_of_one_machine(
    method, parameters, real, gallery, parts, serial
):
    bank, second = real["bank_queries"][:200], real["bank_targets"][1000:1150]
    in_shards = {"shards_at": parts[8], "executor": serial}
    one, other = assert_same(bank, method, gallery, in_shards, second, **parameters)
    assert other.parameters == one.parameters
    assert other.gallery.count == len(gallery)
    assert other.gallery.largest == pytest.approx(one.gallery.largest, abs=1e-5)


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
    bank, targets = rng.normal(size=(30, 6)), rng.normal(size=(sum(sizes), 6))
    paths = []
    for number, part in enumerate(np.split(targets, np.cumsum(sizes)[:-1])):
        paths.append(str(tmp_path / f"{number}.npy"))
        np.save(paths[-1], part.astype(np.float32))
    in_shards = {"shards_at": paths, "executor": serial}
    assert_same(bank, "blend", targets, in_shards)


def test_one_file_is_divided(gallery, real, tmp_path, serial):
    np.save(tmp_path / "all.npy", gallery)
    bank = real["bank_queries"][:150]
    in_shards = {"shards_at": tmp_path / "all.npy", "executor": serial, "shards": 5}
    assert_same(bank, "blend", gallery, in_shards)
    assert len(serial.shards) == 5


def apart(offsets, exact):
    """Root mean square difference, beside the spread of what is exact; a constant makes none."""
    return float((offsets - exact).std() / exact.std())


@pytest.mark.parametrize("has_second", [False, True])
def test_a_sample_gives_nearly_the_offsets_of_the_whole(
    has_second, gallery, parts, real, serial, monkeypatch, caplog
):
    """Answers are those of the whole gallery, so that of a log no other entries are left out."""
    bank = real["test_queries"][:400]
    second = real["bank_targets"][1000:1150] if has_second else None
    given = (bank, "blend", gallery, second)
    _, exact = offsets(*given)
    _, sampled = offsets(*given, sample=len(gallery) // 3)
    monkeypatch.setattr("hubplugin.executors.SAMPLE", len(gallery) // 3)
    model, found = offsets(*given, shards_at=parts[8], executor=serial)
    assert apart(found, exact) < 1.2 * apart(sampled, exact)
    assert model.gallery.count == len(gallery)
    assert model.fitted is None
    assert "the correction is fitted on a sample of" in caplog.text


def test_the_guard_sees_the_bank_as_in_one_process(
    gallery, parts, real, serial, monkeypatch
):
    bank = hubplugin.Bank(real["test_queries"][:400])
    log = bank.prepare("cosine", hubplugin.Compute())
    alone = profile_of(log.against(gallery))
    monkeypatch.setattr("hubplugin.executors.SAMPLE", len(gallery) // 3)
    shards = shards_of(parts[8])
    read = read_by_workers(log, parts[8], shards, METHODS["blend"](), serial)
    by_workers = profile_of(read)
    assert by_workers.spacing == pytest.approx(alone.spacing, rel=1e-6)
    assert by_workers.kind == alone.kind


def test_what_is_no_executor_is_refused_in_one_line(parts, real):
    said = r"executor='threads' is not an executor; pass a concurrent.futures.Executor"
    with pytest.raises(hubplugin.InputError, match=said):
        hubplugin.fit(parts[3], real["bank_queries"], executor="threads")
