"""A device whose tensors do not mix with the processor's: torch_xla, which runs anywhere. `make xla`."""

from __future__ import annotations

from importlib.util import find_spec

import faiss
import numpy as np
import pytest
from typer.testing import CliRunner

import hubplugin
import hubplugin_faiss
from hubplugin.cli import app
from hubplugin.compute import Compute
from hubplugin.query_dependent import fit_rule
from tests.core.test_numerical_truth import SETTINGS, unit

pytestmark = pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed; make xla runs this")

CPU, XLA = Compute("cpu"), Compute("xla")


@pytest.fixture
def sets(rng):
    """Bank [320, 24], targets [400, 24], target bank [60, 24], queries [50, 24], about one centre."""
    centre = unit(rng, 1, 24)
    return tuple(centre + unit(rng, rows, 24) for rows in (320, 400, 60, 50))


@pytest.fixture
def index(sets, tmp_path):
    """The file of a flat index with the targets."""
    flat = faiss.IndexFlatIP(24)
    flat.add(sets[1] / np.linalg.norm(sets[1], axis=1, keepdims=True))
    faiss.write_index(flat, str(tmp_path / "photos.faiss"))
    return tmp_path / "photos.faiss"


def both(job):
    """What `job` finds on either device, which is to be the same."""
    return [job(compute) for compute in (CPU, XLA)]


@pytest.mark.parametrize("answers", ["kept", "left out"])
@pytest.mark.parametrize(
    ("method", "parameters"), [*(each for each in SETTINGS if 0.001 not in each[1].values()), ("blend", {})]
)
def test_every_method(method, parameters, answers, sets):
    bank, targets, second, _ = sets
    banks = hubplugin.Bank(bank, second)
    ours, theirs = both(
        lambda compute: hubplugin.fit(targets, banks, method, answers=answers, compute=compute, **parameters).offsets(
            targets, compute=compute
        )
    )
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{"memory": "1MiB"}, {"precision": "float64"}])
@pytest.mark.parametrize("metric", ["dot", "euclidean"])
def test_other_memory_precision_and_metric(options, metric, sets):
    bank, targets, _, _ = sets
    ours, theirs = both(
        lambda compute: hubplugin.fit(targets, bank, metric=metric, compute=Compute(compute.device, **options)).offsets(
            targets[:90], compute=Compute(compute.device, **options)
        )
    )
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-6)


def test_the_robust_fit(sets):
    bank, targets, _, _ = sets
    ours, theirs = both(
        lambda compute: hubplugin.fit(targets, bank, robust=True, compute=compute).offsets(targets, compute=compute)
    )
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", ["dis", "gc", "dsl"])
def test_rules_that_depend_on_the_query(rule, sets):
    bank, targets, _, queries = sets
    raw = queries @ targets.T

    def rescored(compute):
        fitted = fit_rule(targets, bank, rule, metric="dot", compute=compute)
        return fitted.rescore(raw, fitted.keep(targets))

    ours, theirs = both(rescored)
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5)


def test_auto_chooses_the_same(sets):
    bank, targets, _, _ = sets
    ours, theirs = both(lambda compute: hubplugin.fit(targets, bank, "auto", compute=compute))
    assert (theirs.method, theirs.parameters) == (ours.method, ours.parameters)


def test_evaluate_prints_the_same(sets):
    bank, targets, _, queries = sets
    truth = np.argmax(queries @ targets.T, axis=1)
    ours, theirs = both(
        lambda compute: str(hubplugin.evaluate(targets, bank, queries=queries, truth=truth, compute=compute))
    )
    assert theirs == ours


def test_apply_and_refresh_and_the_commands(sets, index, tmp_path):
    bank, targets, _, _ = sets
    store = hubplugin_faiss.open_store(index)
    hubplugin.apply(store, bank, force=True, compute=XLA)
    expected = hubplugin.fit(targets / np.linalg.norm(targets, axis=1, keepdims=True), bank, compute=CPU)
    stored = np.concatenate([batch.offsets for batch in store.scan()])
    np.testing.assert_allclose(stored, expected.offsets(targets, compute=CPU), rtol=0, atol=1e-5)
    assert hubplugin.refresh(store, compute=XLA).stale == 0
    np.save(tmp_path / "bank.npy", bank)
    typed = ["refit", f"faiss:{index}", "--bank", str(tmp_path / "bank.npy"), "--device", "xla", "--force"]
    done = CliRunner().invoke(app, typed)
    assert done.exit_code == 0, done.output
