"""examples/walk.py: one collection's life, each command with the exit status that it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_a_collection_is_recorded_corrected_watched_refitted_and_returned(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(EXAMPLES)
    import walk

    # Local mode searches in Python: fewer queries than the walk has on a server.
    for name, value in {"RECORDED": 500, "LATER": 100, "MEASURED": 60, "SHADOWED": 20}.items():
        monkeypatch.setattr(walk, name, value)
    walk.main(["--folder", str(tmp_path)])
    told = capfd.readouterr().out
    commands = re.findall(r"^\$ hubplugin (\w+)", told, re.MULTILINE)
    assert commands == [
        *("bank", "diagnose", "apply", "evaluate", "switch", "switch"),
        *("monitor", "refit", "monitor", "versions", "rollback", "refresh", "inspect"),
    ]
    assert "500 queries of 384 dimensions" in told
    assert "20 searches: " in told
    assert "200 missing" in told
    assert "(exit status 4)" in told
    report = (tmp_path / "report.html").read_text()
    assert "<html" in report
