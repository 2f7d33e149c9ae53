"""Which rule should choose strength and whitening of a query map: what each that was tried gains over the default.

    python -m benchmarks.learning_rules [--data FOLDER] [--only WORD ...] [--splits 4]

Settings and noisy clicks are those of benchmarks/learning.py. Each cell is the change of R@1 over the offsets alone in
points, mean and worst of the settings. Every map is fitted once, and the rules choose among them.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import hubplugin
from benchmarks.bank_settings import Setting
from benchmarks.learning import SIDES, families, noisy, ranker
from benchmarks.tables import SHARED, markdown
from hubplugin import learning
from hubplugin.bank import own_share
from hubplugin.compute import Compute
from hubplugin.methods.blend import Blend
from hubplugin.vectors import sampled

STRENGTHS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)

RULES = {
    "behind by no error": (0.0, 2.0, 4),
    "by half of one": (0.5, 2.0, 4),
    "by one": (1.0, 2.0, 4),
    "by one and a half": (1.5, 2.0, 4),
    "by two": (2.0, 2.0, 4),
    "by three": (3.0, 2.0, 4),
    "by two, strength up to 1.5": (2.0, 2.0, 5),
    "by none, strength up to 2": (0.0, 2.0, 6),
    "by none; across modalities ahead by one": (0.0, 1.0, 4),
}
"""By how many standard errors a side may be behind, by how many it must be ahead across modalities, and how many of
`STRENGTHS` are tried."""

COLUMNS = ["asked", "not asked", "clean", "noisy asked", "noisy not asked"]


@dataclass(frozen=True)
class Look:
    """One draw of a setting: the margins of the folds by side, [bases, strengths, probes], and for each test which
    queries are right, [bases, strengths, queries]."""

    apart: bool
    tau: float
    sides: list[np.ndarray]
    right: dict[str, np.ndarray]


def look(setting: Setting, bank: hubplugin.Bank) -> Look:
    given, rng = bank.prepare("cosine", Compute()).against(setting.targets), np.random.default_rng(0)
    pairs, gallery = learning.KnownPairs.of(given), given.require_targets("learn")
    some = sampled(gallery, len(given.query_bank), given.metric, rng)
    apart = own_share(given.query_bank, some, given.compute, rng) >= learning.APART
    firsts = (None, learning.whitening(given.query_bank, gallery, given.metric))
    bases = [learning.base_of(Blend(), given, first) for first in firsts]
    right: dict[str, list[list[np.ndarray]]] = {name: [] for name in setting.tests}
    for base in bases:
        for found in right.values():
            found.append([])
        for strength in STRENGTHS:
            how = replace(base.how, strength=strength)
            query_map = how.query_map(pairs.queries, pairs.own, pairs.targets)
            model = base.model
            if query_map is not None:
                mapped = replace(given, query_bank=query_map.of_bank(given.query_bank))
                model = replace(how, method=Blend().resolved(mapped)).fit(given, query_map, None)
            rank = ranker(model, setting.targets)
            for name, (queries, truth) in setting.tests.items():
                right[name][-1].append(rank(queries).argmax(axis=1) == truth)
    with mock.patch.object(learning, "STRENGTHS", STRENGTHS):
        folds = learning.sides_of(pairs, pairs).values()
        sides = [np.stack([learning.margins_of(pairs, pairs, each, base, given) for base in bases]) for each in folds]
    return Look(apart, bases[0].how.tau, sides, {name: np.array(found) for name, found in right.items()})


def chosen(seen: Look, behind: float, ahead: float, count: int) -> tuple[int, int]:
    """The base and the strength by a rule, see `RULES`."""
    with mock.patch.object(learning, "STRENGTHS", STRENGTHS[:count]):
        return learning.chosen([each[:, :count] for each in seen.sides], seen.tau, ahead if seen.apart else -behind)


def looks(data: Path, only: list[str], splits: int) -> Iterator[tuple[str, str, Look]]:
    """The name of each setting, "" or "noisy ", and a draw of it."""
    for family in families(data):
        if not family.source.is_dir() or not any(word in family.name for word in only):
            continue
        for seed in range(min(splits, family.splits)):
            setting = family.draw(seed)
            if setting.clicks is None and setting.target_bank is None:
                break
            if len(setting.bank) < learning.FEWEST_PAIRS:
                break
            if setting.clicks is None:
                yield family.name, "", look(setting, hubplugin.Bank(setting.bank, setting.target_bank, pairs=True))
                continue
            yield family.name, "", look(setting, hubplugin.Bank(setting.bank, setting.clicks))
            rows, clicks = noisy(setting, seed)
            if len(rows) >= learning.FEWEST_PAIRS:
                yield family.name, "noisy ", look(setting, hubplugin.Bank(setting.bank[rows], clicks))
        print(family.name, file=sys.stderr, flush=True)


def table(seen: Iterable[tuple[str, str, Look]]) -> str:
    gains: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, kind, each in seen:
        for rule, given in RULES.items():
            base, strength = chosen(each, *given)
            for test, right in each.right.items():
                gain = 100 * float(right[base, strength].mean() - right[0, 0].mean())
                gains[rule, kind + SIDES[test]][name].append(gain)
    columns = sorted({column for _, column in gains}, key=COLUMNS.index)
    lines = []
    for rule in RULES:
        means = [[float(np.mean(values)) for values in gains[rule, column].values()] for column in columns]
        lines.append([rule, *(f"{np.mean(each):+.2f} / {min(each):+.2f}" for each in means)])
    return markdown(["rule", *columns], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED, help="folder of the data sets")
    parser.add_argument("--only", nargs="*", default=[""], help="settings whose name holds one of these words")
    parser.add_argument("--splits", type=int, default=4, help="draws a setting")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(table(looks(given.data, given.only, given.splits)))


if __name__ == "__main__":
    main()
