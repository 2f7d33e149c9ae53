"""The demo's own measurements: correction finds more in both stores, and both stores agree."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import hubplugin
from hubplugin.measures.hubness import k_occurrence, skewness

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent.parent / "examples")
        import demo

        yield demo


@pytest.fixture(scope="module")
def shown(demo, tmp_path_factory):
    console = Console(file=io.StringIO(), width=140)
    runs = demo.run(tmp_path_factory.mktemp("demo"), console)
    return runs, console.file.getvalue()


@pytest.mark.parametrize("store", ["Faiss", "Qdrant"])
def test_the_corrected_store_finds_more_and_is_less_hubby(store, shown):
    raw, corrected = shown[0][store]
    for k in (1, 10):
        assert (corrected.ranks() <= k).mean() > (raw.ranks() <= k).mean() + 0.01
    n = len(raw.hits)
    assert (
        skewness(k_occurrence(corrected.hits, n))
        < skewness(k_occurrence(raw.hits, n)) / 2
    )


def test_both_rankings_of_both_stores_are_the_exact_ones(shown, real):
    targets, queries = (
        real[name].astype(np.float64) for name in ("test_targets", "test_queries")
    )
    targets, queries = (
        x / np.linalg.norm(x, axis=1, keepdims=True) for x in (targets, queries)
    )
    model = hubplugin.fit(
        real["test_targets"], hubplugin.Bank(real["bank_queries"], real["bank_targets"])
    )
    for state, offsets in enumerate((0, model.offsets(targets))):
        expected = np.argsort(-(queries @ targets.T + offsets), axis=1)[:, :10]
        assert (
            shown[0]["Faiss"][state].hits == expected
        ).mean() > 0.999  # a float32's last bit may swap near-ties
        assert (
            shown[0]["Qdrant"][state].hits == expected
        ).mean() > 0.99  # which ranks candidates again


def test_a_folder_that_no_demo_made_is_left_alone(demo, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(
        hubplugin.HubpluginError, match="is not empty and no demo made it"
    ):
        demo.run(tmp_path, Console(file=io.StringIO()))
    assert (tmp_path / "thesis.tex").read_text() == "precious"
