"""What should one try first where the same targets come back? Remedies that people name, side by side on real settings.

    python -m benchmarks.remedies [--splits 2] [--only WORD ...] [--write]
    python -m benchmarks.remedies --keywords [--write]     # with bm25s; the texts are those of Python 3.11.7

Settings are those of benchmarks/bank_settings.py, as far as their data are there. Of each remedy: the mean change of
R@1 over the raw search in points, with the half width of a 95 % interval over tests, and the worst test, by side (of a
log what was asked before, and what was not; clean banks); the mean change of R@10;
and what it needs. `--write` puts the table into docs/measurements/methods.md, or benchmarks/results/keywords.md.
Most of these settings are vectors alone. Keyword search (BM25) and hybrids of it are tried on the one whose texts can
be had, examples/data: reciprocal rank fusion of the first 100 of both, 1 / (k + place) with k = 60, and with k = 2 as
Qdrant has it.

- centred: query less the mean query of the bank, target less the mean target.
- centred, unit length: likewise, and brought to unit length.
- all but the top: centred, less the d / 100 main directions of the gallery, at unit length (Mu and Viswanath 2018).
- whitened: centred, times the inverse root of the gallery's covariance (shrunk by a tenth to its mean), at unit length.
- gallery density: less half the mean similarity of a target to its 16 nearest other targets, no query asked for.
- linear adapter: a matrix for queries from pairs, by gradient steps on InfoNCE (tau 0.05, Adam 1e-3, batches of 128, 20
  rounds), from the identity.
- default, map: `hubplugin.fit` and `fit(..., learn=True)`; "centred, then default" and "adapter, then default" fit on
  vectors so changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import hubplugin
from benchmarks.bank_settings import Setting, further, seventeen
from benchmarks.tables import ROOT, SHARED, machine, markdown, write_table

Scores = Callable[[np.ndarray], np.ndarray]
"""Queries [q, d] to scores [q, n]."""

NEEDS = {
    "centred": "queries",
    "centred, unit length": "queries; rewriting all vectors",
    "all but the top": "queries; rewriting all vectors",
    "whitened": "queries; rewriting all vectors",
    "gallery density": "nothing",
    "linear adapter": "pairs; every query is mapped",
    "default": "queries",
    "map": "pairs; every query is mapped",
    "centred, then default": "queries; rewriting all vectors",
    "adapter, then default": "pairs; every query is mapped",
}
SIDES = {"": "clean", "asked": "asked for", "not asked": "not asked for"}

Gain = tuple[str, np.ndarray]
"""The side of a test, and the change of R@1 and R@10."""


def unit(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(
        vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9),
        np.float32,
    )


def spread(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variances [d] and directions [d, d] (columns) of the gallery, the largest last."""
    return np.linalg.eigh(np.cov(targets.T.astype(np.float64)))


def moved(
    setting: Setting, step: Callable[[np.ndarray], np.ndarray]
) -> tuple[Setting, Scores]:
    """The bank and the gallery, each less its mean and after `step`; and the scores of such vectors."""
    of_queries, of_targets = setting.bank.mean(axis=0), setting.targets.mean(axis=0)
    targets = step(setting.targets - of_targets)
    changed = Setting(step(setting.bank - of_queries), targets, None, {})
    return changed, lambda queries: step(queries - of_queries) @ targets.T


def all_but_the_top(setting: Setting) -> Scores:
    top = spread(setting.targets)[1][:, -max(setting.targets.shape[1] // 100, 1) :]
    return moved(setting, lambda vectors: unit(vectors - vectors @ top @ top.T))[1]


def whitened(setting: Setting) -> Scores:
    variances, directions = spread(setting.targets)
    root = directions / np.sqrt(0.9 * variances + 0.1 * variances.mean()) @ directions.T
    return moved(setting, lambda vectors: unit(vectors @ root))[1]


def density(setting: Setting) -> np.ndarray:
    near = -np.sort(-(setting.targets @ setting.targets.T), axis=1)[:, 1:17]
    return np.asarray(-0.5 * near.mean(axis=1))


def answers(setting: Setting) -> np.ndarray | None:
    """The targets [m, d] that answer the bank, None where they are not known."""
    return (
        setting.target_bank
        if setting.clicks is None
        else setting.targets[setting.clicks]
    )


def adapter(queries: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The matrix [d, d] of the linear adapter."""
    torch.manual_seed(0)
    asked, right = torch.from_numpy(queries), torch.from_numpy(targets)
    matrix = torch.eye(asked.shape[1], requires_grad=True)
    steps = torch.optim.Adam([matrix], lr=1e-3)
    for _ in range(20):
        for rows in torch.randperm(len(asked)).split(128):
            scores = (
                torch.nn.functional.normalize(asked[rows] @ matrix)
                @ right[rows].T
                / 0.05
            )
            loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(rows)))
            steps.zero_grad()
            loss.backward()
            steps.step()
    return matrix.detach().numpy()


def remedies(setting: Setting) -> dict[str, Scores]:
    targets, right = setting.targets, answers(setting)

    def plain(queries: np.ndarray) -> np.ndarray:
        return np.asarray(queries @ targets.T)

    def added(offsets: np.ndarray, scores: Scores = plain) -> Scores:
        return lambda queries: scores(queries) + offsets

    def by_default(changed: Setting) -> np.ndarray:
        return hubplugin.fit(
            changed.targets, hubplugin.Bank(changed.bank, changed.target_bank)
        ).offsets(changed.targets)

    default = by_default(setting)
    normal, scores_of_normal = moved(setting, unit)
    found = {
        "raw": plain,
        "centred": moved(setting, lambda vectors: vectors)[1],
        "centred, unit length": scores_of_normal,
        "all but the top": all_but_the_top(setting),
        "whitened": whitened(setting),
        "gallery density": added(density(setting)),
        "default": added(default),
        "centred, then default": added(by_default(normal), scores_of_normal),
    }
    if right is not None and len(right) >= 200:
        matrix = adapter(setting.bank, right)
        bank = hubplugin.Bank(
            setting.bank, right if setting.clicks is None else setting.clicks
        )
        learned = hubplugin.fit(targets, bank, learn=True)
        mapped = Setting(unit(setting.bank @ matrix), targets, setting.target_bank, {})
        found["linear adapter"] = lambda queries: plain(unit(queries @ matrix))
        found["map"] = added(
            learned.offsets(targets), lambda queries: plain(learned.queries(queries))
        )
        found["adapter, then default"] = added(
            by_default(mapped), found["linear adapter"]
        )
    return found


def places(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """R@1 and R@10 in points."""
    above = (scores > np.take_along_axis(scores, truth[:, None], axis=1)).sum(axis=1)
    return np.array([100 * float((above < k).mean()) for k in (1, 10)])


def table(gains: dict[str, list[Gain]]) -> str:
    lines = []
    for name, found in sorted(
        gains.items(), key=lambda item: -np.mean([change[0] for _, change in item[1]])
    ):
        cells = []
        for side in SIDES:
            own = np.array([change[0] for test, change in found if test == side])
            width = 1.96 * own.std(ddof=1) / len(own) ** 0.5 if len(own) > 1 else np.nan
            cells.append(
                f"{own.mean():+.1f} ± {width:.1f}, {own.min():+.1f} ({len(own)})"
                if len(own)
                else ""
            )
        lines.append(
            [
                name,
                *cells,
                f"{np.mean([change[1] for _, change in found]):+.1f}",
                NEEDS[name],
            ]
        )
    return markdown(
        [
            "remedy",
            *(f"R@1, {side}: mean, worst" for side in SIDES.values()),
            "R@10",
            "needs",
        ],
        lines,
    )


FUSED = 100


def fused(rankings: list[np.ndarray], count: int, k: int) -> np.ndarray:
    """Scores [q, count] by reciprocal rank fusion of `rankings`, rows of targets [q, FUSED] each, best first."""
    scores = np.zeros((len(rankings[0]), count))
    for ranking in rankings:
        np.put_along_axis(
            scores,
            ranking,
            np.take_along_axis(scores, ranking, axis=1)
            + 1 / (k + np.arange(1, ranking.shape[1] + 1)),
            axis=1,
        )
    return scores


def texts_of_the_example_set() -> tuple[list[str], list[str]]:
    """Of test queries and test targets. Raises SystemExit where this Python's library is not that of the set."""
    sys.path.insert(0, str(ROOT / "examples"))
    import make_data

    library = Path(sysconfig.get_path("stdlib"))
    test, bank = make_data.split(
        make_data.drop_duplicates(make_data.read_pairs(make_data.source_files(library)))
    )
    made = hashlib.sha256(make_data.json_bytes([test, bank])).hexdigest()
    meta = json.loads((make_data.DATA / "meta.json").read_text())
    if made != meta["sha256_of_texts"]:
        raise SystemExit(
            f"the texts are those of Python {meta['python']}; run this with it"
        )
    return [pair.query for pair in test], [pair.target for pair in test]


def keywords() -> str:
    """BM25, and hybrids of it with raw, corrected and mapped searches, on the example set."""
    import bm25s

    asked, texts = texts_of_the_example_set()
    names = ("bank_queries", "bank_targets", "test_queries", "test_targets")
    bank, right, queries, targets = (
        unit(np.load(ROOT / "examples/data" / f"{name}.npy")) for name in names
    )
    truth, count = np.arange(len(queries)), len(targets)

    def by_keywords(query: str | list[str], text: str | list[str]) -> np.ndarray:
        index = bm25s.BM25()
        index.index(
            bm25s.tokenize(text, stopwords=None, show_progress=False),
            show_progress=False,
        )
        tokens = bm25s.tokenize(query, stopwords=None, show_progress=False)
        found: np.ndarray = index.retrieve(
            tokens, k=FUSED, show_progress=False
        ).documents
        return found

    def apart(each: list[str]) -> list[str]:  # snake_case is several words
        return [text.replace("_", " ") for text in each]

    default = hubplugin.fit(targets, hubplugin.Bank(bank, right))
    learned = hubplugin.fit(targets, hubplugin.Bank(bank, right), learn=True)
    dense = {
        "raw": queries @ targets.T,
        "default": queries @ targets.T + default.offsets(targets),
        "map": learned.queries(queries) @ targets.T + learned.offsets(targets),
    }
    words = by_keywords(apart(asked), apart(texts))
    rows = {"BM25": fused([words], count, 60), **dense}
    for name, scores in dense.items():
        nearest = np.argsort(-scores, axis=1)[:, :FUSED]
        for k in (60, 2):
            rows[f"BM25 with {name}, k={k}"] = fused([words, nearest], count, k)
    lines, before = [], places(dense["raw"], truth)
    for name, scores in rows.items():
        found = places(scores, truth)
        lines.append(
            [name, f"{found[0]:.1f}", f"{found[0] - before[0]:+.1f}", f"{found[1]:.1f}"]
        )
    return markdown(["search", "R@1", "over raw", "R@10"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--keywords",
        action="store_true",
        help="keyword search and hybrids, on the example set",
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # that pairs taught nothing
    if given.keywords:
        text = keywords()
        print(text + f"\n{machine(1)}")
        if given.write:
            write_table(
                ROOT / "benchmarks" / "results" / "keywords.md", "keywords", text
            )
        return
    gains: dict[str, list[Gain]] = defaultdict(list)
    for family in [*seventeen(SHARED), *further(SHARED)]:
        if not family.source.is_dir() or not all(
            word in family.name for word in given.only
        ):
            continue
        found: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
        for seed in range(min(given.splits, family.splits)):
            setting = family.draw(seed)
            for name, scores in remedies(setting).items():
                for test, (queries, truth) in setting.tests.items():
                    found[test, name].append(places(scores(queries), truth))
        for (test, name), values in found.items():
            if name != "raw":
                change = np.mean(values, axis=0) - np.mean(found[test, "raw"], axis=0)
                gains[name].append((test, change))
                print(
                    f"{family.name} {test}: {name} {change.round(1)}",
                    file=sys.stderr,
                    flush=True,
                )
    text = table(gains)
    print(text + f"\n{machine(1)}")
    if given.write:
        write_table(ROOT / "docs" / "measurements" / "methods.md", "remedies", text)


if __name__ == "__main__":
    main()
