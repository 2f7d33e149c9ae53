"""How often the guard is wrong, in both directions; what it says to banks that are none; and how far offsets reach.

    python -m benchmarks.guard [--splits 3] [--first 5] [--only WORD ...] [--write benchmarks/results/guard.md]
    python -m benchmarks.guard --refusals [--write benchmarks/results/refusals.md]
    python -m benchmarks.guard --reach

Galleries and banks are drawn anew in each split (`benchmarks.banks`); without the shared data, from `examples/data`
alone. The guard sees bank and gallery. The truth is the change of R@1 on test queries that it never saw, in the mean
of the splits. Harm is a fall of more than 0.5 points, a gain a rise of more than 2. Where a log has other wordings of
what it asked for and queries for what it did not, the worse of the two counts. benchmarks/results/guard.json keeps a
row a bank; --only replaces those of some sources.

--refusals: what `apply` says to banks that are none, and R@1 with force. The gallery is examples/data in a Faiss file.
Another catalogue is the queries of `debian`, embedded by the same model, where the shared data are there.

--reach sets the limit of `hubplugin.guard`: of each method and kind of bank the mean share of the gallery that
is nearer to a bank query than its corrected nearest target. The last column is the same bank as if another model had
embedded it: turned, with its mean elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

import hubplugin
from benchmarks.bank_settings import files, further, seventeen
from benchmarks.banks import Case, cases
from benchmarks.tables import EXAMPLES, RESULTS, SHARED, machine, markdown, write_table
from hubplugin.bank import Bank, PreparedBank
from hubplugin.compute import Compute
from hubplugin.guard import displacement, judge_by, profile_of
from hubplugin.methods import METHODS
from hubplugin.metric import Metric
from hubplugin.vectors import as_vectors

FILE = RESULTS / "guard.json"
HARM, GAIN = -0.5, 2.0
DEFAULT = METHODS["blend"]()
REACHING = [("blend", {}), ("dbsn", {"tau": 0.05}), ("is", {"tau": 0.02}), ("nnn", {})]


def change(case: Case, given: PreparedBank) -> float:
    """Of R@1 in points, fitted on the whole bank; of several tests the worst."""
    offsets = DEFAULT.fit(given).offsets(given.require_targets())
    changes = []
    for queries, rows in case.tests.values():
        scores = queries @ case.gallery.T
        right = [
            float((part.argmax(axis=1) == rows).mean())
            for part in (scores + offsets, scores)
        ]
        changes.append(100 * (right[0] - right[1]))
    return min(changes)


def judged(case: Case, split: int) -> Iterator[dict[str, Any]]:
    """One row by the queries alone, and one with their answers where these are known."""
    bases = {"queries alone": None} | (
        {} if case.target_bank is None else {"pairs": case.target_bank}
    )
    for basis, second in bases.items():
        bank = Bank(case.bank, second)
        given = bank.prepare(Metric.COSINE, Compute("cpu", "2GiB")).against(
            as_vectors(case.gallery, "targets")
        )
        seen = profile_of(given, split)
        if given.pairs is None:  # the default is judged by nothing else then
            objections = (seen.objection,) if seen.objection else ()
        else:
            objections = judge_by(given, DEFAULT, split, seen).objections
        row = {
            "basis": basis,
            "source": case.source,
            "kind": case.kind,
            "size": case.size,
            "split": split,
        }
        row |= {
            "change": round(change(case, given), 2),
            "objections": "; ".join(objections),
        }
        yield row | {"doubt": bool(seen.doubt)}


def table(rows: list[dict[str, Any]]) -> str:
    """The splits of one case count together: the case is the how many-th of its source and kind."""
    families: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        families[row["basis"], row["kind"], row["source"], row["case"]].append(row)
    groups: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for (basis, kind, *_), part in families.items():
        mean, refused, noted = (
            float(np.mean([of(row) for row in part]))
            for of in (_change, _refused, _noted)
        )
        groups[basis, kind].append((mean, refused, noted))
    lines = []
    for (basis, kind), found in groups.items():
        harm, gain = (
            [x for x in found if x[0] < HARM],
            [x for x in found if x[0] > GAIN],
        )
        through, refused_ = (
            [x[0] for x in found if x[1] < 0.5],
            [x[0] for x in found if x[1] >= 0.5],
        )
        lines.append(
            [
                *(
                    basis,
                    kind,
                    str(len(found)),
                    str(len(refused_)),
                    str(sum(x[1] < 0.5 <= x[2] for x in found)),
                ),
                f"{sum(x[1] < 0.5 for x in harm)} of {len(harm)}",
                f"{sum(x[1] >= 0.5 for x in gain)} of {len(gain)}",
                *(
                    _mean(through),
                    f"{min(through):+.1f}" if through else "",
                    _mean(refused_),
                ),
            ]
        )
    head = [
        "the guard sees",
        "bank",
        "cases",
        "refused",
        "passed with a doubt",
        "harm, let through",
        "gain, refused",
    ]
    return markdown(
        [*head, "mean change if let through", "worst", "mean change if refused"], lines
    )


def _change(row: dict[str, Any]) -> float:
    return float(row["change"])


def _refused(row: dict[str, Any]) -> float:
    return float(bool(row["objections"]))


def _noted(row: dict[str, Any]) -> float:
    return float(row["doubt"])


def _mean(changes: list[float]) -> str:
    return f"{np.mean(changes):+.1f} ({len(changes)})" if changes else ""


def measured(splits: range, only: list[str]) -> str:
    kept = json.loads(FILE.read_text())["rows"] if FILE.exists() else []
    rows: list[dict[str, Any]] = []
    for split in splits:
        seen: Counter[tuple[str, str]] = Counter()
        for case in cases(split):
            seen[case.source, case.kind] += 1
            for row in judged(case, split) if not only or case.source in only else ():
                rows.append({"case": seen[case.source, case.kind], **row})
                print(*rows[-1].values(), sep="\t", file=sys.stderr, flush=True)
    anew = {row["source"] for row in rows}
    rows += [row for row in kept if row["source"] not in anew]
    FILE.write_text(json.dumps({"machine": machine(1), "rows": rows}) + "\n")
    return table(rows)


def no_banks(
    data: Path,
) -> Iterator[tuple[str, Any, np.ndarray | None, dict[str, Any]]]:
    """What is given as the bank, as the target bank, and how it is applied."""
    queries, documents, gallery = files(
        EXAMPLES, "bank_queries", "bank_targets", "test_targets"
    )
    rng = np.random.default_rng(0)
    yield "queries for other functions", queries, None, {}
    yield "the gallery itself", gallery, None, {}
    yield "other documents", documents, None, {}
    yield "300 other documents", documents[:300], None, {}
    yield (
        "half queries, half documents",
        np.concatenate([queries[:1250], documents[1250:]]),
        None,
        {},
    )
    yield (
        "pairs, swapped: documents as queries, queries as target bank",
        documents,
        queries,
        {},
    )
    yield "vectors of another model", rng.normal(size=(500, 512)), None, {}
    yield "... of the same length", turned(queries), None, {}
    yield (
        "... 300 of them, about the same mean",
        turned(queries[:300] - queries.mean(axis=0)),
        None,
        {},
    )
    yield "texts", ["how to open a file", "parse a date"], None, {}
    yield (
        "one query, 400 times with noise",
        queries[0] + 0.02 * rng.normal(size=(400, 384)),
        None,
        {},
    )
    if (data / "debian").is_dir():
        yield (
            "queries of another catalogue",
            files(data / "debian", "queries_a")[0],
            None,
            {},
        )
    yield "5 queries", queries[:5], None, {}
    yield '100 queries, `method="dbsn"`', queries[:100], None, {"method": "dbsn"}


def turned(vectors: np.ndarray) -> np.ndarray:
    """A rotation with its mean elsewhere is what another model's space is to this one's."""
    rng, d = np.random.default_rng(0), vectors.shape[1]
    return np.asarray(
        vectors @ np.linalg.qr(rng.normal(size=(d, d)))[0]
        + 2 * rng.normal(size=d) / d**0.5
    )


def refusals(data: Path) -> str:
    """What `apply` says, and R@1 with force where that can be used at all."""
    lines = []
    gallery, asked = files(EXAMPLES, "test_targets", "test_queries")
    for name, given, second, options in no_banks(data):
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/photos.faiss"
            index = faiss.IndexFlatIP(gallery.shape[1])
            index.add(gallery)
            faiss.write_index(index, file)
            store = hubplugin.open_store(f"faiss:{file}")
            try:
                trial = hubplugin.apply(store, Bank(given, second), **options).trial
                doubts = (
                    [note for note in trial.notes if "which only answers show" in note]
                    if trial
                    else []
                )
                said = "; ".join(["passed", *(f"`note: {doubt}`" for doubt in doubts)])
            except hubplugin.CorrectionRefused as error:
                said = f"`CorrectionRefused: {str(error).partition('; nothing was changed')[0]}` ..."
                hubplugin.apply(store, Bank(given, second), force=True, **options)
            except hubplugin.InputError as error:
                lines.append(
                    [name, f"`InputError: {error}`".replace(file, "photos.faiss"), ""]
                )
                continue
            found = np.array(store.search(asked, 1).ids)[:, 0]
            lines.append(
                [
                    name,
                    said,
                    f"{100 * float((found == np.arange(len(asked))).mean()):.1f}",
                ]
            )
    return markdown(["given as the bank", "what is printed", "R@1 if applied"], lines)


def reach(data: Path) -> str:
    lines = []
    for family in [*seventeen(data), *further(data)]:
        if not family.source.is_dir():
            continue
        setting, cells = family.draw(0), []
        tried = [(setting.bank, name, parameters) for name, parameters in REACHING]
        for bank, name, parameters in [
            *tried,
            (turned(setting.bank), "dbsn", {"tau": 0.05}),
        ]:
            model = hubplugin.fit(setting.targets, bank, name, **parameters)
            given = Bank(bank).prepare(Metric.COSINE, Compute())
            reach = displacement(model, given.against(setting.targets))
            cells.append(f"{reach:.4f}")
        lines.append([family.name, str(len(setting.targets)), *cells])
        print(lines[-1], file=sys.stderr, flush=True)
    head = [
        "bank",
        "targets",
        *(" ".join([name, *map(str, given.values())]) for name, given in REACHING),
    ]
    return markdown([*head, "dbsn 0.05, another model"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument(
        "--first", type=int, default=5, help="first seed; the limits were set on others"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="sources of `benchmarks.banks` by name"
    )
    parser.add_argument("--refusals", action="store_true")
    parser.add_argument("--reach", action="store_true")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.reach:
        print(reach(SHARED))
        return
    name = "refusals" if given.refusals else "guard"
    text = (
        refusals(SHARED)
        if given.refusals
        else measured(range(given.first, given.first + given.splits), given.only)
    )
    print(text)
    if given.write:
        write_table(given.write, name, text)


if __name__ == "__main__":
    main()
