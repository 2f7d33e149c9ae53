"""Every type of Faiss index before and after `upgrade`, on real data: recall, latency, size.

    python -m benchmarks.faiss_types [TYPE ...] [--data FOLDER] [--markdown FILE]

Recall@10 of the raw index is against the exact raw ranking, of the upgraded one against the exact corrected ranking
(DBSN, tau 0.05), both over the original vectors. Latencies are medians over interleaved runs of the same queries on one
thread. `extra` are the extra components of a query, without their padding; `add` is the offset of a vector that
is added through plain Faiss.

FOLDER holds bank_queries.npy, test_queries.npy, test_targets.npy and bank_targets.npy, all of which make the gallery.
The default is the larger set where it is there (HUBPLUGIN_CODE_SEARCH, or shared/data/code_search beside the
checkout), else examples/data.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Annotated

import faiss
import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import hubplugin
import hubplugin_faiss
from benchmarks.tables import CODE_SEARCH, EXAMPLES
from hubplugin.model import OffsetModel
from hubplugin_faiss.handlers import handler_for

COPIES = 4
PROBE = {"nprobe": 16, "efSearch": 64}
TYPES = (
    "Flat", "L2:Flat", "SQfp16", "SQbf16", "SQ8", "SQ6", "SQ4", "L2:SQ8", "L2:SQ4", "PQ48np", "PQ96x4np", "L2:PQ48np",
    "IVF128,Flat", "L2:IVF128,Flat", "IVF128,SQfp16", "IVF128,SQ8", "IVF128,SQ4", "L2:IVF128,SQ4", "IVF128,PQ48np",
    "L2:IVF128,PQ48np", "IVF128_HNSW32,Flat", "HNSW32", "L2:HNSW32", "HNSW32,SQ8", "L2:HNSW32,PQ48np", "NSG32",
    "OPQ48,IVF128,PQ48np", "PCA128,Flat", "IVF128,PQ48np,RFlat", "IVF128,PQ48np,Refine(SQfp16)", "PQ96x4fs",
    "L2:PQ96x4fs", "IVF128,PQ96x4fs", "IVF128,PQ96x4fsr", "IVF128,PQ96x4fs,RFlat", "RaBitQ", "IVF128,RaBitQ",
    "L2:IVF128,RaBitQ", "L2:LSH", "RQ16x8", "PRQ8x2x8",
)  # fmt: skip


def load(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bank queries, test queries and the gallery, at unit length."""
    parts = {path.stem: np.load(path).astype(np.float32) for path in folder.glob("*.npy")}
    gallery = np.concatenate([parts["test_targets"], parts["bank_targets"]])
    unit = [
        part / np.linalg.norm(part, axis=1, keepdims=True) for part in (parts["bank_queries"], parts["test_queries"])
    ]
    return unit[0], unit[1], gallery / np.linalg.norm(gallery, axis=1, keepdims=True)


def built(kind: str, gallery: np.ndarray) -> faiss.Index:
    metric = faiss.METRIC_L2 if kind.startswith("L2:") else faiss.METRIC_INNER_PRODUCT
    index = faiss.index_factory(gallery.shape[1], kind.removeprefix("L2:"), metric)
    index.train(gallery)
    index.add(gallery)
    set_search(index)
    return index


def set_search(index: faiss.Index, ef_search: int = PROBE["efSearch"]) -> None:
    """The same search parameters for every index: nprobe 16, efSearch 64, and for a refined one k_factor 4."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        set_search(index.index, ef_search)
    elif isinstance(index, faiss.IndexRefine):
        index.k_factor = max(index.k_factor, 4.0)
        set_search(index.base_index, ef_search)
    elif isinstance(index, faiss.IndexIVF):
        index.nprobe = PROBE["nprobe"]
    elif isinstance(index, faiss.IndexHNSW):
        index.hnsw.efSearch = ef_search
    elif isinstance(index, faiss.IndexNSG):
        index.nsg.search_L = ef_search


def exact(queries: np.ndarray, gallery: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The 10 best by q.t + offset, which is the order of -|q - t|^2 / 2 + offset among unit vectors."""
    targets = np.concatenate([gallery, offsets[:, None]], axis=1)
    asked = np.concatenate([queries, np.ones((len(queries), 1), np.float32)], axis=1)
    return faiss.knn(asked, targets, 10, metric=faiss.METRIC_INNER_PRODUCT)[1]


def recall(index: faiss.Index, queries: np.ndarray, truth: np.ndarray) -> float:
    found = index.search(queries, 10)[1]
    return float(np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(found, truth, strict=True)]))


def latencies(indexes: tuple[faiss.Index, ...], queries: np.ndarray, batch: int, rounds: int) -> list[float]:
    """Median milliseconds a query of each index, the indexes taking turns on the same batches.

    Each is several copies that take turns, too: where in memory one happens to lie makes up to 25 %.
    """
    copies = [[faiss.deserialize_index(faiss.serialize_index(index)) for _ in range(COPIES)] for index in indexes]
    for copy in (copy for of_one in copies for copy in of_one):
        set_search(copy)
    taken: list[list[float]] = [[] for _ in indexes]
    for number in range(rounds):
        start = number * batch % (len(queries) - batch + 1)
        part = queries[start : start + batch]
        order = range(len(indexes)) if number % 2 else reversed(range(len(indexes)))
        for which in order:
            begin = time.perf_counter()
            copies[which][number // 2 % COPIES].search(part, 10)
            taken[which].append((time.perf_counter() - begin) * 1e3 / batch)
    return [float(np.median(times)) for times in taken]


def row(
    kind: str, model: OffsetModel, queries: np.ndarray, gallery: np.ndarray, truths: tuple[np.ndarray, ...]
) -> list[str]:
    raw = built(kind, gallery)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        corrected = hubplugin_faiss.upgrade(raw, model)
    set_search(corrected)
    before, after = recall(raw, queries, truths[0]), recall(corrected, queries, truths[1])
    single = latencies((raw, corrected), queries, 1, 800)
    batched = latencies((raw, corrected), queries, 100, 48)
    sizes = [faiss.serialize_index(index).nbytes for index in (raw, corrected)]
    extra = handler_for(corrected).extra_dimensions()[-1]
    plain = float(extra.offsets(extra.query[None])[0])
    return [
        kind,
        f"+{extra.width}",
        " ".join(f"{value:.4g}" for value in extra.query if value),
        f"{plain:+.4f}",
        f"{before:.4f}",
        f"{after:.4f}",
        f"{after - before:+.4f}",
        f"{single[0]:.3f}",
        f"{single[1] / single[0]:.2f}",
        f"{batched[0]:.3f}",
        f"{batched[1] / batched[0]:.2f}",
        f"{sizes[1] / sizes[0]:.2f}",
        "yes" if caught else "",
    ]


def main(
    types: Annotated[list[str] | None, typer.Argument(help="Factory strings, L2: in front for Euclidean.")] = None,
    data: Annotated[Path | None, typer.Option(help="A folder with the four arrays.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here, too.")] = None,
) -> None:
    folder = data or (CODE_SEARCH if CODE_SEARCH.is_dir() else EXAMPLES)
    faiss.omp_set_num_threads(1)
    bank, queries, gallery = load(folder)
    queries, bank = queries[:1000], bank[:4000]
    model = hubplugin.fit(gallery, bank, "dbsn", tau=0.05)
    truths = (
        exact(queries, gallery, np.zeros(len(gallery), np.float32)),
        exact(queries, gallery, model.offsets(gallery)),
    )
    heads = (
        "type", "w", "extra", "add", "raw", "corrected", "change", "ms", "x", "ms/100", "x", "size x", "warned",
    )  # fmt: skip
    rows = []
    for kind in track(types or TYPES, console=Console(stderr=True), transient=True):
        rows.append(row(kind, model, queries, gallery, truths))
        print("\t".join(rows[-1]), flush=True)
    table = Table(*heads, title=f"{len(gallery)} targets, {len(queries)} queries, {gallery.shape[1]} dimensions")
    for line in rows:
        table.add_row(*line)
    Console(width=150).print(table)
    if markdown:
        lines = ["| " + " | ".join(line) + " |" for line in (heads, ("---",) * len(heads), *rows)]
        markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
