"""Every type of Faiss index before and after `upgrade`, on real data: recall, R@1, latency, size.

    python -m benchmarks.faiss_types [TYPE ...] [--data FOLDER] [--markdown FILE]
    python -m benchmarks.faiss_types [TYPE ...] --size 5000

The second prints what is found, of each type by inner product and by L2, with default offsets (blend) and strong ones
(DBSN, tau 0.05): recall@10 of the raw index against the exact raw ranking, of the raw index against the corrected one,
of the upgraded index against the corrected one, and R@1 of both. `@16` behind a type is its efSearch. Where FOLDER has
fewer targets, vectors between two of them fill the gallery up.

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


FOUND = (
    "Flat SQ8 SQ4 PQ48np PQ24np PQ96x4np PQ48x4fs PQ96x4fs IVF64,Flat IVF64,SQ8 IVF64,PQ48np IVF64,PQ48x4fs "
    "IVF64,PQ96x4fsr IVF64,PQ48np,RFlat HNSW32@16 HNSW32@32 HNSW32@64 HNSW32,SQ8@64 NSG32@64 PCA128,Flat "
    "RaBitQ RaBitQ4 IVF64,RaBitQ LSH SQ6 OPQ48,PQ48np RQ8x8 PRQ8x2x8"
)
"""The types that are tried by inner product and by L2."""


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
    index = faiss.index_factory(gallery.shape[1], kind.removeprefix("L2:").partition("@")[0], metric)
    index.train(gallery)
    index.add(gallery)
    set_search(index, of_kind(kind))
    return index


def of_kind(kind: str) -> int:
    """The efSearch that a type is written with."""
    return int(kind.partition("@")[2] or PROBE["efSearch"])


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


METHODS: tuple[tuple[str, dict[str, float]], ...] = (("blend", {}), ("dbsn", {"tau": 0.05}))
"""The default, and strong offsets."""

SEEN = "raw against corrected", "corrected", "R@1"


def filled(gallery: np.ndarray, size: int) -> np.ndarray:
    """`size` unit vectors [size, d]: the first of `gallery`, and where it has fewer, vectors between two of these."""
    rng, missing = np.random.default_rng(0), max(size - len(gallery), 0)
    first, second = gallery[rng.integers(0, len(gallery), (2, missing))]
    between = 0.7 * first + 0.3 * second
    between /= np.maximum(np.linalg.norm(between, axis=1, keepdims=True), 1e-9)
    return np.concatenate([gallery[:size], between.astype(np.float32)])


def found_first(index: faiss.Index, queries: np.ndarray) -> float:
    """R@1 in points: row i is the answer to query i."""
    return 100 * float((index.search(queries, 1)[1][:, 0] == np.arange(len(queries))).mean())


def what_is_found(
    kind: str, gallery: np.ndarray, queries: np.ndarray, bank: np.ndarray, truths: list[np.ndarray]
) -> list[str]:
    """A row of the table: of the raw index, and of it with offsets that are fitted on what it decodes. truths: the
    exact rankings of the true vectors, raw and by the same methods."""
    raw = built(kind, gallery)
    cells = [kind, f"{recall(raw, queries, truths[0]):.3f}", f"{found_first(raw, queries):.1f}"]
    for (method, parameters), truth in zip(METHODS, truths[1:], strict=True):
        model = hubplugin.fit(raw, bank, method, **parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            corrected = hubplugin_faiss.upgrade(raw, model, force=True)
        set_search(corrected, of_kind(kind))
        cells += [f"{recall(raw, queries, truth):.3f}", f"{recall(corrected, queries, truth):.3f}"]
        cells += [f"{found_first(corrected, queries):.1f}"]
    return cells


def print_found(kinds: list[str], folder: Path, size: int) -> None:
    bank, queries, gallery = load(folder)
    gallery, queries, bank = filled(gallery, size), queries[:1000], bank[:2000]
    models = [hubplugin.fit(gallery, bank, method, **parameters) for method, parameters in METHODS]
    offsets = [np.zeros(len(gallery), np.float32), *(model.offsets(gallery) for model in models)]
    truths = [exact(queries, gallery, own) for own in offsets]
    heads = ["type", "raw", "R@1", *(f"{name}{head}" for name in ("", "strong: ") for head in SEEN)]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    for kind in (prefix + kind for kind in kinds for prefix in ("", "L2:")):
        if kind != "LSH":  # which Faiss makes for L2 alone
            print("| " + " | ".join(what_is_found(kind, gallery, queries, bank, truths)) + " |", flush=True)


def main(
    types: Annotated[list[str] | None, typer.Argument(help="Factory strings, L2: in front for Euclidean.")] = None,
    data: Annotated[Path | None, typer.Option(help="A folder with the four arrays.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here, too.")] = None,
    size: Annotated[int | None, typer.Option(help="What is found among so many targets, by both metrics.")] = None,
) -> None:
    folder = data or (CODE_SEARCH if CODE_SEARCH.is_dir() else EXAMPLES)
    faiss.omp_set_num_threads(1)
    if size is not None:
        print_found(types or FOUND.split(), folder, size)
        return
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
