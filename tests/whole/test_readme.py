"""The README is run, not believed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.blocks import ROOT, blocks

pytestmark = pytest.mark.slow

BLOCKS = blocks(ROOT / "README.md")
PYTHON = [block.code for block in BLOCKS if block.language == "python"]
SHELL = [block.code for block in BLOCKS if block.language == "bash"]


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.splitlines()[0])
def test_a_block_of_the_readme_runs_as_it_stands_and_prints_the_gain(block):
    run = subprocess.run(
        [sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    before, after = (
        float(share) for share in re.findall(r"([\d.]+) ?%", run.stdout)[-2:]
    )
    assert after > before + 1


def test_the_commands_of_the_readme_run_one_after_the_other_and_print_the_gain(
    tmp_path,
):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        ["bash", "-euc", SHELL[0]],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    shares = re.findall(r"R@1\) +([\d.]+)% +([\d.]+)%", run.stdout)
    raw, corrected = map(float, shares[-1])
    assert corrected > raw + 0.5
    assert "would help" in run.stdout
    assert "The correction helps; " in run.stdout
