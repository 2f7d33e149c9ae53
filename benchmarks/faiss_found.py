"""What Faiss indexes of every type find before and after `upgrade`, on several kinds of data: recall@10, R@1, latency.

    python -m benchmarks.faiss_found [TYPE ...] [--settings WORD ...] [--write]

A type is a factory string; {n} in it is that share of the dimensions, as in PQ{8}np, {lists} the square root of the
gallery, and `@16` behind it is its efSearch. Each is tried by inner product and by L2. All rankings are those of the
true vectors. Offsets are the default ones (`blend`) and strong ones (DBSN, tau 0.05), fitted on what the index decodes.

Of each type: recall@10 of the raw index against the exact raw ranking, of the upgraded one against the exact corrected
ranking, of the raw one against that, and how R@1 in points changes: in the mean of all settings, and in the worst. The
latency is that of single queries, upgraded over raw: medians of turns on one thread. `--write` puts the table into
docs/measurements/faiss.md. Data are those of benchmarks/bank_settings.py, as far as they are there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import faiss
import numpy as np

import hubplugin
import hubplugin_faiss
from benchmarks import bank_settings
from benchmarks.bank_settings import Setting
from benchmarks.tables import (
    EXAMPLES,
    RESULTS,
    ROOT,
    SHARED,
    machine,
    markdown,
    write_table,
)

TYPES = """
Flat SQ8 SQ6 SQ4 PQ{8}np PQ{16}np PQ{4}x4np PQ{8}x4fs PQ{4}x4fs OPQ{8},PQ{8}np IVF{lists},Flat IVF{lists},SQ8
IVF{lists},PQ{8}np IVF{lists},PQ{8}x4fs IVF{lists},PQ{4}x4fsr IVF{lists},PQ{8}np,RFlat PQ{8}x4fs,RFlat HNSW32@16
HNSW32@32 HNSW32@64 HNSW32,SQ8@64 PCA{3},Flat
"""

METHODS = {
    "default": hubplugin.fit,
    "strong": partial(hubplugin.fit, method="dbsn", tau=0.05),
}
K, TURNS, NPROBE = 10, 200, 16

PAGE, FILE = ROOT / "docs" / "measurements" / "faiss.md", RESULTS / "faiss_found.json"


@dataclass(frozen=True)
class Asked:
    """Test queries [m, d], the rows of their answers [m], and the exact rankings of the true vectors by each name."""

    queries: np.ndarray
    answers: np.ndarray
    rankings: dict[str, np.ndarray]


def settings(data: Path) -> Iterator[tuple[str, Path, Callable[[], Setting]]]:
    """Text to code, package descriptions, a query log, two languages, text to image: one draw of each."""
    code, debian, tldr, korean, coco = (
        data / name
        for name in ("code_search", "debian", "tldr_log", "tldr_ko", "coco500")
    )
    yield "code", code, partial(bank_settings.code, code, 2000, 5000, False, 0)
    yield (
        "examples",
        EXAMPLES,
        partial(bank_settings.code, EXAMPLES, 2500, 1200, False, 0),
    )
    yield "packages", debian, partial(bank_settings.package_log, debian, 1500, 0)
    yield (
        "commands",
        tldr,
        partial(bank_settings.wordings_log, tldr, bank_settings.popular, 0),
    )
    yield "languages", korean, partial(bank_settings.half, korean, False, None, 0)
    yield "images", coco, partial(bank_settings.half_log, coco, False, 250, 0)


def exact(
    queries: np.ndarray, gallery: np.ndarray, offsets: np.ndarray | float
) -> np.ndarray:
    """Rows of the K best of each query, by inner product and offset."""
    return np.argpartition(-(queries @ gallery.T + offsets), K, axis=1)[:, :K]


def asked(setting: Setting, most: int = 1000) -> Asked:
    """At most `most` queries of each test."""
    parts = [(queries[:most], rows[:most]) for queries, rows in setting.tests.values()]
    queries, rows = (np.concatenate(side) for side in zip(*parts, strict=True))
    rankings = {"raw": exact(queries, setting.targets, 0.0)}
    for name, fit in METHODS.items():
        rankings[name] = exact(
            queries,
            setting.targets,
            fit(setting.targets, setting.bank).offsets(setting.targets),
        )
    return Asked(queries, rows, rankings)


def set_search(index: faiss.Index, ef_search: int) -> None:
    """The same search parameters for every index: nprobe 16, efSearch, and for a refined one k_factor 4."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        set_search(index.index, ef_search)
    elif isinstance(index, faiss.IndexRefine):
        index.k_factor = max(index.k_factor, 4.0)
        set_search(index.base_index, ef_search)
    elif isinstance(index, faiss.IndexIVF):
        index.nprobe = NPROBE
    elif isinstance(index, faiss.IndexHNSW):
        index.hnsw.efSearch = ef_search


def built(kind: str, gallery: np.ndarray, metric: int) -> faiss.Index:
    size, d = gallery.shape
    factory, _, wide = kind.partition("@")
    factory = re.sub(
        r"\{(\d+)\}", lambda share: str(d // int(share[1])), factory
    ).replace("{lists}", str(round(size**0.5)))
    index = faiss.index_factory(d, factory, metric)
    index.train(gallery)
    index.add(gallery)
    set_search(index, int(wide or 64))
    return index


def upgraded(kind: str, raw: faiss.Index, model: hubplugin.OffsetModel) -> faiss.Index:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the losses that it warns of stand in the table
        index = hubplugin_faiss.upgrade(raw, model, force=True)
    set_search(index, int(kind.partition("@")[2] or 64))
    return index


def recall(index: faiss.Index, queries: np.ndarray, ranking: np.ndarray) -> float:
    found = index.search(queries, K)[1]
    return float(
        np.mean(
            [len(np.intersect1d(a, b)) / K for a, b in zip(found, ranking, strict=True)]
        )
    )


def figures(index: faiss.Index, test: Asked, ranking: str) -> dict[str, float]:
    """recall@10, and R@1 in points."""
    first = 100 * float((index.search(test.queries, 1)[1][:, 0] == test.answers).mean())
    return {
        "recall": round(recall(index, test.queries, test.rankings[ranking]), 4),
        "R@1": round(first, 2),
    }


def latency(raw: faiss.Index, index: faiss.Index, queries: np.ndarray) -> float:
    """Of single queries, `index` over `raw`: medians of turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(TURNS):
        query = queries[turn % len(queries)][None]
        for which in (0, 1) if turn % 2 else (1, 0):
            begin = time.perf_counter()
            (raw, index)[which].search(query, K)
            times[which].append(time.perf_counter() - begin)
    return round(float(np.median(times[1]) / np.median(times[0])), 2)


def found_by(
    kind: str, raw: faiss.Index, setting: Setting, test: Asked
) -> dict[str, dict[str, float]]:
    """Figures of the raw index, and of both methods."""
    found = {"raw": figures(raw, test, "raw")}
    for name, fit in METHODS.items():
        index = upgraded(kind, raw, fit(raw, setting.bank))
        found[name] = figures(index, test, name)
        found[name]["raw against it"] = round(
            recall(raw, test.queries, test.rankings[name]), 4
        )
        found[name]["latency"] = latency(raw, index, test.queries)
    return found


def measured(kinds: list[str], words: list[str]) -> Iterator[dict[str, object]]:
    for name, source, draw in settings(SHARED):
        if not source.is_dir() or (words and name not in words):
            continue
        setting = draw()
        test = asked(setting)
        for kind in kinds:
            if (
                kind.startswith(("OPQ", "PCA"))
                and len(setting.targets) < setting.targets.shape[1]
            ):
                continue  # Faiss trains none on fewer vectors than dimensions; OPQ ends the process (1.15.1)
            for by, metric in (
                ("IP", faiss.METRIC_INNER_PRODUCT),
                ("L2", faiss.METRIC_L2),
            ):
                found = found_by(
                    kind, built(kind, setting.targets, metric), setting, test
                )
                print(name, by, kind, json.dumps(found), file=sys.stderr, flush=True)
                yield {"setting": name, "type": kind, "metric": by, "found": found}


def table(rows: list[dict]) -> str:
    """Of each type and metric the mean over settings; of changes of R@1 also the worst."""
    head, lines = ["type", "metric", "raw recall", "raw R@1"], []
    for name in METHODS:
        head += [f"{name}: recall", "(raw index)", "change of R@1, worst", "latency"]
    for kind, by in dict.fromkeys((row["type"], row["metric"]) for row in rows):
        found = [
            row["found"] for row in rows if (row["type"], row["metric"]) == (kind, by)
        ]

        def mean(name: str, what: str, found: list = found) -> float:
            return float(np.mean([each[name][what] for each in found]))

        line = [
            f"`{kind}`",
            by,
            f"{mean('raw', 'recall'):.3f}",
            f"{mean('raw', 'R@1'):.1f}",
        ]
        for name in METHODS:
            changes = [each[name]["R@1"] - each["raw"]["R@1"] for each in found]
            line += [
                f"{mean(name, 'recall'):.3f}",
                f"{mean(name, 'raw against it'):.3f}",
            ]
            line += [
                f"{np.mean(changes):+.1f}, {min(changes):+.1f}",
                f"{mean(name, 'latency'):.2f}",
            ]
        lines.append(line)
    return markdown(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", default=TYPES.split())
    parser.add_argument("--settings", nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    faiss.omp_set_num_threads(1)
    rows = json.loads(FILE.read_text()) if FILE.exists() else []
    for new in measured(given.types, given.settings):
        rows = [
            row
            for row in rows
            if any(row[each] != new[each] for each in ("setting", "type", "metric"))
        ] + [new]
        FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    text = table(rows)
    print(text + f"\n{machine(1)}")
    if given.write:
        write_table(PAGE, "found", text)


if __name__ == "__main__":
    main()
