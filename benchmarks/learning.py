"""What a learned query map does to R@1, over the default without it: on what was asked, what was not, and clean pairs.

    python -m benchmarks.learning [--data FOLDER] [--only WORD ...] [--splits 4] [--write docs/learning.md]

Settings are those of benchmarks/bank_settings.py that know at least 200 answers. FOLDER holds coco500, code_search,
debian, tldr_ko and tldr_log; by default it is shared/data beside the checkout. Figures are changes in points, means of
all splits with their standard error:

default       over raw
map           over the default: fit(..., learn=True)
no margin     the same, where a strength must only be no worse than none in the folds
strength 1    the whole map, whatever the folds say
noisy clicks  the map of clicks of which a fifth is wrong, seen by position (of logs; offsets are the same)

Results are kept in benchmarks/results/learning.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import hubplugin
from benchmarks.bank_settings import Family, Setting, further, seventeen
from benchmarks.tables import RESULTS, SHARED, machine, markdown, write_table
from hubplugin import learning

FILE = RESULTS / "learning.json"

COLUMNS = ("default", "map", "no margin", "strength 1", "noisy clicks")
SIDES = {"asked": "asked", "not asked": "not asked", "": "clean"}
NO_MARGIN = {"ERRORS": 0.0, "ERRORS_APART": 0.0, "SMALLEST_GAIN": 0.0}
WHOLE = {"STRENGTHS": (0.0, 1.0), "ERRORS": -np.inf, "ERRORS_APART": -np.inf, "SMALLEST_GAIN": -np.inf}


def noisy(setting: Setting, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Clicks of people: rows of the bank, and of what they clicked. A fifth is wrong, on a place of the raw top 10 with
    the weight 1 / place; a right answer is clicked with the probability 1 / sqrt(place), and only where it is shown."""
    rng, places = np.random.default_rng(seed), 1 / np.arange(1, 11)
    assert setting.clicks is not None
    top = np.argsort(-(setting.bank @ setting.targets.T), axis=1)[:, :10]
    rows, clicked = [], []
    for row, (shown, answer) in enumerate(zip(top, setting.clicks, strict=True)):
        place = np.flatnonzero(shown == answer)
        if rng.random() < 0.2:
            rows, clicked = [*rows, row], [*clicked, rng.choice(shown, p=places / places.sum())]
        elif len(place) and rng.random() < (place[0] + 1) ** -0.5:
            rows, clicked = [*rows, row], [*clicked, answer]
    return np.array(rows), np.array(clicked)


def fitted(setting: Setting, bank: hubplugin.Bank, **rule: Any) -> hubplugin.OffsetModel:
    """The model of a fit that learns, by another rule for the strength where one is given."""
    with mock.patch.multiple(learning, **rule) if rule else warnings.catch_warnings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that pairs taught nothing
        return hubplugin.fit(setting.targets, bank, learn=True)


def measured(setting: Setting, seed: int) -> dict[str, dict[str, float]]:
    """R@1 in points by test and column, and the strength that was chosen."""
    if setting.clicks is None:
        bank = hubplugin.Bank(setting.bank, setting.target_bank, pairs=True)
    else:
        bank = hubplugin.Bank(setting.bank, setting.clicks)
    models = {"map": fitted(setting, bank), "no margin": fitted(setting, bank, **NO_MARGIN)}
    models["strength 1"] = fitted(setting, bank, **WHOLE)
    if setting.clicks is not None:
        rows, clicked = noisy(setting, seed)
        if len(rows) >= learning.FEWEST_PAIRS:
            models["noisy clicks"] = fitted(setting, hubplugin.Bank(setting.bank[rows], clicked))
    offsets, found = models["map"].offsets(setting.targets), {}
    for name, (queries, truth) in setting.tests.items():

        def right(asked: np.ndarray, offsets: np.ndarray | float, truth: np.ndarray = truth) -> float:
            return 100 * float(((asked @ setting.targets.T + offsets).argmax(axis=1) == truth).mean())

        found[name] = {"raw": right(queries, 0.0), "default": right(queries, offsets)}
        found[name] |= {column: right(model.queries(queries), offsets) for column, model in models.items()}
        strength = models["map"].query_map
        found[name]["strength"] = 0.0 if strength is None else strength.strength
    return found


def rows_of(family: Family, splits: int) -> Iterator[dict[str, Any]]:
    """A row for each test of a family: the R@1 of each split, by column."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in range(min(splits, family.splits)):
        for test, values in measured(family.draw(seed), seed).items():
            for column, value in values.items():
                found[test][column].append(value)
    for test, columns in found.items():
        yield {"setting": family.name, "side": SIDES[test], "found": dict(columns)}


def changes(row: dict[str, Any], column: str) -> np.ndarray:
    """By split: over raw of the default, over the default of all others; empty where it was not measured."""
    found = row["found"]
    beside = np.array(found["raw" if column == "default" else "default"])
    return np.array(found[column]) - beside if len(found.get(column, ())) == len(beside) else np.empty(0)


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        cells = []
        for column in COLUMNS:
            values = changes(row, column)
            cells.append(
                f"{values.mean():+.1f}±{values.std() / max(len(values) - 1, 1) ** 0.5:.1f}" if len(values) else ""
            )
        strengths = "/".join(f"{value:g}" for value in sorted(set(row["found"]["strength"])))
        lines.append([row["setting"], row["side"], f"{np.mean(row['found']['raw']):.1f}", *cells, strengths])
    return markdown(["setting", "tested on", "raw R@1", *COLUMNS, "strengths"], lines)


def summary(rows: list[dict[str, Any]]) -> str:
    """Mean and worst of the settings, by what was tested on."""
    lines = []
    for side in SIDES.values():
        own = [row for row in rows if row["side"] == side]
        means = [[v.mean() for row in own if len(v := changes(row, column))] for column in COLUMNS]
        cells = [f"{np.mean(values):+.2f} / {min(values):+.2f}" if values else "" for values in means]
        lines += [[f"{side}, {len(own)} settings", *cells]] if own else []
    return markdown(["tested on", *COLUMNS], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED, help="folder of the data sets")
    parser.add_argument("--only", nargs="*", default=[""], help="settings whose name holds one of these words")
    parser.add_argument("--splits", type=int, default=4, help="draws a setting")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in chain(seventeen(given.data), further(given.data)):
        if not family.source.is_dir() or not any(word in family.name for word in given.only):
            continue
        setting = family.draw(0)
        if len(setting.bank) < learning.FEWEST_PAIRS or (setting.clicks is None and setting.target_bank is None):
            continue
        rows += rows_of(family, given.splits)
        print(family.name, file=sys.stderr, flush=True)
    if given.only == [""]:
        FILE.write_text(json.dumps({"machine": machine(1), "rows": rows}) + "\n")
    print(table(rows), summary(rows), sep="\n")
    if given.write:
        write_table(given.write, "learning", summary(rows))


if __name__ == "__main__":
    main()
