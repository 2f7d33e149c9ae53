"""Every benchmark, one after the other: `python -m benchmarks`, or one by name: `python -m benchmarks.faiss_types`."""

from __future__ import annotations

import runpy

for name in (
    "fit",
    "search",
    "faiss_types",
    "faiss_found",
    "settings",
    "learning",
    "log_in_stores",
    "auto_choice",
    "both_sides",
    "refusals",
    "guard",
):
    print(f"\n## {name}\n", flush=True)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
