"""What the default and plain methods do to R@1 and R@10, on seventeen real settings and on further ones.

    python -m benchmarks.settings [--data FOLDER] [--groups seventeen further] [--only WORD ...]
                                  [--columns default others variants] [--splits N] [--write PAGE]

A setting is a gallery, a bank and test queries (benchmarks/bank_settings.py). FOLDER holds coco500, code_search,
debian, tldr_ko and tldr_log; by default it is shared/data beside the checkout. Settings whose data are not there are
left out: those of examples/data always remain. Results are kept in benchmarks/results/settings.json, columns that were
not asked for as they were.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hubplugin
from benchmarks.bank_settings import Family, Setting, further, seventeen
from benchmarks.tables import RESULTS, SHARED, machine, markdown, write_table

FILE = RESULTS / "settings.json"

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dbsn .05": ("dbsn", {}),
    "dbsn .02": ("dbsn", {"tau": 0.02}),
    "is .05": ("is", {"tau": 0.05}),
    "nnn": ("nnn", {}),
    "nnn 128 .75": ("nnn", {"k": 128, "alpha": 0.75}),
    "csls": ("csls", {}),
}
"""Plain methods, answers kept. With the default and no correction at all they are what hindsight chooses from."""

VARIANTS_FROM = 2
"""Splits that variants of the default are measured on, 3 times as many of the smallest logs: they are compared with the
default on the same splits."""

GROUPS = {"seventeen": seventeen, "further": further}


def variants(m: int, tau: float) -> dict[str, dict[str, Any]]:
    """One parameter of the default changed at a time. tau: the default's own, half the spread of the similarities."""
    return {
        "share of dbsn 0.33": {"share": 0.33},
        "share of dbsn 0.67": {"share": 0.67},
        "tau 0.35 of the spread": {"tau": 0.7 * tau},
        "tau 0.7 of the spread": {"tau": 1.4 * tau},
        "strength m/(m+50)": {"strength": m / (m + 50)},
        "strength m/(m+200)": {"strength": m / (m + 200)},
        "strength 1": {"strength": 1.0},
        "k 8": {"k": 8},
        "k 32": {"k": 32},
        "answers kept": {"answers": "kept"},
        "10 iterations": {"iterations": 10},
        "answers left out": {"answers": "left out"},
    }


def offsets(
    setting: Setting, columns: set[str], variants_too: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """The offsets [n] of every correction asked for, by name."""
    bank = hubplugin.Bank(setting.bank, setting.target_bank)
    model = hubplugin.fit(setting.targets, bank)
    yield "default", model.offsets(setting.targets)
    for name, (method, parameters) in OTHERS.items() if "others" in columns else ():
        yield (
            name,
            hubplugin.fit(setting.targets, bank, method, **parameters).offsets(
                setting.targets
            ),
        )
    if variants_too and "variants" in columns:
        for name, parameters in variants(
            len(setting.bank), model.parameters["tau"]
        ).items():
            yield (
                name,
                hubplugin.fit(setting.targets, bank, **parameters).offsets(
                    setting.targets
                ),
            )


def recalls(scores: torch.Tensor, truth: np.ndarray) -> tuple[float, float]:
    """R@1 and R@10 in percent. scores: [q, n]."""
    own = scores.gather(1, torch.from_numpy(truth)[:, None])
    above = (scores > own).sum(dim=1)
    return tuple(round(100 * float((above < k).double().mean()), 2) for k in (1, 10))


def measure(
    family: Family, columns: set[str], splits: int
) -> dict[str, dict[str, Any]]:
    """By test: "raw" and every correction, with R@1 and R@10 of each split."""
    found: dict[str, dict[str, Any]] = {}
    for seed in range(min(splits, family.splits)):
        setting = family.draw(seed)
        given = [("raw", np.zeros(len(setting.targets), np.float32))]
        given += offsets(
            setting, columns, seed < VARIANTS_FROM * (3 if family.splits > 6 else 1)
        )
        for test, (queries, truth) in setting.tests.items():
            row = found.setdefault(
                f"{family.name}: {test}" if test else family.name,
                {"kind": family.kind, "found": {}},
            )
            scores = torch.from_numpy(queries @ setting.targets.T)
            for name, offset in given:
                row["found"].setdefault(name, []).append(
                    recalls(scores + torch.from_numpy(offset), truth)
                )
    return found


def gains(row: dict[str, Any], name: str) -> np.ndarray:
    """Mean change of R@1 and R@10 in points, over the splits that it was measured on."""
    ours, theirs = (np.array(row["found"][key]) for key in (name, "raw"))
    common = min(len(ours), len(theirs))
    return (ours[:common] - theirs[:common]).mean(axis=0)


def comparison(rows: dict[str, dict[str, Any]]) -> str:
    """Change of R@1 / R@10 by the default and by plain methods."""
    titles = {"default": "the default", "dbsn .05": "`dbsn` .05", "nnn": "`nnn` 16/.5"}
    names = [
        name for name in titles if all(name in row["found"] for row in rows.values())
    ]
    chosen_from = ["default", *OTHERS]
    hindsight = all(
        name in row["found"] for row in rows.values() for name in chosen_from
    )
    lines, changes = [], []
    for name, row in rows.items():
        both = [gains(row, column) for column in names]
        best = (
            max((float(gains(row, column)[0]), column) for column in chosen_from)
            if hindsight
            else (0.0, "")
        )
        changes.append([*np.concatenate(both), max(0.0, best[0])])
        raw = np.array(row["found"]["raw"])
        lines.append(
            [
                name,
                row["kind"],
                str(len(raw)),
                f"{raw[:, 0].mean():.1f}",
                *(f"{a:+.1f} / {b:+.1f}" for a, b in both),
            ]
            + (
                [f"{best[0]:+.1f} ({best[1]})" if best[0] > 0 else "0 (none)"]
                if hindsight
                else []
            )
        )
    for what, summary in (("**mean**", np.mean), ("**worst**", np.min)):
        values = summary(np.array(changes), axis=0)
        cells = [
            f"**{values[2 * i]:+.2f} / {values[2 * i + 1]:+.2f}**"
            for i in range(len(names))
        ]
        lines.append(
            [what, "", "", "", *cells]
            + ([f"**{values[-1]:+.2f}**"] if hindsight else [])
        )
    head = ["setting", "bank", "draws", "raw R@1", *(titles[name] for name in names)]
    return markdown(head + (["best in hindsight"] if hindsight else []), lines)


def ablation(rows: dict[str, dict[str, Any]]) -> str:
    """Variants of the default: mean and worst change of R@1 against no correction, and by kind against the default."""
    kinds = {"clean": ("clean",), "logs": ("log", "popular log")}
    measured = [
        name
        for name in variants(1, 1.0)
        if all(name in row["found"] for row in rows.values())
    ]
    lines = []
    for name in ["default", *measured]:
        change = np.array(
            [_on_variant_splits(row, name, measured) for row in rows.values()]
        )
        base = np.array(
            [_on_variant_splits(row, "default", measured) for row in rows.values()]
        )
        cells = [
            f"{change[:, 0].mean():+.2f}",
            f"{change[:, 0].min():+.2f}",
            f"{change[:, 1].min():+.2f}",
        ]
        for members in kinds.values():
            chosen = [row["kind"] in members for row in rows.values()]
            cells.append(
                f"{(change - base)[chosen, 0].mean():+.2f}" if name != "default" else ""
            )
        lines.append([name, *cells])
    head = ["variant", "mean of R@1", "worst of R@1", "worst of R@10"]
    return markdown(
        [*head, *(f"on {kind}, against the default" for kind in kinds)], lines
    )


def _on_variant_splits(
    row: dict[str, Any], name: str, measured: list[str]
) -> np.ndarray:
    count = len(row["found"][measured[0]]) if measured else None
    ours, raw = (np.array(row["found"][key])[:count] for key in (name, "raw"))
    return (ours - raw).mean(axis=0)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` beside the columns of `old` that it lacks, or that were measured on more splits."""
    longer = {
        name: values
        for name, values in old["found"].items()
        if len(values) > len(new["found"].get(name, []))
    }
    return {"kind": new["kind"], "found": {**new["found"], **longer}}


def kept() -> dict[str, Any]:
    return (
        json.loads(FILE.read_text())
        if FILE.exists()
        else {"seventeen": {}, "further": {}}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=SHARED, help="folder of the data sets"
    )
    parser.add_argument("--groups", nargs="*", choices=GROUPS, default=[*GROUPS])
    parser.add_argument(
        "--only",
        nargs="*",
        default=[""],
        help="settings whose name holds one of these words",
    )
    parser.add_argument(
        "--columns", nargs="*", default=["default", "others", "variants"]
    )
    parser.add_argument(
        "--splits", type=int, default=99, help="at most so many draws a setting"
    )
    parser.add_argument("--dry", action="store_true", help="print, and keep no results")
    parser.add_argument("--write", type=Path, help="page whose tables are replaced")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = kept() if not given.dry else {"seventeen": {}, "further": {}}
    for group in given.groups:
        for family in GROUPS[group](given.data):
            if not any(word in family.name for word in given.only):
                continue
            if not family.source.is_dir():
                print(
                    f"{family.name}: no folder {family.source}; pass --data",
                    file=sys.stderr,
                )
                continue
            start = time.perf_counter()
            columns = set(given.columns) - (
                {"variants"} if group == "further" else set()
            )
            for name, row in measure(family, columns, given.splits).items():
                results[group][name] = merged(
                    results[group].get(name, {"found": {}}), row
                )
            print(
                f"{family.name}: {time.perf_counter() - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            if not given.dry:
                FILE.write_text(
                    json.dumps({"machine": machine(1), **results}, indent=None) + "\n"
                )
    tables = {
        f"settings, {group}": comparison(results[group])
        for group in GROUPS
        if results[group]
    }
    if any("k 8" in row["found"] for row in results["seventeen"].values()):
        tables["settings, variants"] = ablation(results["seventeen"])
    for name, table in tables.items():
        print(f"\n{name}\n{table}")
        if given.write:
            write_table(
                RESULTS / "variants.md"
                if name == "settings, variants"
                else given.write,
                name,
                table,
            )


if __name__ == "__main__":
    main()
