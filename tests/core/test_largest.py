"""The largest of rows, and answers left out, against sorting and float64 arithmetic over everything."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hubplugin
from hubplugin.compute import similarities, topk
from hubplugin.compute.device import Library
from hubplugin.compute.reductions import topk_values
from tests.core.formulas import log_of, similarity, without_answers
from tests.galleries import assert_near, unit


@settings(max_examples=80, deadline=None)
@given(
    b=st.integers(1, 9),
    m=st.one_of(st.integers(1, 40), st.integers(250, 700), st.just(4_099)),
    k=st.integers(1, 300),
    digits=st.integers(0, 3),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 2**20),
)
def test_the_largest_of_rows_are_those_of_a_sort(b, m, k, digits, dtype, seed):
    k = min(k, m)
    s = np.random.default_rng(seed).normal(size=(b, m)).round(digits).astype(dtype)
    s[:, seed % m] = -np.inf
    expected = -np.sort(-s, axis=1)[:, :k]
    values, columns = topk(torch.from_numpy(s), k)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(s, columns, axis=1))
    assert all(len(set(row)) == k for row in columns.tolist())
    library = Library(hubplugin.Compute("cpu"))
    # As a processor finds them, and as a card: in the groups of columns whose largest are large.
    for library.is_on_cpu in (True, False):
        found = topk_values(torch.from_numpy(s), k, library).numpy()
        np.testing.assert_array_equal(-np.sort(-found, axis=1), expected)


def make_log(kind, m=400, n=700, d=12):
    """A log in which every target is asked for, or few are, or one by many, or the same targets are there twice."""
    rng = np.random.default_rng(5)
    targets = rng.standard_normal((n, d)).astype(np.float32)
    asked = rng.integers(0, {"few are asked for": 25, "popular": 150}.get(kind, n), m)
    if kind == "popular":  # below and above the share of a hub
        asked[: m // 15] = 3
        asked[m // 15 : m // 5] = 4
    bank = (targets[asked] + 0.3 * rng.standard_normal((m, d))).astype(np.float32)
    if kind == "copies":
        targets[n // 2 :] = targets[: n - n // 2]
    if kind == "all alike":
        targets[20:] = targets[19]
    if kind == "one bank row is alone":
        bank[1:] = bank[1:] - 2 * bank[:1]
    return bank, targets


KINDS = [
    "many",
    "few are asked for",
    "popular",
    "copies",
    "all alike",
    "one bank row is alone",
]
METHODS = [
    ("is", {"tau": 0.05}),
    ("is", {"tau": 0.3}),
    ("sn", {"tau": 0.05, "iterations": 5}),
    ("sn", {"tau": 0.02, "iterations": 5}),
    ("nnn", {"k": 16, "alpha": 0.5}),
    ("nnn", {"k": 400, "alpha": 0.5}),  # more than are left
    ("csls", {"k": 10}),
    ("dn", {"lam": 0.5}),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 37 targets."""
    monkeypatch.setattr(similarities, "CACHE_BYTES", 4 * 400 * 37)


def left_out(method, bank, targets, metric, **parameters):
    """What float64 gives without answers, and the size of the similarities, at least 1."""
    s, weights = without_answers(similarity(bank, targets, metric), len(targets))
    raw = log_of(method, s, weights, **parameters)
    return raw - raw.mean(), max(1.0, np.abs(s[np.isfinite(s)]).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "parameters"), METHODS)
@pytest.mark.parametrize(
    ("metric", "memory"),
    [("cosine", "1GiB"), ("cosine", "1MiB"), ("euclidean", "1GiB"), ("dot", "1MiB")],
)
def test_answers_are_left_out_as_float64_leaves_them_out(
    kind, method, parameters, metric, memory
):
    bank, targets = make_log(kind)
    compute = hubplugin.Compute(memory=memory)
    given = {"metric": metric, "answers": "left out", **parameters}
    model = hubplugin.fit(targets, bank, method, compute=compute, **given)
    expected, size = left_out(method, bank, targets, metric, **parameters)
    again = hubplugin.OffsetModel.from_bytes(model.to_bytes())
    for found in (model.fitted, again.offsets(targets)):
        assert_near(found, expected, 3e-5 * size)


@pytest.mark.parametrize("apart", [1e-8, 1e-7, 1e-6])
@pytest.mark.parametrize(("method", "parameters"), METHODS)
def test_all_near_copies_of_an_answer_are_answers_however_they_are_rounded(
    apart, method, parameters, rng, monkeypatch
):
    multiply = similarities.multiply

    def rounded(rows, columns, out):
        """As a product of another shape, or on another processor."""
        result = multiply(rows, columns, out)
        steps = torch.from_numpy(rng.uniform(-2, 2, out.shape).astype(np.float32))
        size = float(rows.norm(dim=1).max())
        return result.add_(steps, alpha=np.finfo(np.float32).eps * size)

    monkeypatch.setattr(similarities, "multiply", rounded)
    bank, targets = make_log("many")
    targets[350:] = targets[:350] + apart * rng.standard_normal((350, 12))
    bank, targets = unit(bank), unit(targets)
    given = {"metric": "dot", "answers": "left out", **parameters}
    model = hubplugin.fit(targets, bank, method, **given)
    expected, _ = left_out(method, bank, targets, "dot", **parameters)
    assert_near(model.fitted, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_and_a_target_bank(kind):
    bank, targets = make_log(kind)
    second = np.random.default_rng(1).standard_normal((300, 12)).astype(np.float32)
    second[:40] = bank[:40]
    parameters = {"tau": 0.05, "iterations": 5}
    given = {"strength": 1, "answers": "left out", **parameters}
    model = hubplugin.fit(targets, hubplugin.Bank(bank, second), "blend", **given)
    columns = np.concatenate([targets, second])
    s, weights = without_answers(similarity(bank, columns, "cosine"), len(targets))
    both = log_of("sn", s, weights, **parameters) + log_of("nnn", s, weights, k=16)
    raw = both[: len(targets)] / 2
    assert_near(model.fitted, raw - raw.mean(), 1e-4)
