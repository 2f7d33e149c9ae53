"""The demo's own measurements: correction finds more in both stores, and both stores agree."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

import hubplugin
from hubplugin.cli.demo import Hub, picture, run, shortened
from hubplugin.measures.hubness import k_occurrence, skewness

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    console = Console(file=io.StringIO(), width=140)
    folder = tmp_path_factory.mktemp("demo")
    runs = run(folder, console)
    return runs, console.file.getvalue(), (folder / "before-and-after.svg").read_text()


@pytest.mark.parametrize("store", ["Faiss", "Qdrant"])
def test_the_corrected_store_finds_more_and_is_less_hubby(store, shown):
    raw, corrected = shown[0][store]
    for k in (1, 10):
        assert (corrected.ranks() <= k).mean() > (raw.ranks() <= k).mean() + 0.01
    n = len(raw.hits)
    assert skewness(k_occurrence(corrected.hits, n)) < skewness(k_occurrence(raw.hits, n)) / 2


def test_both_stores_give_the_same_answers(shown):
    for state in (0, 1):
        faiss, qdrant = shown[0]["Faiss"][state].hits, shown[0]["Qdrant"][state].hits
        assert (faiss == qdrant).mean() > 0.99  # Qdrant re-ranks candidates, which nearly always hold the first 10


def test_the_corrected_ranking_is_the_exact_one(shown, real):
    targets, queries = (real[name].astype(np.float64) for name in ("test_targets", "test_queries"))
    targets, queries = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (targets, queries))
    model = hubplugin.fit(real["test_targets"], hubplugin.Bank(real["bank_queries"], real["bank_targets"]))
    expected = np.argsort(-(queries @ targets.T + model.offsets(targets)), axis=1)[:, :10]
    assert (shown[0]["Faiss"][1].hits == expected).mean() > 0.999  # near-ties may swap in a float32's last bit
    assert (shown[0]["Qdrant"][1].hits == expected).mean() > 0.99


def test_hubs_are_shown_by_name_and_the_table_names_every_measure(shown):
    text = shown[1]
    for expected in ("worst hubs", "R@1", "R@5", "R@10", "median", "skewness", "largest", "ms a"):
        assert expected in text


def test_the_picture_shows_the_worst_hubs_before_and_after(shown):
    drawn = ElementTree.fromstring(shown[2])
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    before, after = (k_occurrence(each.hits, len(each.hits)) for each in shown[0]["Faiss"])
    worst = np.argmax(before)
    assert texts[texts.index(str(before[worst])) + 1] == str(after[worst])
    assert not re.search(r"(href|url\(|<script)", shown[2])


def test_names_in_the_picture_are_text_and_no_markup():
    drawn = picture("<b>", "&", "after", [Hub("<script>", 3, 1), Hub("b", 2, 2)], 1.0)
    texts = [each.text for each in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert "<script>" in texts


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(hubplugin.HubpluginError, match="is not empty and no demo made it"):
        run(tmp_path, Console(file=io.StringIO()))
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_long_name_says_that_it_is_cut_off():
    assert shortened("os.path.join") == "os.path.join"
    assert shortened("concurrent.futures.thread.Executor", 16) == "…thread.Executor"
