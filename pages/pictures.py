"""Pictures of what commands show, in docs/pictures: each is drawn from a real run on the example set.

python -m pages.pictures
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import faiss
import numpy as np
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from typer.testing import CliRunner

from hubplugin.cli import app
from pages.generated import ROOT

WIDTH = 80

DATA = ROOT / "examples" / "data"

THEME = TerminalTheme(
    (24, 29, 35),
    (230, 233, 237),
    [(0, 0, 0), (255, 138, 128), (86, 211, 162), *[(163, 171, 181)] * 5],
)
"""The colours of the reports in the dark."""

FRAME = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<style>
text {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""What rich fills in. Its own frame loads a font from elsewhere."""

MODEL = """
import json
import numpy as np

TEXTS = json.load(open("texts.json"))
VECTORS = dict(zip(TEXTS, np.load("test_queries.npy").astype("float32")))


def embed(texts):
    return np.stack([VECTORS[text] for text in texts])
"""
"""Embeds the queries of the example set, whose vectors are there already."""

BANK = ("--bank", "log.jsonl", "--embed", "model:embed", "--answers", "clicks.npy")


def draw(command: list[str], file: Path) -> None:
    """Run a command, and draw what it shows in a terminal of `WIDTH` columns."""
    with (
        patch.dict(os.environ, COLUMNS=str(WIDTH)),
        patch("hubplugin.cli.application.has_colours", lambda: True),
    ):
        done = CliRunner().invoke(app, command, color=True, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    typed = f"hubplugin {' '.join(command)}"
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    shown = Text.from_ansi(f"$ {typed}\n{done.stdout}")
    console.print(shown)
    svg = console.export_svg(
        title="", theme=THEME, code_format=FRAME, unique_id=file.stem
    )
    file.write_text(svg, encoding="utf-8")


def main() -> None:
    gallery = np.load(DATA / "test_targets.npy").astype(np.float32)
    faiss.normalize_L2(gallery)
    index = faiss.IndexFlatIP(gallery.shape[1])
    index.add(gallery)
    names = json.loads((DATA / "names.json").read_text())["test"]
    texts = json.loads((DATA / "test_texts.json").read_text())
    texts = [
        f"{text} " * (text in texts[:row]) + text for row, text in enumerate(texts)
    ]
    log = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    pictures = ROOT / "docs" / "pictures"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        Path("test_queries.npy").symlink_to(DATA / "test_queries.npy")
        Path("model.py").write_text(MODEL)
        Path("texts.json").write_text(json.dumps(texts))
        Path("log.jsonl").write_text(log)
        Path("names.json").write_text(json.dumps(names))
        np.save("clicks.npy", np.arange(len(texts)))
        faiss.write_index(index, "functions.faiss")
        store = "faiss:functions.faiss"
        looking = ["diagnose", store, *BANK, "--show", "names.json"]
        draw(looking, pictures / "diagnose.svg")
        draw(["apply", store, *BANK, "--learn"], pictures / "apply.svg")


if __name__ == "__main__":
    main()
