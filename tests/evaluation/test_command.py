"""`hubplugin evaluate`, as typed."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from hubplugin.cli import app

pytestmark = pytest.mark.slow


def test_the_command_evaluates_files_prints_the_table_and_writes_the_report(real, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("test_queries", "test_targets", "bank_queries"):
        np.save(f"{name}.npy", real[name][:300])
    (tmp_path / "truth.qrels").write_text("".join(f"{row} 0 {row} 1\n" for row in range(300)))
    arguments = [
        "evaluate", "--queries", "test_queries.npy", "--targets", "test_targets.npy", "--truth", "truth.qrels",
        "--bank", "bank_queries.npy", "--method", "is tau=0.1", "--method", "blend",
        "--report", "report.html",
    ]  # fmt: skip
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "is tau=0.1" in done.output
    printed = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert printed["command"] == "evaluate"
    assert [method["label"] for method in printed["methods"]] == ["raw", "is tau=0.1", "blend"]
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
