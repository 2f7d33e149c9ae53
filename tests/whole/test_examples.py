"""What the examples measure: a correction finds more, in each store and beside keywords."""

import importlib
import io
import re
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

import hubplugin
from hubplugin.measures.hubness import k_occurrence, skewness
from tests.commands import run
from tests.refusals import refused

pytestmark = pytest.mark.slow


@pytest.fixture
def example(monkeypatch):
    """Return an example by its name."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module


def test_the_demo_finds_more_and_is_less_hubby_in_both_stores(example, tmp_path):
    runs = example("demo").run(tmp_path, Console(file=io.StringIO(), width=140))
    for raw, corrected in (runs["Faiss"], runs["Qdrant"]):
        for k in (1, 10):
            assert (corrected.ranks() <= k).mean() > (raw.ranks() <= k).mean() + 0.01
        before, after = (
            skewness(k_occurrence(each.hits, len(raw.hits)))
            for each in (raw, corrected)
        )
        assert after < before / 2


def test_a_folder_that_no_demo_made_is_left_alone(example, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with refused(hubplugin.HubpluginError, "is not empty and no demo made it"):
        example("demo").run(tmp_path, Console(file=io.StringIO()))
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_correction_adds_to_what_a_hybrid_search_finds(example, capsys):
    shares = example("with_hybrid").main()
    assert shares["hybrid, raw"] > shares["dense, raw"]
    assert shares["hybrid, corrected"] > shares["hybrid, raw"] + 0.01
    assert shares["hybrid, corrected"] == max(shares.values())
    assert capsys.readouterr().out.count("among the first ten") == 4


FEWER = {"RECORDED": 500, "LATER": 100, "MEASURED": 200, "COMPARED": 20}
"""Of the walk's queries: local mode searches in Python."""


def test_the_walk_goes_from_recorded_queries_to_a_rollback(
    example, tmp_path, monkeypatch, capsys
):
    walk = example("walk")
    for name, fewer in FEWER.items():
        monkeypatch.setattr(walk, name, fewer)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: run(*words[3:]))
    walk.main(["--folder", str(tmp_path)])
    said = capsys.readouterr().out
    before, after = map(float, re.search(r"R@1\) +([\d.]+)% +([\d.]+)%", said).groups())
    assert after > before
    assert "of the results are the same" in said
    recorded = said.partition("inspection asks for attention")[
        2
    ]  # the second look at it
    clicks, pairs = re.search(
        r"(\d+) clicks on (\d+) different pairs of query and target", recorded
    ).groups()
    assert 200 < int(pairs) == int(clicks) <= 400
    assert "learned from" in said.partition("hubplugin refit")[2]
    monitored = said.partition("hubplugin inspect")[2]
    assert monitored.index("(exit status 4)") < monitored.index("hubplugin refit")
    page = (tmp_path / "report.html").read_text()
    assert "<!doctype html>" in page[:200].lower()
