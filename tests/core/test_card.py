"""Fits on a card that is not there: right, within its memory, and without waiting for the host."""

import logging
import os
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[fit]'")
pytest.importorskip("triton", reason="needs triton, which comes with torch for CUDA")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import hubplugin  # noqa: E402
from hubplugin import Bank, Compute, InputError  # noqa: E402
from hubplugin.compute import kernels  # noqa: E402
from hubplugin.vectors import Sliceable  # noqa: E402
from tests.core.pretended_card import Card  # noqa: E402
from tests.galleries import assert_near, each_metric, normal  # noqa: E402, each_metric, normal
from tests.refusals import refused  # noqa: E402

METHODS = [
    ("is", {}),
    ("nnn", {}),
    ("csls", {}),
    ("dn", {}),
    ("dualis", {}),
    ("sn", {"tau": 0.05, "iterations": 3}),
    ("sn", {"tau": 0.005, "iterations": 3}),
    ("dbsn", {"tau": 0.05, "iterations": 3}),
    ("blend", {"tau": 0.05, "strength": 1.0, "iterations": 3}),
]
WAITS = 18
"""The most waits of a fit of three iterations: two passes, each iteration, and reading."""


def banks(rng, bank=400, targets=700, dim=24):
    made = [normal(rng, rows, dim) for rows in (targets, bank, 300)]
    half = targets // 2
    made[0][half : 2 * half] = made[0][:half]  # copies of answers
    return made


@pytest.fixture
def sets(rng):
    """Targets [700, 24], bank [400, 24] and target bank [300, 24]."""
    return banks(rng)


def fit(sets, method="is", device="cuda", memory=None, precision="auto", **parameters):
    targets, bank, second = sets
    given = Bank(bank)
    if method in ("dualis", "dbsn", "blend"):
        given = Bank(bank, second)
    compute = Compute(device, memory, precision=precision)
    return hubplugin.fit(targets, given, method, compute=compute, **parameters)


@pytest.mark.parametrize("memory", [None, "1MiB"])
@each_metric
@pytest.mark.parametrize("answers", ["kept", "left out"])
@pytest.mark.parametrize(("method", "parameters"), METHODS)
def test_a_card_gives_the_offsets_of_float64(
    method, parameters, answers, metric, memory, sets, rng
):
    options = {"metric": metric, "answers": answers, **parameters}
    if metric != "cosine" and "tau" in parameters:
        options["tau"] = 0.5
    expected = fit(sets, method, "numpy", precision="float64", **options)
    newer = normal(rng, 90, 24)
    with Card() as card:
        model = fit(sets, method, memory=memory, **options)
        # By dot product and Euclidean distance each block is asked for its longest vector.
        assert card.waits <= (WAITS if metric == "cosine" else 40)
        assert card.down < 200 * len(sets[0])  # nothing of the size of bank x targets
        compute = Compute("cuda", memory=memory)
        by_card = model.offsets(newer, compute=compute)
    assert_near(model.fitted, expected.fitted, 2e-5)
    exact = Compute("numpy", precision="float64")
    by_numpy = expected.offsets(newer, compute=exact)
    assert_near(by_card, by_numpy, 2e-5)


@pytest.mark.parametrize("answers", ["kept", "left out"])
@pytest.mark.parametrize(("method", "parameters"), METHODS)
def test_what_a_fit_holds_beside_its_bank_stays_within_the_memory(
    method, parameters, answers, rng
):
    sets = banks(rng, 4_000, 6_000)
    with Card(values=False) as card:
        fit(sets, method, memory="64MiB", answers=answers, **parameters)
    of_bank = 2.5 * sets[1].nbytes  # as it came, and in halves beside each other
    assert card.peak - of_bank <= 64 * 2**20


def test_a_bank_of_100_000_leaves_room_on_a_card_of_24_gigabytes(rng):
    sets = banks(rng, 100_000, 2_000)
    with Card(total=24e9, values=False) as card:
        fit(sets, "dbsn")
    assert card.peak < 24e9 - card.taken


def test_a_second_fit_in_a_process_is_the_first_again(rng):
    sets = banks(rng, 2_000, 6_000)
    with Card(total=1.2e8, taken=1e7) as card:
        first = fit(sets, "sn")
        flops = dict(card.flops)
        card.reset()
        again = fit(sets, "sn")
    assert dict(card.flops) == flops
    assert again.fingerprint == first.fingerprint


def test_the_kernel_is_launched_on_the_card_of_its_tensors(monkeypatch):
    """Triton launches on the current card, wherever the tensors lie."""
    current = [0]
    launched = []

    class DeviceOf:
        def __init__(self, tensor):
            current.append(tensor.device.index)

        def __enter__(self):
            return None

        def __exit__(self, *error):
            current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **__: launched.append(current[-1])

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    monkeypatch.setattr(kernels, "_log_sum_exp", Kernel())
    with FakeTensorMode():
        pair = [torch.empty(4, 8, device="cuda:1") for _ in range(2)]
        bias = torch.empty(4, device="cuda:1")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        kernels.log_sum_exp(pair, pair, bias, 20.0)
    assert launched == [1]


def test_a_second_card_fits_and_a_third_is_not_there(sets):
    with Card(devices=2):
        fit(sets, device="cuda:1")
        with refused(InputError, "invalid device ordinal"):
            Compute("cuda:2").torch_device()


@pytest.mark.parametrize(
    ("capability", "hip"), [((7, 5), None), ((12, 0), None), ((9, 4), "6.4")]
)
def test_a_card_that_the_kernel_was_not_made_for_computes_by_torch(
    capability, hip, monkeypatch, sets
):
    monkeypatch.setattr(torch.version, "hip", hip)
    with Card(capability=capability) as card:
        fit(sets)
    assert "kernel of halves" not in card.flops


def test_a_launch_that_is_refused_is_told_and_torch_computes(monkeypatch, caplog, sets):
    expected = fit(sets, device="numpy")

    def refused(*_, **__):
        raise RuntimeError("out of resource: tensor memory")

    monkeypatch.setattr(Card, "kernel", refused)
    with Card(), caplog.at_level(logging.WARNING, "hubplugin"):
        model = fit(sets)
    assert "no fused kernel on this GPU; torch is used instead: out of resource" in caplog.text
    assert_near(model.fitted, expected.fitted)


def test_memory_beyond_the_card_is_refused():
    too_much = pytest.raises(InputError, match="expected 7GiB or less")
    with Card(total=8e9), too_much:
        Compute("cuda", memory="16GiB")


@pytest.mark.parametrize(
    "turn",
    [lambda x: x[::-1], lambda x: x.astype(np.longdouble), lambda x: x.astype(">f8")],
)
def test_a_gallery_that_numpy_reads_is_read_for_a_card(turn, sets):
    sets[0] = turn(sets[0])
    expected = fit(sets, device="numpy")
    with Card():
        model = fit(sets)
    assert_near(model.fitted, expected.fitted)


def test_a_source_that_grew_while_it_was_read_is_told(monkeypatch, sets):
    read = Sliceable.raw_blocks

    def grown(vectors, size):
        yield from read(vectors, size)
        if vectors.name == "targets":
            yield sets[0][:1]

    monkeypatch.setattr(Sliceable, "raw_blocks", grown)
    told = pytest.raises(InputError, match="expected 700 rows, read 701")
    with Card(), told:
        fit(sets)


@pytest.mark.parametrize("row", [0, 699])
def test_what_is_not_finite_is_named_after_the_pass(row, sets):
    sets[0][row, 2] = np.inf
    line = f"targets: row {row} holds a value that is NaN, infinity or too large"
    with Card(), refused(InputError, line):
        fit(sets)


@pytest.mark.parametrize("method", ["is", "blend"])
def test_zero_vectors_are_found_in_the_pass_and_left_out(method, sets):
    sets[0][[3, 650]] = 0
    told = pytest.warns(UserWarning, match="targets: 2 zero vectors are left out")
    with told:
        expected = fit(sets, method, "numpy")
    with Card(), told:
        model = fit(sets, method)
    assert_near(model.fitted, expected.fitted)


def test_uploaded_blocks_wait_for_computing(rng):
    """At most three: a card that is slower than its host would fill with blocks."""
    sets = banks(rng, targets=16_384 * 6, dim=8)
    with Card(values=False) as card:
        fit(sets)
    assert card.paced >= 3


def test_products_with_a_vector_need_no_float64_where_tf32_is_allowed(sets):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with Card() as card:
            fit(sets, "sn")
    finally:
        torch.set_float32_matmul_precision(before)
    assert "mv float64" not in card.flops
    assert card.flops["mv float32"]


def test_answers_that_are_known_are_ranked_on_the_card(sets):
    given = Bank(sets[1], np.arange(400))
    with Card() as card:
        hubplugin.fit(sets[0], given, compute=Compute("cuda"))
    assert card.waits < 40


def test_the_kernel_serves_a_fit_as_the_interpreter_runs_it(rng):
    sets = banks(rng, 100, 200)
    expected = fit(sets, device="numpy")
    with Card(interpreted=True) as card:
        model = fit(sets)
    assert card.flops["kernel of halves"]
    assert_near(model.fitted, expected.fitted, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100])
def test_the_kernel_compiles_for_each_card_within_its_limits(capability):
    """In a process without the interpreter; shared memory and spills are printed."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.core.compiled_kernel", str(capability)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stderr
