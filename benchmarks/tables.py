"""Where the benchmarks read their data, and how their tables get into the documentation."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = ROOT / "examples" / "data"
SHARED = ROOT.parent / "shared" / "data"
CODE_SEARCH = Path(os.environ.get("HUBPLUGIN_CODE_SEARCH", SHARED / "code_search"))


def pairs(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """All queries and all targets of a data set, [rows, d] each, row i belonging to row i."""
    return tuple(
        np.concatenate(
            [np.load(folder / f"{part}_{side}.npy") for part in ("test", "bank")]
        )
        for side in ("queries", "targets")
    )


def write_table(page: Path, name: str, table: str) -> None:
    """Replaces what stands between `<!-- name -->` and `<!-- end -->` on `page`."""
    start, end = f"<!-- {name} -->\n", "<!-- end -->"
    before, found, after = page.read_text().partition(start)
    if not found:
        raise SystemExit(f"{page} has no place for {name!r}")
    page.write_text(
        before + start + table.rstrip() + "\n" + end + after.partition(end)[2]
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return (
        "\n".join(
            "| " + " | ".join(line) + " |"
            for line in (head, ["---"] * len(head), *rows)
        )
        + "\n"
    )


INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")
"""What decides how a product's time compares with that of everything else, the widest last."""


def family() -> str:
    """The kind of processor that this is: who made it, and its widest instruction set. Ratios of one are no other's."""
    maker = (_model().split() or ["unknown"])[0].replace("(R)", "")
    return " ".join([maker, *_wide()[-1:]])


def _model() -> str:
    lines = (
        line.partition(":")[2].strip()
        for line in _lines("/proc/cpuinfo")
        if line.startswith("model name")
    )
    return next(lines, platform.processor())


def _wide() -> list[str]:
    flags = set(
        next(
            (line for line in _lines("/proc/cpuinfo") if line.startswith("flags")), ""
        ).split()
    )
    return [flag for flag in INSTRUCTIONS if flag in flags]


def machine(threads: int) -> str:
    """What a figure was seen on."""
    wide = _wide()
    model = f"{_model()} ({' '.join(wide)})" if wide else _model()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{model}, {os.cpu_count()} cores of which {threads} used, {gpu}, {platform.system()}, "
        f"torch {torch.__version__}, numpy {np.__version__}"
    )


def peak() -> int:
    """The most memory that this process has had, in bytes. `ru_maxrss` would count that of its parent, too."""
    return _status("VmHWM")


def own_memory() -> int:
    """The memory that this process has, in bytes, without pages of files."""
    return _status("RssAnon")


def _status(name: str) -> int:
    return 1024 * next(
        int(line.split()[1])
        for line in _lines("/proc/self/status")
        if line.startswith(name)
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
