"""How far apart codes bring the lengths of vectors, which decides what metric a Faiss file is taken for.

    python -m benchmarks.faiss_lengths [--write]

This sets the thresholds of `FaissStore.metric`, which are `SPREADS` in hubplugin_faiss.store. Types and
settings are those of benchmarks/faiss_found.py, as far as codes decide, with some coarser ones, and text to code cut to
64 and 16 components; of each setting at most 3,000 targets. A spread is that between the 5 % and the 95 % quantile of
the lengths of the first 1,000 vectors that an index decodes, over the median. Shown are the largest of unit vectors,
and of the settings of at most 1,200 targets the smallest of the same vectors with lengths times exp(sigma * normal). In
brackets stands in how many settings the file was taken for cosine. `--write` puts the table into
benchmarks/results/faiss_lengths.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator

import faiss
import numpy as np

import hubplugin_faiss
from benchmarks.faiss_found import built, settings
from benchmarks.tables import RESULTS, SHARED, machine, markdown, write_table
from hubplugin.metric import Metric, normalise
from hubplugin_faiss.calibration import parts
from hubplugin_faiss.handlers import handler_for

TYPES = """
SQ8 SQ6 SQ4 PQ{8}np PQ{16}np PQ{64}np PQ{4}x4np PQ{8}x4fs PQ{4}x4fs PQ{32}x4fs OPQ{8},PQ{8}np IVF{lists},SQ8
IVF{lists},SQ4 IVF{lists},PQ{8}np IVF{lists},PQ{64}np IVF{lists},PQ{8}x4fs IVF{lists},PQ{4}x4fsr HNSW32,SQ8
PCA{3},Flat PCA{3},SQ8 PCA{6},Flat PCA{12},Flat
"""
SIGMAS = 0.0, 0.05, 0.1, 0.2, 0.4
MOST, VARIED = 3000, 1200


def galleries() -> Iterator[tuple[str, np.ndarray]]:
    for name, source, draw in settings(SHARED):
        if source.is_dir():
            vectors = normalise(draw().targets[:MOST], name)
            yield name, vectors
            for d in (64, 16) if name == "code" else ():
                yield (
                    f"{name} {d}",
                    normalise(np.ascontiguousarray(vectors[:VARIED, :d]), name),
                )


def by_both(kind: str, vectors: np.ndarray) -> Iterator[tuple[str, faiss.Index]]:
    """The index by inner product, and by L2. Most codes are the same by both; they take long, and are made once."""
    yield "IP", (index := built(kind, vectors, faiss.METRIC_INNER_PRODUCT))
    if "IVF" in kind or "HNSW" in kind:
        yield "L2", built(kind, vectors, faiss.METRIC_L2)
        return
    for part in parts(index):
        part.metric_type = faiss.METRIC_L2
    yield "L2", index


def seen(index: faiss.Index) -> tuple[float, float, bool]:
    """Spread and median of decoded lengths, and whether the file is taken for cosine."""
    lengths = np.linalg.norm(next(handler_for(index).scan(0, 1000))[0], axis=1)
    low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
    with tempfile.NamedTemporaryFile(suffix=".faiss") as file:
        faiss.write_index(index, file.name)
        return (
            (high - low) / middle,
            middle,
            hubplugin_faiss.open_store(file.name).metric is Metric.COSINE,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    faiss.omp_set_num_threads(1)
    found: dict[tuple[str, str], dict[float, list[tuple[float, float, bool]]]] = {}
    for name, unit in galleries():
        normal = np.random.default_rng(0).normal(size=(len(unit), 1)).astype(np.float32)
        for kind in TYPES.split():
            if unit.shape[1] < 64 and "{" in kind.replace("{lists}", ""):
                continue  # too few dimensions for a share of them
            if len(unit) < unit.shape[1] and kind.startswith(("OPQ", "PCA")):
                continue  # Faiss trains none on fewer vectors than dimensions
            for sigma in SIGMAS if len(unit) <= VARIED else SIGMAS[:1]:
                for by, index in by_both(kind, unit * np.exp(sigma * normal)):
                    found.setdefault((kind, by), defaultdict(list))[sigma].append(
                        one := seen(index)
                    )
                    print(name, kind, by, sigma, *one, file=sys.stderr, flush=True)
    lines = []
    for (kind, by), cases in found.items():
        middles = [middle for _, middle, _ in cases[0.0]]
        line = [f"`{kind}`", by, f"{min(middles):.2f} to {max(middles):.2f}"]
        for sigma in SIGMAS:
            spreads, _, cosine = zip(*cases[sigma], strict=True)
            line += [
                f"{min(spreads) if sigma else max(spreads):.2f} ({sum(cosine)} of {len(cosine)})"
            ]
        lines.append(line)
    head = [
        "type",
        "metric",
        "medians",
        "unit: largest",
        *(f"sigma {sigma}: smallest" for sigma in SIGMAS[1:]),
    ]
    text = markdown(head, lines)
    print(text + f"\n{machine(1)}")
    if given.write:
        write_table(RESULTS / "faiss_lengths.md", "lengths", text)


if __name__ == "__main__":
    main()
