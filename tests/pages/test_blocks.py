"""The blocks of a page run as they stand, from top to bottom, in a folder that has the clone's `examples`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.blocks import PAGES, ROOT, RUNNABLE, blocks

pytestmark = pytest.mark.slow

BEFORE = Path(__file__).parent / "before"
"""`before/PAGE.py` makes what the blocks of a how-to page take for granted: a collection, a bank, a model."""

DATA = BEFORE.parent / "data"
"""The folder of the module with the data that these programs import."""

ELSEWHERE = {
    "README": "tests/whole/test_readme.py",
    "other-clients": "tests/qdrant/test_other_clients.py",
}
"""Pages whose blocks have tests of their own."""


def script(page):
    """All blocks as one program; a shell block runs between the two Python blocks that it stands between."""
    before = BEFORE / f"{page.stem}.py"
    parts = [before.read_text()] if before.exists() else []
    for block in blocks(page):
        if block.reason is not None or block.language not in RUNNABLE:
            continue
        where = f"# {page.name}, line {block.line}\n"
        if block.language == "bash":
            parts.append(
                f"{where}__import__('subprocess').run(['bash', '-euc', {block.code!r}], check=True)\n"
            )
        else:
            parts.append(where + block.code)
    return "\n".join(parts)


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page.stem not in ELSEWHERE
        and any(each.language in RUNNABLE for each in blocks(page))
    ],
    ids=lambda page: page.stem,
)
def test_the_blocks_of_a_page_run(page, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program = tmp_path / "page.py"
    program.write_text(script(page))
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    run = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=os.environ | {"PATH": os.pathsep.join(paths), "PYTHONPATH": str(DATA)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for block in blocks(page):  # what a page says is printed, is printed
        if (
            block.language == "text"
            and block.reason is None
            and page.stem == "tutorial"
        ):
            assert block.code in run.stdout
