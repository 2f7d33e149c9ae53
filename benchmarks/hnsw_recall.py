"""Recall of an HNSW graph after `upgrade`, with its links kept and with the graph built anew, on several data sets.

    python -m benchmarks.hnsw_recall [FOLDER] [--markdown FILE]

recall@10 of the raw index is against the exact raw ranking, of the upgraded ones against the exact corrected ranking.
FOLDER holds one folder a data set, with arrays whose names begin with queries (or bank_queries, wordings) and targets;
examples/data is always among them. Half of the queries are the bank, the others are searched for.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Annotated

import faiss
import numpy as np
import typer

import hubplugin
import hubplugin_faiss
from benchmarks.faiss_types import exact, recall
from benchmarks.tables import CODE_SEARCH, EXAMPLES

METHODS: dict[str, dict[str, float]] = {"dbsn": {"tau": 0.05}, "nnn": {"k": 16, "alpha": 0.5}}
EF_SEARCH = (16, 64, 128)
QUERIES = 1000


def load(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bank, queries and gallery of a data set, float32 at unit length."""
    parts = {path.stem: np.load(path) for path in sorted(folder.glob("*.npy"))}
    targets = np.concatenate([part for name, part in parts.items() if "targets" in name])
    asked = np.concatenate([part for name, part in parts.items() if "queries" in name or "wordings" in name])
    asked = asked[np.random.default_rng(0).permutation(len(asked))]
    bank, queries = asked[0::2][:4000], asked[1::2][:QUERIES]
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (bank, queries, targets)]
    return unit[0].astype(np.float32), unit[1].astype(np.float32), unit[2].astype(np.float32)


def rows(name: str, folder: Path, m: int) -> list[list[str]]:
    bank, queries, gallery = load(folder)
    raw = faiss.IndexHNSWFlat(gallery.shape[1], m, faiss.METRIC_INNER_PRODUCT)
    begin = time.perf_counter()
    raw.add(gallery)
    built = time.perf_counter() - begin
    found = []
    for method, parameters in METHODS.items():
        model = hubplugin.fit(gallery, bank, method, **parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept = hubplugin_faiss.upgrade(raw, model, rebuild=False)
            begin = time.perf_counter()
            anew = hubplugin_faiss.upgrade(raw, model, rebuild=True)
            seconds = time.perf_counter() - begin
        truths = [
            exact(queries, gallery, np.zeros(len(gallery), np.float32)),
            exact(queries, gallery, model.offsets(gallery)),
        ]
        for ef in EF_SEARCH:
            for index in (raw, kept, anew):
                hubplugin_faiss.tune(index, ef_search=ef)
            values = [
                recall(raw, queries, truths[0]),
                recall(kept, queries, truths[1]),
                recall(anew, queries, truths[1]),
            ]
            changes = [f"{value - values[0]:+.4f}" for value in values[1:]]
            found.append(
                [name, f"{len(gallery):,}", str(m), method, str(ef), *(f"{value:.4f}" for value in values), *changes,
                 f"{built:.1f} s", f"{seconds:.1f} s"]
            )  # fmt: skip
            print("\t".join(found[-1]), flush=True)
    return found


def main(
    folder: Annotated[Path | None, typer.Argument(help="One folder a data set.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here, too.")] = None,
    m: Annotated[int, typer.Option("--m", help="Links a node, HNSW's M.")] = 32,
) -> None:
    faiss.omp_set_num_threads(1)
    sets = {"examples/data": EXAMPLES}
    source = folder or (CODE_SEARCH.parent if CODE_SEARCH.is_dir() else None)
    if source is not None:
        sets.update({path.name: path for path in sorted(source.iterdir()) if list(path.glob("*targets*.npy"))})
    heads = (
        "data",
        "targets",
        "M",
        "method",
        "ef",
        "raw",
        "kept",
        "rebuilt",
        "kept - raw",
        "rebuilt - raw",
        "build",
        "with rebuild",
    )
    print("\t".join(heads))
    table = [line for name, path in sets.items() for line in rows(name, path, m)]
    if markdown:
        lines = ["| " + " | ".join(line) + " |" for line in (heads, ("---",) * len(heads), *table)]
        markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
