"""What a learned query map does to R@1, over the default without it: on what was asked, what was not, and clean pairs.

    python -m benchmarks.learning [--data FOLDER] [--only WORD ...] [--splits 4] [--write docs/learning.md]

Settings are those of benchmarks/bank_settings.py that know at least 50 answers, and a log in which ten targets have
half of the clicks. FOLDER holds coco500, code_search, debian, icd, tldr_ko and tldr_log; by default it is shared/data
beside the checkout. Figures are changes in points, means of all splits with their standard error:

default        over raw
map            over the default: fit(..., learn=True)
map over raw   the same, over raw
noisy clicks   the map of clicks of which a fifth is wrong, seen by position (of logs), over the default of these clicks
judged         the same, where 100 right pairs that are not in the log choose (of logs)

The last column is of the first two splits. A trained adapter stands beside the map in benchmarks/remedies.py.

Results are kept in benchmarks/results/learning.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hubplugin
from benchmarks.bank_settings import Family, Setting, further, seventeen, wordings_log
from benchmarks.tables import RESULTS, SHARED, machine, markdown, write_table
from hubplugin import learning
from hubplugin.methods import METHODS

FILE = RESULTS / "learning.json"

COLUMNS = ("default", "map", "map over raw", "noisy clicks", "judged")
BESIDE = {"default": "raw", "map over raw": "raw", "noisy clicks": "noisy default"}
SIDES = {"asked": "asked", "not asked": "not asked", "": "clean"}
JUDGED, COMPARED = 100, 2


def ten_hot(rng: np.random.Generator, truth: np.ndarray) -> np.ndarray:
    """Of ten targets all wordings but two, and as many wordings of others, one each."""
    hot = rng.choice(np.flatnonzero(np.bincount(truth) >= 12), 10, replace=False)
    logged = np.zeros(len(truth), bool)
    for target in hot:
        logged[rng.permutation(np.flatnonzero(truth == target))[2:]] = True
    rows = rng.permutation(np.flatnonzero(~np.isin(truth, hot)))
    once = rows[np.unique(truth[rows], return_index=True)[1]]
    logged[rng.choice(once, logged.sum(), replace=False)] = True
    return logged


def families(data: Path) -> Iterator[Family]:
    tldr = data / "tldr_log"
    hot = Family(
        "commands, ten targets with half of it",
        "popular log",
        tldr,
        4,
        partial(wordings_log, tldr, ten_hot),
    )
    return chain(seventeen(data), further(data), [hot])


def draw_click(
    shown: np.ndarray, answer: int, wrong: float, rng: np.random.Generator
) -> int:
    """The target that somebody clicks among those shown, best first; -1 for none. With the probability `wrong` it is
    any of them, with the weight 1 / place; a right answer is clicked with the probability 1 / sqrt(place)."""
    place, weights = np.flatnonzero(shown == answer), 1 / np.arange(1, len(shown) + 1)
    if rng.random() < wrong:
        return int(rng.choice(shown, p=weights / weights.sum()))
    return answer if len(place) and rng.random() < (place[0] + 1) ** -0.5 else -1


def draw_noisy_log(setting: Setting, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Clicks of people on a raw search, a fifth of them wrong: rows of the bank, and of the targets they clicked."""
    rng = np.random.default_rng(seed)
    assert setting.clicks is not None
    top = np.argsort(-(setting.bank @ setting.targets.T), axis=1)[:, :10]
    clicks = np.array(
        [
            draw_click(shown, answer, 0.2, rng)
            for shown, answer in zip(top, setting.clicks, strict=True)
        ]
    )
    rows = np.flatnonzero(clicks >= 0)
    return rows, clicks[rows]


def fit_quietly(
    targets: np.ndarray, bank: Any, learn: bool = True, **parameters: Any
) -> hubplugin.OffsetModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that pairs taught nothing
        return hubplugin.fit(targets, bank, learn=learn, **parameters)


Ranker = Callable[[np.ndarray], np.ndarray]


def ranker(model: hubplugin.OffsetModel, targets: np.ndarray) -> Ranker:
    offsets = model.offsets(targets)
    return lambda queries: model.queries(queries) @ targets.T + offsets


def fit_all(
    setting: Setting, seed: int
) -> tuple[dict[str, Ranker], learning.LearnedMap]:
    """Rankers by column, and what was learned."""
    targets = setting.targets
    if setting.clicks is None:
        bank = hubplugin.Bank(
            setting.bank, setting.target_bank, pairs=np.arange(len(setting.bank))
        )
    else:
        bank = hubplugin.Bank(setting.bank, setting.clicks)
    prepared = bank.prepare("cosine", hubplugin.Compute()).against(targets)
    learned = learning.learn_query_map(METHODS["blend"](), learning.Teachers(prepared))
    ranks = {
        "raw": lambda queries: queries @ targets.T,
        "default": ranker(fit_quietly(targets, bank, learn=False), targets),
        "map": ranker(learned.model, targets),
    }
    if setting.clicks is not None:
        rows, clicks = draw_noisy_log(setting, seed)
        if len(rows) >= learning.FEWEST_PAIRS:
            log = hubplugin.Bank(setting.bank[rows], clicks)
            ranks["noisy default"] = ranker(
                fit_quietly(targets, log, learn=False), targets
            )
            ranks["noisy clicks"] = ranker(fit_quietly(targets, log), targets)
    return ranks, learned


def measure(setting: Setting, seed: int) -> dict[str, dict[str, float]]:
    """R@1 in percent by test and column; what was chosen; and the interval that was forecast for the change."""
    ranks, learned = fit_all(setting, seed)
    query_map = learned.model.query_map
    enough = min(len(queries) for queries, _ in setting.tests.values()) >= 2 * JUDGED
    judged = (
        fit_by_judged(setting, seed)
        if enough and "noisy clicks" in ranks and seed < COMPARED
        else {}
    )
    row = {}
    for name, (queries, truth) in setting.tests.items():

        def right(
            rank: Ranker, queries: np.ndarray = queries, truth: np.ndarray = truth
        ) -> float:
            return 100 * float((rank(queries).argmax(axis=1) == truth).mean())

        row[name] = {column: right(rank) for column, rank in ranks.items()}
        row[name]["map over raw"] = row[name]["map"]
        if name in judged:
            rank, rest = judged[name]
            row[name]["judged"] = right(rank, queries[rest], truth[rest])
            row[name]["judged default"] = right(
                ranks["noisy default"], queries[rest], truth[rest]
            )
        row[name]["strength"] = 0.0 if query_map is None else query_map.strength
        row[name]["whitened"] = float(query_map is not None and query_map.whitened)
        row[name]["share"] = learned.how.share
        side = learned.asked if name == "asked" else learned.other
        for end in ("low", "value", "high"):
            row[name][end] = (
                math.nan if side is None else 100 * getattr(side.change, end)
            )
    return row


def fit_by_judged(setting: Setting, seed: int) -> dict[str, tuple[Ranker, np.ndarray]]:
    """By test: the map of noisy clicks, whose strength a part of all test queries chose, and the rows of the others."""
    rows, clicks = draw_noisy_log(setting, seed)
    rng, parts, rest = np.random.default_rng(seed), [], {}
    for name, (queries, _) in setting.tests.items():
        order = rng.permutation(len(queries))
        parts.append((name, order[: JUDGED // len(setting.tests)]))
        rest[name] = order[JUDGED // len(setting.tests) :]
    judged = hubplugin.Bank(
        np.concatenate([setting.tests[name][0][part] for name, part in parts]),
        np.concatenate([setting.tests[name][1][part] for name, part in parts]),
    )
    model = fit_quietly(
        setting.targets, hubplugin.Bank(setting.bank[rows], clicks), judged=judged
    )
    return {name: (ranker(model, setting.targets), rest[name]) for name in rest}


def measure_family(family: Family, splits: int) -> Iterator[dict[str, Any]]:
    """A row for each test of a family: the R@1 of each split, by column."""
    tests: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in range(min(splits, family.splits)):
        for test, values in measure(family.draw(seed), seed).items():
            for column, value in values.items():
                tests[test][column].append(value)
    for test, columns in tests.items():
        yield {"setting": family.name, "side": SIDES[test], "values": dict(columns)}


def changes(row: dict[str, Any], column: str) -> np.ndarray:
    """By split, over what the column is compared with; empty where it was not measured."""
    beside = "judged default" if column == "judged" else BESIDE.get(column, "default")
    values = np.array(row["values"].get(column, ()))
    return values - np.array(row["values"].get(beside, ()))[: len(values)]


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        cells = []
        for column in COLUMNS:
            values = changes(row, column)
            cells.append(
                f"{values.mean():+.1f}±{values.std() / max(len(values) - 1, 1) ** 0.5:.1f}"
                if len(values)
                else ""
            )
        choices = zip(
            *(row["values"][name] for name in ("strength", "whitened", "share")),
            strict=True,
        )
        names = {
            f"{s:g}{' w' if white else ''}{'' if share == 1 else f' x{share:g}'}"
            for s, white, share in choices
        }
        strengths = "/".join(sorted(names))
        lines.append(
            [
                row["setting"],
                row["side"],
                f"{np.mean(row['values']['raw']):.1f}",
                *cells,
                strengths,
            ]
        )
    return markdown(
        [
            "setting",
            "tested on",
            "raw R@1",
            *COLUMNS,
            "strengths, w: whitened, x: offsets",
        ],
        lines,
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """Mean and worst of the settings, by what was tested on."""
    lines = []
    for side in ("", *SIDES.values()):
        part = [row for row in rows if side in ("", row["side"])]
        means = [
            [v.mean() for row in part if len(v := changes(row, column))]
            for column in COLUMNS
        ]
        cells = [
            f"{np.mean(values):+.2f} / {min(values):+.2f}" if values else ""
            for values in means
        ]
        lines += [[f"{side or 'all'}, {len(part)} settings", *cells]] if part else []
    return markdown(["tested on", *COLUMNS], lines)


def forecasts(rows: list[dict[str, Any]]) -> str:
    """How often the change lies in the 95 % interval that held-out pairs alone forecast."""
    parts = [
        np.array(
            [row["values"][name] for name in ("low", "value", "high", "map", "default")]
        )
        for row in rows
    ]
    low, value, high, mapped, default = np.concatenate(parts, axis=1)
    change, is_forecast = mapped - default, ~np.isnan(low)
    inside, bias = (
        ((low <= change) & (change <= high))[is_forecast].mean(),
        (value - change)[is_forecast].mean(),
    )
    count = is_forecast.sum()
    return f"forecasts: {count} tests, {inside:.0%} inside their 95 % interval, too bright by {bias:.2f} points"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=SHARED, help="folder of the data sets"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=[""],
        help="settings whose name holds one of these words",
    )
    parser.add_argument("--splits", type=int, default=4, help="draws a setting")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in families(args.data):
        if not family.source.is_dir() or not any(
            word in family.name for word in args.only
        ):
            continue
        setting = family.draw(0)
        if len(setting.bank) < learning.FEWEST_PAIRS or (
            setting.clicks is None and setting.target_bank is None
        ):
            continue
        rows += measure_family(family, args.splits)
        print(family.name, file=sys.stderr, flush=True)
    if args.only == [""]:
        FILE.write_text(json.dumps({"machine": machine(1), "rows": rows}) + "\n")
    print(table(rows), summary(rows), forecasts(rows), sep="\n")
    if args.write:
        write_table(args.write, "learning", summary(rows))


if __name__ == "__main__":
    main()
