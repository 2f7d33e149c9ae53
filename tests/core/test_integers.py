"""Products of eight-bit integers: as exact as promised, used where they serve, and nowhere else."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import hubplugin
from hubplugin.compute import Compute, Similarities, integers, similarities
from hubplugin.compute.integers import COARSEST, IntegerBank, are_fast
from hubplugin.metric import Metric
from hubplugin.vectors import as_vectors
from tests.core.test_numerical_truth import unit

pytestmark = pytest.mark.skipif(
    not are_fast(), reason="this processor has no AVX-512 with VNNI: float32 is used, as other tests show"
)


@pytest.fixture(autouse=True)
def many(monkeypatch):
    """Integers for the few targets that are used here."""
    monkeypatch.setattr(similarities, "MANY_TARGETS", 1)


@pytest.fixture
def fresh():
    """`are_fast` asked anew, here and by whatever comes after."""
    are_fast.cache_clear()
    yield
    are_fast.cache_clear()


def tile(bank, targets, metric=Metric.DOT, **options):
    (only,) = Similarities(bank, metric, Compute("cpu", **options)).tiles(
        as_vectors(targets, "targets"), "test", averaged=True
    )
    return only


def exact(bank, targets):
    return targets.astype(np.float64) @ bank.T.astype(np.float64)


SETS = {
    "random": lambda rng: (unit(rng, 1_000, 384), unit(rng, 50, 384)),
    "each its own copy": lambda rng: (unit(rng, 1_000, 384),) * 2,
    "of one sign": lambda rng: (np.abs(unit(rng, 1_000, 384)), np.abs(unit(rng, 50, 384))),
    "one number a row": lambda rng: (np.eye(1_000, 384, dtype=np.float32), unit(rng, 50, 384)),
    "rows of zeros": lambda rng: (np.zeros((1_000, 384), np.float32), unit(rng, 50, 384)),
    "an odd number of dimensions": lambda rng: (unit(rng, 1_003, 777), unit(rng, 1, 777)),
}


@pytest.mark.parametrize("case", SETS)
def test_similarities_are_within_what_is_promised(case, rng):
    bank, targets = SETS[case](rng)
    found = tile(bank, targets)
    assert found.coarse is not None
    error = np.abs(found.s.double().numpy() - exact(bank, targets))
    assert error.max() <= min(found.coarse.error, 1.5 * COARSEST)
    if len(bank) == len(targets):  # what is rounded off a vector and off its copy must not add up
        assert abs((found.s.double().numpy() - exact(bank, targets)).diagonal().mean()) < 2e-6


def outlier(rows, number):
    rows = rows.copy()
    rows[number] += 20 * np.eye(1, rows.shape[1], 7, dtype=np.float32)[0]
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def nearly_alike(rng, rows):
    """Vectors of one large number and many that are almost the same: what their low halves lose adds up."""
    rows = np.where(np.arange(384) == 0, rng.uniform(4, 12, (rows, 1)), 1) + 1e-4 * rng.normal(size=(rows, 384))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize(
    "case",
    [
        "a component that is large in all",
        "in one target",
        "in one of either",
        "in all but a row here and there",
        "sums beyond 32 bits",
    ],
)
def test_what_integers_are_too_coarse_for_is_multiplied_in_float32(case, rng):
    bank, targets = unit(rng, 1_000, 384), unit(rng, 50, 384)
    if case == "a component that is large in all":
        bank, targets = outlier(bank, slice(None)), outlier(targets, slice(None))
    elif case == "in all but a row here and there":  # of which some have the largest components, and lose nothing
        bank, targets = nearly_alike(rng, 1_000), nearly_alike(rng, 50)
        bank[::125], bank[1:9] = 0, 0
        for row in (*range(0, 1_000, 125), *range(1, 9)):
            bank[row, 1 + rng.permutation(383)[:3]] = 3**-0.5
    elif case == "sums beyond 32 bits":
        bank, targets = np.full((1_000, 2_000), 0.02, np.float32), np.full((50, 2_000), 0.02, np.float32)
    else:
        targets = outlier(targets, 3)
        bank = outlier(bank, 17) if case == "in one of either" else bank
    found = tile(bank, targets)
    assert found.coarse is None
    np.testing.assert_allclose(found.s.numpy(), exact(bank, targets), rtol=0, atol=3e-6)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_another_precision_that_is_asked_for_multiplies_no_integers(precision, rng, monkeypatch):
    monkeypatch.setattr(IntegerBank, "product", None)
    bank, targets = unit(rng, 1_000, 64), unit(rng, 50, 64)
    assert tile(bank, targets, precision=precision).coarse is None


def no_name(*_):
    raise AttributeError("module 'torch' has no attribute '_int_mm'")


def in_a_loop(_, high, both, out):
    time.sleep(integers.SLOWEST)
    return out


SUMS = "_LaidOut.sums" if "amx_int8" in integers._flags() else "_AsTheyLie.sums"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        (SUMS, no_name),
        (SUMS, lambda _, high, both, out: out.fill_(3)),  # as where a kernel is missing
        (SUMS, in_a_loop),
        ("_flags", lambda: frozenset({"avx2", "fma"})),
    ],
)
def test_a_processor_or_a_torch_that_cannot_stays_with_float32(name, value, rng, monkeypatch):
    monkeypatch.setattr(f"hubplugin.compute.integers.{name}", value)
    bank, targets = unit(rng, 1_000, 64), unit(rng, 50, 64)
    found = tile(bank, targets)
    assert found.coarse is None
    np.testing.assert_allclose(found.s.numpy(), exact(bank, targets), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", [integers._AsTheyLie, integers._LaidOut])
def test_torch_has_the_names_that_are_not_public(kernel):
    if kernel is integers._LaidOut and "amx_int8" not in integers._flags():
        pytest.skip("without AMX oneDNN may take a loop")
    high, both = (torch.full((rows, d), -127, dtype=torch.int8) for rows, d in ((5, 8), (5, 16)))
    scale = torch.arange(5.0)
    found = kernel(high, both, scale).sums(-high[:3], -both[:3], torch.empty(3, 5))
    assert (found == -(127**2) * (254 * 8 + 16) * scale).all()


@pytest.mark.parametrize("answers", ["kept", "left out"])
@pytest.mark.parametrize(
    ("method", "parameters"),
    [("is", {"tau": 0.04}), ("sn", {"tau": 0.04}), ("nnn", {"k": 16}), ("csls", {}), ("blend", {"tau": 0.05})],
)
@pytest.mark.parametrize("case", ["real", "the bank is the gallery", "every target four times", "nearly so"])
def test_offsets_are_within_1e_5_of_float64(method, parameters, answers, case, real, rng):
    bank, targets = real["bank_queries"][:1_200], real["test_targets"]
    if case == "the bank is the gallery":
        bank = targets
    elif case != "real":
        targets = np.repeat(targets[:300], 4, axis=0)
        if case == "nearly so":
            targets = targets + np.float32(1e-7) * rng.standard_normal(targets.shape).astype(np.float32)
    fitted = {
        precision: hubplugin.fit(
            targets, bank, method, answers=answers, compute=Compute("cpu", precision=precision), **parameters
        )
        for precision in ("auto", "float64")
    }
    offsets = [model.offsets(targets, compute=Compute("cpu", precision=name)) for name, model in fitted.items()]
    np.testing.assert_allclose(*offsets, rtol=0, atol=1e-5)
    served = hubplugin.OffsetModel.from_bytes(fitted["auto"].to_bytes())  # knows the answers by their levels alone
    for device in ("numpy", "cpu"):
        np.testing.assert_allclose(served.offsets(targets, compute=Compute(device)), offsets[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("k", "used"), [(1, True), (16, True), (40, False)])
def test_a_mean_of_the_largest_is_as_exact_as_by_float32(k, used, real, monkeypatch):
    seen = []
    multiply = IntegerBank.product
    monkeypatch.setattr(IntegerBank, "product", lambda self, *given: seen.append(1) or multiply(self, *given))
    bank, targets = real["bank_queries"][:1_200], real["test_targets"]
    for answers in ("kept", "left out"):
        offsets = [
            hubplugin.fit(targets, bank, "nnn", k=k, answers=answers, compute=compute).offsets(targets, compute=compute)
            for compute in (Compute("cpu"), Compute("cpu", precision="float64"))
        ]
        np.testing.assert_allclose(*offsets, rtol=0, atol=2e-7)
        assert bool(seen) == used


@pytest.mark.parametrize("targets", [400, 399])
def test_the_fit_of_many_targets_multiplies_integers(targets, real, monkeypatch):
    seen = []
    multiply = IntegerBank.product
    monkeypatch.setattr(IntegerBank, "product", lambda self, *given: seen.append(1) or multiply(self, *given))
    monkeypatch.setattr(similarities, "MANY_TARGETS", 400)
    for method in ("is", "sn", "nnn", "csls", "blend"):
        seen.clear()
        hubplugin.fit(real["test_targets"][:targets], real["bank_queries"][:1_000], method, compute=Compute("cpu"))
        assert bool(seen) == (targets == 400), method
