"""Offsets equal an independent float64 computation to 1e-5, up to a constant."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubplugin import Bank, InputError, OffsetModel, fit
from hubplugin.compute import Compute, Similarities, sinkhorn
from hubplugin.compute.device import reduces_precision
from hubplugin.methods import METHODS
from hubplugin.metric import Metric
from hubplugin.vectors import as_vectors
from tests.core import formulas
from tests.galleries import assert_near, each_metric, normal, with_map
from tests.galleries import unit as at_unit_length
from tests.peaks import peak_memory
from tests.refusals import refused

DEVICES = ["cpu", "numpy"]
if torch.cuda.is_available():
    DEVICES.append("cuda")
if torch.backends.mps.is_available():
    DEVICES.append("mps")
METRICS = ["cosine", "dot", "euclidean"]
SETTINGS = [
    ("is", {"tau": 0.05}),
    ("is", {"tau": 0.001}),
    ("sn", {"tau": 0.05, "iterations": 10}),
    ("sn", {"tau": 0.001, "iterations": 10}),
    ("sn", {"tau": 0.005, "iterations": 1}),
    ("dbsn", {"tau": 0.05, "iterations": 10}),
    ("dbsn", {"tau": 0.001, "iterations": 3}),
    ("dualis", {"tau_query": 0.05, "tau_target": 0.02}),
    ("dualis", {"tau_query": 0.001, "tau_target": 0.1}),
    ("nnn", {"k": 16, "alpha": 0.5}),
    ("nnn", {"k": 10_000, "alpha": 0.75}),
    ("csls", {"k": 10}),
    ("dn", {"lam": 0.5}),
]


def unit(rng, rows, d):
    return at_unit_length(rng.normal(size=(rows, d)))


def units(rng, *sizes, d):
    """Unit vectors, as many sets as there are sizes."""
    return [unit(rng, rows, d) for rows in sizes]


def assert_true(
    method, parameters, metric, bank, targets, second=None, atol=1e-5, compute=Compute()
):
    given = Bank(bank, second)
    options = {"metric": metric, "compute": compute, **parameters}
    model = fit(targets, given, method, **options)
    ours = model.offsets(targets, compute=compute)
    assert ours.dtype == np.float32
    assert ours.shape == (len(targets),)
    expected = formulas.offsets(method, bank, targets, metric, second, **parameters)
    assert_near(ours, expected, atol)
    assert_near(model.fitted, expected, atol)
    # Which has forgotten the offsets of its fit.
    served = OffsetModel.from_bytes(model.to_bytes())
    for device in ("numpy", "cpu"):
        found = served.offsets(targets, compute=replace(compute, device=device))
        assert_near(found, expected, atol)


def of_real(real, *sizes):
    names = ("bank_queries", "test_targets", "bank_targets")
    return [real[name][:size] for name, size in zip(names, sizes, strict=False)]


def test_every_method_is_compared_with_its_formula():
    # That of "blend" is in test_answers.
    assert {method for method, _ in SETTINGS} == {*METHODS} - {"blend"}


SETS = {
    "unit": (METRICS, lambda rng: units(rng, 70, 150, 40, d=24)),
    "similarities in the hundreds": (
        METRICS[1:],
        lambda rng: (3 * normal(rng, rows, 24) for rows in (60, 90, 30)),
    ),
    "far from the origin": (
        METRICS[2:],
        lambda rng: (x + np.float32(1e5) for x in units(rng, 40, 60, 20, d=8)),
    ),
    "bank of one": (METRICS[:1], lambda rng: units(rng, 1, 40, 20, d=8)),
    "one target": (METRICS[:1], lambda rng: units(rng, 30, 1, 20, d=8)),
    "duplicate rows": (
        METRICS[:1],
        lambda rng: (
            *(np.repeat(x, 3, 0) for x in units(rng, 25, 25, d=8)),
            unit(rng, 20, 8),
        ),
    ),
    "bank equals targets": (
        METRICS[:1],
        lambda rng: (*[unit(rng, 30, 8)] * 2, unit(rng, 20, 8)),
    ),
}
"""Metrics, and bank, targets and target bank."""


@pytest.mark.parametrize(
    ("case", "metric"),
    [(case, metric) for case, (metrics, _) in SETS.items() for metric in metrics],
)
@pytest.mark.parametrize(("method", "parameters"), SETTINGS)
def test_every_method_is_its_formula(method, parameters, case, metric, rng):
    assert_true(method, parameters, metric, *SETS[case][1](rng))


@pytest.mark.parametrize("device", DEVICES)
@each_metric
@pytest.mark.parametrize(("method", "parameters"), SETTINGS)
def test_every_method_is_its_formula_on_real_vectors_and_every_device(
    method, parameters, metric, device, real
):
    sets = of_real(real, 200, 220, 150)
    assert_true(method, parameters, metric, *sets, compute=Compute(device))


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("sn", {"tau": 1e-30}),
        ("is", {"tau": 1e-320}),
        ("is", {"tau": 1e308}),
        ("nnn", {"alpha": 1e39}),
    ],
)
def test_offsets_that_would_be_no_numbers_are_refused(method, parameters, rng):
    bank, targets = 3 * rng.normal(size=(30, 8)), 3 * rng.normal(size=(50, 8))
    with refused(InputError, "do not suit the similarities|too small for the simil"):
        fit(targets, bank, method, metric="dot", **parameters)


@pytest.mark.parametrize(
    "seed",
    [16, 23, 43, 59],  # whose offsets came out finite, by luck and rounding
)
@pytest.mark.parametrize("metric", ["dot", "euclidean"])
def test_a_temperature_below_the_rounding_of_similarities_is_refused(metric, seed):
    rng = np.random.default_rng(seed)
    bank, targets = 3 * rng.normal(size=(30, 8)), 3 * rng.normal(size=(50, 8))
    for tau in (1e-17, 1e-30):
        said = f"tau={tau:g} is too small .* below their rounding"
        with refused(InputError, said):
            fit(targets, bank, "sn", metric=metric, tau=tau)


@pytest.mark.parametrize("stretch", [0.5, 1.0, 3.0])
def test_a_bank_that_a_query_map_makes_longer_overflows_nothing(stretch, rng):
    """exp(s/tau) of unit vectors is inside float32 at this temperature; of twice the length it is not."""
    targets = normal(rng, 300, 16)
    bank = np.concatenate([targets[:40], normal(rng, 200, 16)])
    model = fit(targets, bank, "is", tau=0.017)
    stretched = with_map(model, stretch * np.eye(16))
    found = stretched.centre_on(targets).offsets(targets)
    raw = (1 + stretch) * formulas.similarity(bank, targets, "cosine") / 0.017
    expected = -0.017 * np.logaddexp.reduce(raw, axis=0)
    assert_near(found, expected - expected.mean())


@pytest.mark.parametrize(("method", "parameters"), SETTINGS)
def test_many_tiles_and_blocks_equal_one(method, parameters, rng, monkeypatch):
    # A bank of 5,000 leaves 26 targets to a tile at 1 MiB, and blocks of 60 end in the middle of one.
    monkeypatch.setattr("hubplugin.compute.similarities.BLOCK_ROWS", 60)
    sets = units(rng, 5_000, 137, 50, d=4)
    compute = Compute(memory="1MiB")
    assert_true(method, parameters, "cosine", *sets, compute=compute)


@pytest.mark.parametrize("tau", [0.001, 0.005, 0.05, 0.2, 1.0])
# Exponentials held in float32, in float16, not at all.
@pytest.mark.parametrize("memory", ["4MiB", "2MiB", "1MiB"])
@pytest.mark.parametrize("device", DEVICES)
def test_sinkhorn_is_true_whatever_room_there_is(device, memory, tau, real):
    parameters = {"tau": tau, "iterations": 10}
    sets = of_real(real, 700, 600, 240)
    compute = Compute(device, memory=memory)
    assert_true("dbsn", parameters, "cosine", *sets, compute=compute)


@pytest.mark.parametrize("metric", ["dot", "euclidean"])
def test_large_similarities_are_not_held_in_float16(metric, rng):
    bank, targets = (3 * normal(rng, 650, 4) for _ in range(2))
    parameters = {"tau": 10, "iterations": 4}
    compute = Compute(memory="1MiB")
    assert_true("sn", parameters, metric, bank, targets, compute=compute)


def test_float64_is_exact_to_the_float32_that_offsets_come_in(real):
    parameters = {"tau": 0.01, "iterations": 10}
    sets = of_real(real, 200, 300)
    compute = Compute(precision="float64")
    assert_true("sn", parameters, "cosine", *sets, atol=3e-7, compute=compute)


def test_float64_is_asked_of_devices_that_have_it(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert Compute(precision="float64").torch_device().type == "cpu"


def test_a_sample_counts_for_as_many_targets_as_it_stands_for():
    # Every target twice over is the same gallery as every target once, each standing for two.
    rng = np.random.default_rng(1)
    bank, half, second = units(rng, 60, 50, 30, d=8)
    similarities = Similarities(bank, Metric.COSINE, Compute("cpu"))
    others = as_vectors(second)
    given = as_vectors(half)
    twice = as_vectors(np.concatenate([half, half]))
    found, expected = (
        sinkhorn(
            similarities, [columns, others], 0.05, 10, np.arange(60), mass=mass
        ).log_alpha
        for columns, mass in ((given, 2.0), (twice, 1.0))
    )
    assert_near(found, expected, 1e-4)


@pytest.mark.parametrize(("method", "parameters"), SETTINGS)
def test_a_target_the_fit_never_saw_gets_the_offset_of_the_fits_own_last_step(
    method, parameters, rng
):
    bank, target_bank, seen, fresh = units(rng, 50, 30, 80, 25, d=16)
    model = fit(seen, Bank(bank, target_bank), method, **parameters)
    given = (bank, np.concatenate([seen, fresh]), "cosine", target_bank)
    raw = formulas.raw_offsets(method, *given, columns=seen, **parameters)
    assert_near(model.offsets(fresh), (raw - raw[:80].mean())[80:])


@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    d=st.integers(1, 20),
    log_tau=st.floats(-7, 2),
    iterations=st.integers(1, 12),
    metric=st.sampled_from(METRICS),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_sinkhorn_is_finite_and_true_at_any_size_and_temperature(
    m, n, d, log_tau, iterations, metric, seed
):
    rng = np.random.default_rng(seed)
    tau = float(np.exp(log_tau))
    # Offsets of size tau * log m pass 1e-5 relative to themselves once tau is large.
    atol = 1e-5 * max(1.0, tau)
    parameters = {"tau": tau, "iterations": iterations}
    assert_true("sn", parameters, metric, *units(rng, m, n, d=d), atol=atol)


@pytest.fixture
def reduced_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("rows", "memory"),
    [(40, "1GiB"), (600, "1MiB")],
    ids=["float32", "float16 is held"],
)
def test_a_program_that_allows_reduced_precision_products_gets_true_offsets_and_the_setting_stays(
    rows, memory, rng, reduced_precision, monkeypatch
):
    seen = []  # the type of each product, and the setting that another thread would read meanwhile
    for name in ("addmm", "matmul", "mv", "addmv"):
        whole = getattr(torch, name)

        def spy(*factors, whole=whole, **options):
            seen.append((factors[0].dtype, torch.get_float32_matmul_precision()))
            return whole(*factors, **options)

        monkeypatch.setattr(torch, name, spy)
    parameters = {"tau": 0.02, "iterations": 10}
    compute = Compute("cpu", memory=memory)
    sets = units(rng, rows, rows, d=16)
    assert_true("sn", parameters, "cosine", *sets, compute=compute)
    assert set(seen) == {(torch.float64, "medium")}


def test_a_setting_that_another_thread_makes_meanwhile_is_noticed(rng, monkeypatch):
    # Before and after the first product; then what it is left at.
    settings = iter([False, True])
    monkeypatch.setattr(
        "hubplugin.compute.device.reduces_precision",
        lambda factor: next(settings, True),
    )
    seen = []

    def spy(*factors, multiply=torch.matmul, **options):
        seen.append(factors[0].dtype)
        return multiply(*factors, **options)

    monkeypatch.setattr(torch, "matmul", spy)
    fit(unit(rng, 30, 16), unit(rng, 40, 16), "is", compute=Compute("cpu"))
    assert seen[:2] == [torch.float32, torch.float64]


@pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"),
    reason="this torch has one setting for all backends",
)
def test_the_setting_of_one_backend_is_read_too(rng):
    # To ask torch for the common setting is then an error.
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert reduces_precision(torch.zeros(1))
        sets = units(rng, 40, 30, d=16)
        assert_true("is", {"tau": 0.02}, "cosine", *sets, compute=Compute("cpu"))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert not reduces_precision(torch.zeros(1))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_gallery(tmp_path):
    """A fit on four times the targets, from a memory map, peaks no higher (beyond the offsets themselves)."""
    program = (
        "import sys, numpy as np, hubplugin\n"
        "compute = hubplugin.Compute(memory='64MiB')\n"
        "bank = np.random.default_rng(0).normal(size=(64, 64))\n"
        "hubplugin.fit(sys.argv[1], bank, 'dbsn', iterations=2, compute=compute)\n"
    )
    rng = np.random.default_rng(0)
    files = [tmp_path / "small.npy", tmp_path / "large.npy"]
    for file, rows in zip(files, (40_000, 400_000), strict=True):
        np.save(file, rng.normal(size=(rows, 64)).astype(np.float16))
    # A process begins with the peak of the one that starts it, so nothing is made between.
    peaks = [peak_memory(program, file) for file in files]
    mapped_file, offsets = 400_000 * 64 * 2 / 1e6, 400_000 * 8 * 4 / 1e6
    assert peaks[1] - peaks[0] < mapped_file + offsets


def test_a_default_device_that_a_program_set_changes_nothing(rng):
    gallery, bank = rng.normal(size=(2, 200, 16)).astype(np.float32)
    on_cpu = Compute("cpu")
    expected = fit(gallery, bank, compute=on_cpu).offsets(gallery, compute=on_cpu)
    with torch.device("meta"):
        found = fit(gallery, bank, compute=on_cpu).offsets(gallery, compute=on_cpu)
    np.testing.assert_array_equal(found, expected)
