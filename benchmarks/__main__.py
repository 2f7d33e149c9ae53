"""Every benchmark, one after the other: `python -m benchmarks`, or one by its name: `python -m benchmarks.fit`."""

from __future__ import annotations

import runpy

NAMES = """
fit growth settings learning remedies guard causes keeping faiss_found candidates qdrant_overhead
qdrant_candidates pgvector serving
"""

for name in NAMES.split():
    print(f"\n## {name}\n", flush=True)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
