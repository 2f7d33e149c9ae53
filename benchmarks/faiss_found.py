"""What Faiss indexes of every type find before and after `upgrade`, on several kinds of data: recall@10 and R@1.

    python -m benchmarks.faiss_found [TYPE ...] [--settings WORD ...] [--size 50000] [--rules] [--write]

A type is a factory string; {n} in it is that share of the dimensions, as in PQ{8}np, {lists} the square root of the
gallery, and `@16` behind it is its efSearch. Each is tried by inner product and by L2. With `--size` the galleries of
the three settings that MiniLM made are filled up with the vectors of each other. All rankings are those of the true
vectors.

Of each type: recall@10 of the raw index against the exact raw ranking, of the upgraded one against the exact corrected
ranking, of the raw one against that, and how R@1 in points changes: in the mean of all settings, and in the worst;
with `--size` in each setting by itself.
Offsets are the default ones (`blend`) and strong ones (DBSN, tau 0.05), fitted on what the index decodes.

`--rules` compares what offsets of codes can be: those of the true vectors, as they are or times the slope of decoded
similarities on true ones; a model of true vectors, asked for decoded ones; and what is fitted on what the index
decodes, times the lengths of that or not, with the norm bias taken off or left in. `--applied` takes what `apply` does
without force, the metric not said, of queries alone and with their answers: it may refuse, or warn and name the search
that brings recall back. `--write` puts the table into docs/measurements/faiss.md. Data are those of
benchmarks/bank_settings.py, as far as they are there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import faiss
import numpy as np

import hubplugin
import hubplugin_faiss
from benchmarks import bank_settings
from benchmarks.bank_settings import Setting
from benchmarks.faiss_types import exact, recall, set_search
from benchmarks.tables import EXAMPLES, RESULTS, ROOT, SHARED, machine, markdown, write_table
from hubplugin import Bank
from hubplugin.errors import CorrectionRefused
from hubplugin_faiss.handlers import handler_for
from hubplugin_faiss.handlers.base import IndexScale
from hubplugin_faiss.handlers.refine import of_entries

TYPES = """
Flat SQ8 SQ6 SQ4 PQ{8}np PQ{16}np PQ{4}x4np PQ{8}x4fs PQ{4}x4fs OPQ{8},PQ{8}np RQ8x8 PRQ8x2x8 LSH RaBitQ RaBitQ4
IVF{lists},Flat IVF{lists},SQ8 IVF{lists},PQ{8}np IVF{lists},PQ{8}x4fs IVF{lists},PQ{4}x4fsr IVF{lists},RaBitQ
IVF{lists},PQ{8}np,RFlat PQ{8}x4fs,RFlat HNSW32@16 HNSW32@32 HNSW32@64 HNSW32,SQ8@64 NSG32@64 PCA{3},Flat
"""

RULED = "SQ4 PQ{8}np PQ{16}np PQ{8}x4fs OPQ{8},PQ{8}np RaBitQ IVF{lists},PQ{8}np IVF{lists},RaBitQ"
"""The types on which the rules are compared."""

METHODS = {"default": hubplugin.fit, "strong": partial(hubplugin.fit, method="dbsn", tau=0.05)}

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
        data / name for name in ("code_search", "debian", "tldr_log", "tldr_ko", "coco500")
    )
    yield "code", code, partial(bank_settings.code, code, 2000, 5000, False, 0)
    yield "examples", EXAMPLES, partial(bank_settings.code, EXAMPLES, 2500, 1200, False, 0)
    yield "packages", debian, partial(bank_settings.package_log, debian, 1500, 0)
    yield "commands", tldr, partial(bank_settings.wordings_log, tldr, bank_settings.popular, 0)
    yield "languages", korean, partial(bank_settings.half, korean, False, None, 0)
    yield "images", coco, partial(bank_settings.half_log, coco, False, 250, 0)


MINILM = {
    "code": ("code_search", "examples", "debian"),
    "examples": ("examples", "code_search", "debian"),
    "packages": ("code_search", "examples", "debian/targets"),
}
"""What a gallery is filled up with, by setting: all vectors of these sets, which one model made. Other wordings of the
packages that are asked for would be answers that count for none."""


def filled(name: str, setting: Setting, size: int, data: Path) -> Setting:
    """`setting` with `size` targets, if it has fewer: others of `MINILM` that it holds nowhere else, nor twice."""
    missing = size - len(setting.targets)
    if missing <= 0:
        return setting
    folders = [EXAMPLES if source == "examples" else data / source for source in MINILM[name]]
    sources = [file for folder in folders for file in sorted(folder.glob("*.npy")) or [folder.with_suffix(".npy")]]
    pool = np.concatenate([bank_settings.read(file) for file in sources])
    held = [setting.bank, setting.targets, *(queries for queries, _ in setting.tests.values())]
    held += [] if setting.target_bank is None else [setting.target_bank]
    whole = np.dtype((np.void, pool.strides[0]))
    known, names = (np.ascontiguousarray(part).view(whole).ravel() for part in (np.concatenate(held), pool))
    _, first = np.unique(names, return_index=True)
    others = pool[np.sort(first[~np.isin(names[first], known)])]
    if len(others) < missing:
        raise SystemExit(f"{name}: {len(setting.targets) + len(others)} vectors at most")
    return replace(setting, targets=np.concatenate([setting.targets, others[:missing]]))


def asked(setting: Setting, most: int = 1000) -> Asked:
    """At most `most` queries of each test."""
    parts = [(queries[:most], rows[:most]) for queries, rows in setting.tests.values()]
    queries, rows = (np.concatenate(side) for side in zip(*parts, strict=True))
    rankings = {"raw": exact(queries, setting.targets, np.zeros(len(setting.targets), np.float32))}
    for name, fit in METHODS.items():
        rankings[name] = exact(queries, setting.targets, fit(setting.targets, setting.bank).offsets(setting.targets))
    return Asked(queries, rows, rankings)


def built(kind: str, gallery: np.ndarray, metric: int) -> faiss.Index:
    size, d = gallery.shape
    factory, _, wide = kind.partition("@")
    factory = re.sub(r"\{(\d+)\}", lambda share: str(d // int(share[1])), factory).replace(
        "{lists}", str(round(size**0.5))
    )
    index = faiss.index_factory(d, factory, metric)
    index.train(gallery)
    index.add(gallery)
    set_search(index, int(wide or 64))
    return index


def upgraded(kind: str, raw: faiss.Index, offsets: hubplugin.OffsetModel | np.ndarray) -> faiss.Index:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        force = {"force": True} if isinstance(offsets, hubplugin.OffsetModel) else {}
        index = hubplugin_faiss.upgrade(raw, offsets, **force)
    set_search(index, int(kind.partition("@")[2] or 64))
    return index


def found_first(index: faiss.Index, test: Asked) -> float:
    """R@1 in points."""
    return 100 * float((index.search(test.queries, 1)[1][:, 0] == test.answers).mean())


def both(index: faiss.Index, test: Asked, ranking: str) -> dict[str, float]:
    found = recall(index, test.queries, test.rankings[ranking])
    return {"recall": round(found, 4), "R@1": round(found_first(index, test), 2)}


def types_of(kind: str, raw: faiss.Index, setting: Setting, test: Asked) -> dict[str, dict[str, float]]:
    """Figures of the raw index, and of both methods."""
    found = {"raw": both(raw, test, "raw")}
    for name, fit in METHODS.items():
        found[name] = both(upgraded(kind, raw, fit(raw, setting.bank)), test, name)
        found[name]["raw against it"] = round(recall(raw, test.queries, test.rankings[name]), 4)
    return found


def slope(true: np.ndarray, decoded: np.ndarray, bank: np.ndarray) -> float:
    """Of decoded similarities of the bank on true ones, each less the mean of its query."""
    rows = np.linspace(0, len(true) - 1, 2000).astype(np.int64)
    x, y = (bank[:500] @ vectors[rows].T for vectors in (true, decoded))
    x, y = (each - each.mean(axis=1, keepdims=True) for each in (x, y))
    return float((x * y).sum() / (x**2).sum())


def rules_of(kind: str, raw: faiss.Index, setting: Setting, test: Asked) -> dict[str, dict[str, float]]:
    """Figures of the raw index, and of the default by each rule."""
    handler = handler_for(raw)
    of_true, of_codes = (hubplugin.fit(vectors, setting.bank) for vectors in (setting.targets, raw))
    labels = handler.labels()
    by_id = np.argsort(labels)
    decoded = np.concatenate([vectors for vectors, _ in handler.scan(0, 1 << 14)])[by_id]
    scale = IndexScale.of(handler, of_true)

    def unbiased(offsets: np.ndarray) -> np.ndarray:
        return of_entries(handler, scale.unbiased, offsets[labels])[by_id]

    true = of_true.offsets(setting.targets)
    tried = {
        "true offsets": unbiased(true),
        "scaled by the slope": unbiased(slope(setting.targets, decoded, setting.bank) * true),
        "a model of true vectors": of_true,
        "fitted on what it decodes": of_codes,
        "not times the lengths": unbiased(of_codes.offsets(decoded)),
        "the norm bias left in": of_codes.offsets(decoded),
    }
    found = {"raw": both(raw, test, "raw")}
    return found | {name: both(upgraded(kind, raw, offsets), test, "default") for name, offsets in tried.items()}


def applied_of(kind: str, raw: faiss.Index, setting: Setting, test: Asked) -> dict[str, dict[str, object]]:
    """Figures of the raw index, and of what `apply` makes of its file: of the bank alone, and with its answers."""
    answers = setting.target_bank if setting.clicks is None else setting.clicks
    found: dict[str, dict[str, object]] = {"raw": {**both(raw, test, "raw")}}
    for name, bank in {"queries": Bank(setting.bank), "answers": Bank(setting.bank, answers)}.items():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            path = f"{folder}/x.faiss"
            faiss.write_index(raw, path)
            try:
                hubplugin.apply(hubplugin_faiss.open_store(path), bank)
            except CorrectionRefused as error:
                found[name] = {"refused": re.sub(r";.*", "", str(error))}
                continue
            index = faiss.read_index(path)
        of_true = hubplugin.fit(setting.targets, bank).offsets(setting.targets)
        by_it = replace(test, rankings={name: exact(test.queries, setting.targets, of_true)})
        said = " ".join(str(each.message) for each in caught if re.search(r"recall@10|R@1", str(each.message)))
        found[name] = {**both(index, by_it, name), "warned": said}
        if "brings it back" in said:
            wider = re.findall(r"(\w+)=(\d+)", said[said.index("tune(index") :])
            hubplugin_faiss.tune(index, **{setting: int(value) for setting, value in wider})
            found[name]["as said"] = both(index, by_it, name)
    return found


def table_of_applied(rows: list[dict], size: int) -> str:
    """Of each type and metric: in how many settings `apply` wrote, warned and refused, and what changed by it."""
    of_them = [row for row in rows if row["size"] == size and row["table"] == "applied"]
    head, lines = ["type", "metric"], []
    for name in ("queries", "answers"):
        head += [f"{name}: written, warned, refused", "change of R@1, worst", "of recall, worst", "as said, worst"]
    for key in dict.fromkeys((row["type"], row["metric"]) for row in of_them):
        found, line = [row["found"] for row in of_them if (row["type"], row["metric"]) == key], [f"`{key[0]}`", key[1]]
        for name in ("queries", "answers"):
            written = [each for each in found if "refused" not in each[name]]
            warned = sum(bool(each[name]["warned"]) for each in written)
            line += [f"{len(written)}, {warned}, {len(found) - len(written)}"]
            for what, digits in (("R@1", 1), ("recall", 3)):
                changes = [each[name][what] - each["raw"][what] for each in written]
                line += [f"{np.mean(changes):+.{digits}f}, {min(changes):+.{digits}f}" if changes else ""]
            wider = [each[name].get("as said", each[name])["recall"] - each["raw"]["recall"] for each in written]
            line += [f"{min(wider):+.3f}" if wider else ""]
        lines.append(line)
    return markdown(head, lines)


Case = tuple[str, str, str, faiss.Index, Setting, Asked]


def tried(kinds: list[str], words: list[str], size: int) -> Iterator[Case]:
    """Setting, type, metric, raw index, and what it is tried with."""
    for name, source, draw in settings(SHARED):
        if not source.is_dir() or (words and name not in words) or (size and name not in MINILM):
            continue
        setting = filled(name, draw(), size, SHARED)
        test = asked(setting, 400 if size else 1000)
        for kind in kinds:
            for metric in (faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2):
                if kind == "LSH" and metric == faiss.METRIC_INNER_PRODUCT:
                    continue  # which Faiss makes for L2 alone
                if kind.startswith(("OPQ", "PCA", "RQ")) and len(setting.targets) < setting.targets.shape[1]:
                    continue  # Faiss trains none on fewer vectors than dimensions; OPQ ends the process (1.15.1)
                by = "L2" if metric == faiss.METRIC_L2 else "IP"
                yield name, kind, by, built(kind, setting.targets, metric), setting, test


def measured(kinds: list[str], words: list[str], size: int, table: str) -> Iterator[dict[str, object]]:
    measure = {"found": types_of, "rules": rules_of, "applied": applied_of}[table]
    for name, kind, by, raw, setting, test in tried(kinds, words, size):
        found = measure(kind, raw, setting, test)
        print(name, by, kind, json.dumps(found), file=sys.stderr, flush=True)
        yield {"setting": name, "size": size, "type": kind, "metric": by, "table": table, "found": found}


def table(rows: list[dict], size: int, rules: bool) -> str:
    """Of each type and metric the mean over settings; of changes of R@1 also the worst. With `size` a row for each
    setting: they are few, and say different things."""
    of_them = [row for row in rows if row["size"] == size and row["table"] == ("rules" if rules else "found")]
    lines, columns = [], [name for name in of_them[0]["found"] if name != "raw"]
    by = (("setting",) if size else ()) + ("type", "metric")
    head = [*by, "raw recall", "raw R@1"]
    for name in columns:
        head += [f"{name}: recall", *([] if rules else ["(raw index)"]), "change of R@1" + ("" if size else ", worst")]
    for key in dict.fromkeys(tuple(row[each] for each in by) for row in of_them):
        found = [row["found"] for row in of_them if tuple(row[each] for each in by) == key]

        def mean(name: str, what: str, found: list = found) -> float:
            return float(np.mean([each[name][what] for each in found]))

        line = [*key[:-2], f"`{key[-2]}`", key[-1], f"{mean('raw', 'recall'):.3f}", f"{mean('raw', 'R@1'):.1f}"]
        for name in columns:
            changes = [each[name]["R@1"] - each["raw"]["R@1"] for each in found]
            line += [f"{mean(name, 'recall'):.3f}"]
            line += [] if rules else [f"{mean(name, 'raw against it'):.3f}"]
            line += [f"{np.mean(changes):+.1f}" + ("" if size else f", {min(changes):+.1f}")]
        lines.append(line)
    return markdown(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--settings", nargs="*", default=[])
    parser.add_argument("--size", type=int, default=0, help="Targets to fill up to. Default: none added.")
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("--applied", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    faiss.omp_set_num_threads(1)
    rows = json.loads(FILE.read_text()) if FILE.exists() else []
    kinds, name = given.types or TYPES.split(), "applied" if given.applied else "found"
    if given.rules:
        kinds, name = given.types or RULED.split(), "rules"
    of = ("setting", "size", "type", "metric", "table")
    for new in measured(kinds, given.settings, given.size, name):
        rows = [row for row in rows if any(row[each] != new[each] for each in of)] + [new]
        FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    text = table_of_applied(rows, given.size) if name == "applied" else table(rows, given.size, given.rules)
    print(text + f"\n{machine(1)}")
    if given.write:
        write_table(PAGE, name + (f" {given.size}" if given.size else ""), text)


if __name__ == "__main__":
    main()
