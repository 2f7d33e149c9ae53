"""The walk from a log to a correction that is looked after, as the example does it."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.whole.commands import hubplugin

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.slow


def test_the_walk_goes_from_recorded_queries_to_a_rollback(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import walk

    for name, fewer in {
        "RECORDED": 500,
        "LATER": 100,
        "MEASURED": 200,
        "COMPARED": 20,
    }.items():
        monkeypatch.setattr(walk, name, fewer)  # local mode searches in Python
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **_: hubplugin(*command[command.index("hubplugin") + 1 :]),
    )
    walk.main(["--folder", str(tmp_path)])
    said = capsys.readouterr().out
    before, after = map(
        float, re.search(r"R@1\) +([\d.]+) % +([\d.]+) %", said, re.MULTILINE).groups()
    )
    assert after > before
    assert "of the results are the same" in said
    asked = said.partition("inspection complains")[2]  # the second look at the record
    clicks, pairs = re.search(
        r"(\d+) clicks on (\d+) different pairs of query and target", asked
    ).groups()
    assert 200 < int(pairs) == int(clicks) <= 400
    assert "pairs taught" in said.partition("hubplugin refit")[2]
    monitored = said.partition("hubplugin inspect")[2]
    assert monitored.index("(exit status 4)") < monitored.index("hubplugin refit")
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()[:200].lower()
