"""The README is run, not believed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_the_readme_shows_both_stores():
    assert any("hubplugin_faiss" in block for block in BLOCKS)
    assert any("hubplugin_qdrant" in block for block in BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_a_block_of_the_readme_runs_as_it_stands_and_prints_the_gain(block):
    run = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, after = (float(share) for share in re.findall(r"([\d.]+) ?%", run.stdout)[-2:])
    assert after > before + 1
