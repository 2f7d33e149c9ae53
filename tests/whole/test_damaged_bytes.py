"""Files whose bytes are damaged end in one line, or do no harm; `python -m tests.whole.damaged_bytes` tries more."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_damaged_bytes_of_what_we_read_end_in_one_line():
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.whole.damaged_bytes",
        "400",
        "7",
    ]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
