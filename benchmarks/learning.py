"""What learning brings over the raw search, and which rule chooses best what is learned.

    python -m benchmarks.learning --figures FOLDER [--data FOLDER] [--only WORD ...]
                                  [--draws 2] [--forecasts 0] [--time]
                                  [--write docs/learning.md]

Settings are those of benchmarks/bank_settings.py that know at least 50 answers, and a
log in which ten targets have half of the clicks. By default --data is shared/data beside
the checkout: coco500, code_search, debian, icd, tldr_ko and tldr_log.

Every map is measured once for each draw and kept in --figures: how held-out pairs fared,
and the ranks of the test queries. Rules choose from these figures in seconds:

default   the offsets alone
learn     `hubplugin.learning.choose`
others    the same with other constants, or without some of the maps

Each kind of data judges the rule that was chosen on all others. Tables go into `--write`
and docs/measurements/learning.md, and are kept in benchmarks/results/learning.json.

--forecasts adds cheap draws of small settings, in which only the chosen map is fitted,
to see how often a change lies in the interval that was forecast. --time prints what a
fit to 5,000 pairs takes, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch

import hubplugin
from benchmarks.bank_settings import (
    Family,
    Setting,
    files,
    further,
    seventeen,
    wordings_log,
)
from benchmarks.tables import RESULTS, SHARED, machine, markdown, write_table
from hubplugin import learning
from hubplugin.bank import SEEN, PreparedBank, own_share
from hubplugin.errors import HubpluginError
from hubplugin.measures.significance import Figure
from hubplugin.methods.blend import Blend
from hubplugin.validation import Margins, cross_validate
from hubplugin.vectors import draw_sample

FILE = RESULTS / "learning.json"

SIDES = {"asked": "asked", "not asked": "not asked", "": "clean"}
"""What results call the tests of a setting."""

KINDS = {
    "coco": "captions and images",
    "Korean": "across languages",
    "code": "functions",
    "examples": "functions",
    "packages": "packages",
    "commands": "commands",
    "ICD": "ICD",
}
"""The kind of data by a word in the name of a setting."""

MEASURES = "R@1", "R@10", "nDCG@10"

SMALL = "of 100", "of 300", "of 400", "bank 200", "bank 400", "bank 500", "ten", "coco"
"""Words in the names of the settings for cheap forecasts."""

FURTHER_SEEDS = 100
"""The seed of the first cheap draw; all others have lower seeds."""

TIMED = 5_000
"""The number of pairs and of targets of the fit that is timed."""


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


def prepare(setting: Setting) -> PreparedBank:
    """Return the bank of a setting with its gallery."""
    if setting.clicks is None:
        bank = hubplugin.Bank(setting.bank, setting.target_bank)
    else:
        bank = hubplugin.Bank(setting.bank, setting.clicks)
    return bank.prepare("cosine", hubplugin.Compute()).against(setting.targets)


def rank(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the rank of each query's target: [q]."""
    own = scores[np.arange(len(truth)), truth]
    return (scores > own[:, None]).sum(axis=1) + 1


def measure(setting: Setting, bank: PreparedBank) -> dict[str, np.ndarray]:
    """Return the figures of all maps: margins and hits of each side, ranks of each test,
    [maps, queries] each, the temperature, and the share of neighbours from the own set."""
    teachers = learning.Teachers(bank)
    rows = teachers.find_teaching()
    bases = learning.list_bases(Blend(), teachers)
    rng = np.random.default_rng(0)
    sample = draw_sample(bank.require_targets(), SEEN, bank.metric, rng)
    share = own_share(bank.query_bank, sample, bank.compute, rng)
    figures = {"tau": np.array(bases[0].tau), "apart": np.array(share)}
    candidates = [base.try_variants for base in bases]
    for side, folds in learning.draw_sides(teachers, rows).items():
        tried = cross_validate(candidates, bank, folds, hits=0)
        assert tried.margins is not None
        assert tried.right is not None
        figures[f"margins {side}"] = tried.margins.astype(np.float16)
        figures[f"right {side}"] = tried.right.astype(np.float16)
    ranks = defaultdict[str, list[np.ndarray]](list)
    targets = setting.targets
    for base in bases:
        tried_maps = base.try_variants(bank, bank, rows)
        for fit, (_, query_map) in zip(base.variants, tried_maps, strict=True):
            if fit.share < 1:
                continue
            mapped = bank
            if query_map is not None:
                mapped = replace(bank, query_bank=query_map.of_bank(bank.query_bank))
            method = Blend().resolve(mapped)
            offsets = replace(fit, method=method).fit(bank, query_map).offsets(targets)
            for name, (queries, truth) in setting.tests.items():
                searched = queries if query_map is None else query_map(queries)
                scores = searched @ targets.T
                for part in learning.SHARES:
                    ranks[name].append(rank(scores + part * offsets, truth))
    for name, columns in ranks.items():
        figures[f"ranks {name}"] = np.array(columns, np.int32)
    return figures


def list_fits() -> list[learning.MapFit]:
    """Return what was measured, in its order."""
    base = learning.MapFit(Blend(), 0.0, 1.0)
    return [*base.variants, *replace(base, whitens=True).variants]


def kind_of(setting: str) -> str:
    return next(kind for word, kind in KINDS.items() if word in setting)


@dataclass(frozen=True, eq=False)
class Draw:
    """The figures of one draw of a setting."""

    setting: str
    figures: dict[str, np.ndarray]

    @property
    def kind(self) -> str:
        return kind_of(self.setting)

    @property
    def apart(self) -> bool:
        return bool(self.figures["apart"] >= learning.APART)

    @cached_property
    def sides(self) -> dict[str, Margins]:
        sides = {}
        for name, margins in self.figures.items():
            what, _, side = name.partition(" ")
            if what == "margins":
                right = self.figures[f"right {side}"].astype(np.float64)
                hits = np.zeros((*right.shape, 0), np.int64)
                wide = margins.astype(np.float64)
                sides[side] = Margins(0, hits, wide, right)
        return sides

    @cached_property
    def tests(self) -> dict[str, np.ndarray]:
        """R@1, R@10 and nDCG@10 in percent, by test: [3, maps]."""
        found = {}
        for name, ranks in self.figures.items():
            what, _, test = name.partition(" ")
            if what == "ranks":
                gain = np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0)
                parts = [ranks == 1, ranks <= 10, gain]
                found[test] = 100 * np.array([part.mean(axis=1) for part in parts])
        return found


Rule: TypeAlias = Callable[[Draw], int]


def offsets_alone(draw: Draw) -> int:
    return 0


PARTS: dict[str, Callable[[learning.MapFit], bool]] = {
    "asked": lambda fit: fit.negatives == "asked" and fit.strength > 0,
    "none": lambda fit: fit.negatives == "none",
    "the high ridge": lambda fit: fit.ridge == 1 and fit.strength > 0,
    "the low ridge": lambda fit: fit.ridge < 1,
    "whitening": lambda fit: fit.whitens,
    "fewer offsets": lambda fit: fit.share < 1 and fit.has_map,
}
"""The maps that a rule can leave out, by the name of what they have in common."""


def learn(draw: Draw, without: str = "", **constants: float) -> int:
    """Choose as `hubplugin.learning` does, with other `constants` or without a part."""
    may = [
        fit.may_be_chosen(draw.apart, False) and not (without and PARTS[without](fit))
        for fit in FITS
    ]
    tau = float(draw.figures["tau"])
    with patch.multiple(learning, **({"AGAIN": learning.AGAIN} | constants)):
        return learning.choose(draw.sides, tau, np.array(may), draw.apart)


FITS = list_fits()

OTHERS = dict[str, Rule]()
for again in (0.0, 0.1, 0.2, 0.3, 0.5):
    OTHERS[f"`AGAIN` {again:g}"] = partial(learn, AGAIN=again)
for errors in (0.0, 1.0, 2.0, 3.0):
    OTHERS[f"`PRUDENCE` {errors:g}"] = partial(learn, PRUDENCE=errors)
for part in PARTS:
    OTHERS[f"without {part}"] = partial(learn, without=part)

RULES: dict[str, Rule] = {
    "default": offsets_alone,
    "learn": learn,
}

Gains: TypeAlias = dict[tuple[str, str], np.ndarray]
"""The changes over the raw search by setting and test: [draws, 3]."""


@cache
def chosen_by(rule: Rule, draw: Draw) -> int:
    return rule(draw)


def gains_of(rule: Rule, draws: list[Draw]) -> Gains:
    found = defaultdict[tuple[str, str], list[np.ndarray]](list)
    for draw in draws:
        number = chosen_by(rule, draw)
        for test, measures in draw.tests.items():
            change = measures[:, number] - measures[:, learning.RAW_CANDIDATE]
            found[draw.setting, test].append(change)
    return {key: np.array(values) for key, values in found.items()}


def mean_and_worst(gains: Gains) -> list[float]:
    """Return means and worst of the tests by measure, and the mean of each setting's
    worst side in R@1: seven numbers."""
    means = np.array([values.mean(axis=0) for values in gains.values()])
    worst = defaultdict[str, list[float]](list)
    for (setting, _), values in gains.items():
        worst[setting].append(values[:, 0].mean())
    sides = np.mean([min(values) for values in worst.values()])
    return [*means.mean(axis=0), *means.min(axis=0), float(sides)]


def summarise(draws: list[Draw], rules: dict[str, Rule]) -> str:
    """Return mean / worst of the tests by rule, and R@1 by what was tested."""
    lines = []
    for name, rule in rules.items():
        gains = gains_of(rule, draws)
        *figures, worst_sides = mean_and_worst(gains)
        cells = [f"{figures[i]:+.2f} / {figures[i + 3]:+.2f}" for i in range(3)]
        for side in SIDES:
            means = [v[:, 0].mean() for (_, test), v in gains.items() if test == side]
            cells.append(f"{np.mean(means):+.2f} / {min(means):+.2f}" if means else "")
        lines.append([name, *cells, f"{worst_sides:+.2f}"])
    sides = [f"R@1, {side}" for side in SIDES.values()]
    return markdown(["rule", *MEASURES, *sides, "mean of worst sides"], lines)


def by_setting(draws: list[Draw]) -> str:
    """Return the changes of R@1 with their error, and of R@10 and nDCG@10 by `learn`."""
    all_gains = {name: gains_of(rule, draws) for name, rule in RULES.items()}
    raw = defaultdict[tuple[str, str], list[float]](list)
    for draw in draws:
        for test, measures in draw.tests.items():
            raw[draw.setting, test].append(measures[0, learning.RAW_CANDIDATE])
    lines = []
    for (setting, test), values in all_gains["learn"].items():
        cells = []
        for gains in all_gains.values():
            changes = gains[setting, test][:, 0]
            cell = f"{changes.mean():+.1f}"
            if len(changes) > 1:
                cell += f"±{changes.std() / (len(changes) - 1) ** 0.5:.1f}"
            cells.append(cell)
        rest = [f"{change:+.1f}" for change in values.mean(axis=0)[1:]]
        start = f"{np.mean(raw[setting, test]):.1f}"
        lines.append([setting, SIDES[test], str(len(values)), start, *cells, *rest])
    head = ["setting", "tested on", "draws", "raw R@1", *RULES, "R@10", "nDCG@10"]
    return markdown(head, lines)


def over_kinds(draws: list[Draw]) -> str:
    """Return what the best of `OTHERS` brings on a kind that it was not chosen on.

    The best has the largest sum of the mean of R@1 and the mean of the worst sides.
    """
    lines = []
    for kind in dict.fromkeys(KINDS.values()):
        rest = [draw for draw in draws if draw.kind != kind]
        here = [draw for draw in draws if draw.kind == kind]
        if not here or not rest:
            continue
        values = {}
        for name, rule in OTHERS.items():
            figures = mean_and_worst(gains_of(rule, rest))
            values[name] = figures[0] + figures[-1]
        best = max(values, key=lambda name: values[name])
        cells = []
        for rule in (*RULES.values(), OTHERS[best]):
            figures = mean_and_worst(gains_of(rule, here))
            cells.append(f"{figures[0]:+.2f} / {figures[3]:+.2f}")
        lines.append([kind, *cells[:-1], best, cells[-1]])
    head = ["kind of data", *RULES, "chosen on all other kinds", "that rule here"]
    return markdown(head, lines)


@dataclass(frozen=True)
class Forecast:
    """A change of R@1 that held-out pairs forecast, and the change of the test."""

    kind: str
    change: Figure
    came: float

    @property
    def holds(self) -> bool:
        return self.change.low <= self.came <= self.change.high


def forecasts_of(draw: Draw) -> Iterator[Forecast]:
    """Yield what `learn` forecasts for the tests of a draw."""
    number = chosen_by(learn, draw)
    for test, measures in draw.tests.items():
        tried = draw.sides.get("asked" if test == "asked" else "other")
        if tried is not None:
            change = learning.forecast(tried, number, "pairs").change
            came = (measures[0, number] - measures[0, learning.RAW_CANDIDATE]) / 100
            yield Forecast(draw.kind, change, came)


def forecast_draw(setting: Setting, bank: PreparedBank) -> np.ndarray:
    """Return low, value and high of each forecast, and what came: [tests, 4]."""
    lesson = learning.learn_query_map(Blend(), learning.Teachers(bank))
    scores = ranker(lesson.model, setting.targets)
    rows = []
    for test, (queries, truth) in setting.tests.items():
        side = lesson.asked if test == "asked" else lesson.other
        if side is not None:
            before = (rank(queries @ setting.targets.T, truth) == 1).mean()
            after = (rank(scores(queries), truth) == 1).mean()
            change = side.change
            rows.append([change.low, change.value, change.high, after - before])
    return np.array(rows)


def by_forecast(made: list[Forecast]) -> str:
    """Return how often changes lay in the interval that was forecast, by kind of data."""
    by_kind = {
        kind: [each for each in made if each.kind == kind] for kind in KINDS.values()
    }
    lines = []
    for kind, group in {**by_kind, "all": made}.items():
        if group:
            too_bright = [each.change.value - each.came for each in group]
            width = [each.change.high - each.change.low for each in group]
            inside = np.mean([each.holds for each in group])
            cells = [f"{inside:.1%}", f"{100 * np.mean(too_bright):+.2f}"]
            half = f"±{50 * np.mean(width):.1f}"
            lines.append([kind, str(len(group)), *cells, half])
    head = ["kind of data", "forecasts", "inside", "too high by", "mean interval"]
    return markdown(head, lines)


def time_fits(data: Path) -> str:
    """Return what fits to `TIMED` pairs in as many targets take, the best of three."""
    names = "bank_queries", "bank_targets", "test_targets"
    queries, answers, targets = files(data / "code_search", *names)
    bank = hubplugin.Bank(queries[:TIMED], answers[:TIMED])
    seconds = {}
    for learn in (False, True):
        taken = []
        for _ in range(3):
            start = time.process_time()
            fit_quietly(targets[:TIMED], bank, learn)
            taken.append(time.process_time() - start)
        seconds[learn] = min(taken)
    return (
        f"{TIMED:,} pairs, {len(targets[:TIMED]):,} targets, {targets.shape[1]} "
        f"dimensions, seconds of one core: default {seconds[False]:.1f}, learn "
        f"{seconds[True]:.1f} ({seconds[True] / seconds[False]:.0f} times as long)"
    )


def measure_all(args: argparse.Namespace) -> None:
    """Measure the draws that `args.figures` lacks, then the cheap ones."""
    for seed in range(args.draws):
        for family in families(args.data):
            if seed < family.splits:
                measure_draw(args, family, seed)
    for seed in range(FURTHER_SEEDS, FURTHER_SEEDS + args.forecasts):
        for family in families(args.data):
            if any(word in family.name for word in SMALL):
                measure_draw(args, family, seed)


def measure_draw(args: argparse.Namespace, family: Family, seed: int) -> None:
    """Keep the figures of a draw in `args.figures`, unless they are there."""
    wanted = any(word in family.name for word in args.only)
    file = args.figures / f"{family.name.replace('/', '_')}@{seed}.npz"
    if file.exists() or not wanted or not family.source.is_dir():
        return
    setting = family.draw(seed)
    try:
        bank = prepare(setting)
        if seed < FURTHER_SEEDS:
            figures = measure(setting, bank)
        else:
            figures = {"forecasts": forecast_draw(setting, bank)}
    except HubpluginError as error:  # no answers, or too few
        print(f"{file.name}: {error}", file=sys.stderr)
        return
    # A run that is stopped leaves no half of a file under this name.
    half = args.figures / "half.npz"
    np.savez_compressed(half, **figures)  # type: ignore[arg-type]
    half.replace(file)
    print(file.name, file=sys.stderr, flush=True)


def read_all(args: argparse.Namespace) -> tuple[list[Draw], list[Forecast]]:
    """Return all draws, and the forecasts of the cheap ones."""
    draws, cheap = list[Draw](), list[Forecast]()
    for file in sorted(args.figures.glob("*@*.npz")):
        setting = file.stem.partition("@")[0]
        if not any(word in setting for word in args.only):
            continue
        figures = dict(np.load(file))
        if "forecasts" not in figures:
            draws.append(Draw(setting, figures))
            continue
        for low, value, high, came in figures["forecasts"]:
            change = Figure(value, low, high)
            cheap.append(Forecast(kind_of(setting), change, came))
    return draws, cheap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--figures", type=Path, default=Path("figures"), help="where they are kept"
    )
    parser.add_argument("--data", type=Path, default=SHARED, help="folder of the data")
    parser.add_argument("--only", nargs="*", default=[""], help="words of names")
    parser.add_argument("--draws", type=int, default=2, help="draws a setting")
    parser.add_argument("--forecasts", type=int, default=0, help="cheap draws")
    parser.add_argument("--time", action="store_true", help="time a fit instead")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.time:
        print(f"{time_fits(args.data)}\n{machine(1)}")
        return
    args.figures.mkdir(parents=True, exist_ok=True)
    measure_all(args)
    draws, cheap = read_all(args)
    made = [each for draw in draws for each in forecasts_of(draw)]
    tables = {
        "settings": by_setting(draws),
        "kinds": over_kinds(draws),
        "rules": summarise(draws, RULES | OTHERS),
        "forecasts": by_forecast(made + cheap),
    }
    for name, table in tables.items():
        print(f"\n{name}\n{table}")
    if args.only == [""]:
        FILE.write_text(json.dumps({"machine": machine(1), **tables}) + "\n")
    if args.write:
        users = {name: RULES[name] for name in ("default", "learn")}
        write_table(args.write, "learning", summarise(draws, users))
        page = args.write.parent / "measurements" / "learning.md"
        for name in ("settings", "kinds", "rules", "forecasts"):
            write_table(page, f"learning, {name}", tables[name])


if __name__ == "__main__":
    main()
