"""Real settings in which a correction is tried: a gallery, a bank, and test queries with their answers.

Three kinds of bank: *clean*, queries whose answers are not in the gallery, as in the papers; *log*, queries that were
asked of this gallery; *popular log*, in which some targets were asked for many times. Tests of a log are other wordings
of what was asked (`asked`), and queries for what was never asked (`not asked`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from benchmarks.tables import EXAMPLES


@dataclass(frozen=True)
class Setting:
    """One draw. bank: [m, d]. targets: the gallery, [n, d]. target_bank: [m, d], row i the answer of bank query i, or
    None. tests: by name ("" where there is one), queries and the rows of their targets. clicks: the rows of the
    gallery that a log asked for, [m], where they are known."""

    bank: np.ndarray
    targets: np.ndarray
    target_bank: np.ndarray | None
    tests: dict[str, tuple[np.ndarray, np.ndarray]]
    clicks: np.ndarray | None = None


@dataclass(frozen=True)
class Family:
    """Draws of one setting. source: the folder it is drawn from. draw: a seed to a setting."""

    name: str
    kind: str
    source: Path
    splits: int
    draw: Callable[[int], Setting]


@cache
def read(file: Path) -> np.ndarray:
    """Vectors at unit length, float32; or numbers as they are."""
    array = np.load(file)
    if array.ndim == 1:
        return array
    array = array.astype(np.float32)
    return array / np.linalg.norm(array, axis=1, keepdims=True)


def files(folder: Path, *names: str) -> list[np.ndarray]:
    return [read(folder / f"{name}.npy") for name in names]


def one_test(queries: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Row i of the gallery answers query i."""
    return {"": (queries, np.arange(len(queries)))}


def half(folder: Path, turned: bool, bank: int | None, seed: int) -> Setting:
    """Half of the pairs are gallery and test, the other half, or `bank` of them, both banks. turned: targets ask."""
    queries, targets = files(
        folder, *(("targets", "queries") if turned else ("queries", "targets"))
    )
    rows = np.random.default_rng(100 + seed).permutation(len(queries))
    size = len(rows) // 2 if bank is None else len(rows) - bank
    test, known = rows[:size], rows[size:]
    return Setting(
        queries[known], targets[test], targets[known], one_test(queries[test])
    )


def code(folder: Path, bank: int, test: int, in_gallery: bool, seed: int) -> Setting:
    """Pairs of docstring and function; in_gallery: the bank is a log, and only what it did not ask is tested."""
    bank_queries, bank_targets, queries, targets = files(
        folder, "bank_queries", "bank_targets", "test_queries", "test_targets"
    )
    rng = np.random.default_rng(seed)
    asked, known = (
        rng.choice(len(part), size, replace=False)
        for part, size in ((queries, test), (bank_queries, bank))
    )
    if not in_gallery:
        return Setting(
            bank_queries[known],
            targets[asked],
            bank_targets[known],
            one_test(queries[asked]),
        )
    gallery = np.concatenate([targets[asked], bank_targets[known]])
    tests = {"not asked": (queries[asked], np.arange(test))}
    return Setting(
        bank_queries[known], gallery, None, tests, np.arange(test, test + bank)
    )


def packages(folder: Path, bank: int, seed: int) -> Setting:
    """1,500 packages asked for in one wording; the bank asks for others in another."""
    first, second, targets = files(folder, "queries_a", "queries_b", "targets")
    rows = np.random.default_rng(seed).permutation(len(targets))
    gallery, known = rows[:1500], rows[1500 : 1500 + bank]
    return Setting(
        first[known], targets[gallery], targets[known], one_test(second[gallery])
    )


def package_log(folder: Path, log: int, seed: int) -> Setting:
    """3,000 packages, of which `log` were asked for in one wording; all are tested in the other."""
    first, second, targets = files(folder, "queries_a", "queries_b", "targets")
    rows = np.random.default_rng(seed).permutation(len(targets))[:3000]
    asked, other = np.arange(log), np.arange(1500, 3000)
    tests = {
        name: (second[rows[part]], part)
        for name, part in (("asked", asked), ("not asked", other))
    }
    return Setting(first[rows[:log]], targets[rows], None, tests, asked)


def wordings_log(
    folder: Path,
    logged: Callable[[np.random.Generator, np.ndarray], np.ndarray],
    seed: int,
) -> Setting:
    """Targets with up to twelve wordings each; `logged` draws the wordings that were asked, from `truth`."""
    words, targets, truth = files(folder, "wordings", "targets", "truth")
    log = logged(np.random.default_rng(seed), truth)
    was_asked = np.isin(truth, truth[log])
    tests = {
        name: (words[part], truth[part])
        for name, part in (("asked", was_asked & ~log), ("not asked", ~was_asked))
    }
    return Setting(words[log], targets, None, tests, truth[log])


def codes(folder: Path, size: int, seed: int) -> Setting:
    """A log of `size` terms of a classification: asked again by other terms for what was asked, and by the other terms
    for what was not."""
    targets, queries, others = files(folder, "targets", "queries", "other_wordings")
    truth, other = files(folder, "truth", "other_truth")
    rows = np.random.default_rng(seed).permutation(len(queries))
    log, rest = rows[:size], rows[size:]
    again = np.isin(other, truth[log])
    tests = {
        "asked": (others[again], other[again]),
        "not asked": (queries[rest], truth[rest]),
    }
    return Setting(queries[log], targets, None, tests, truth[log])


def popular(rng: np.random.Generator, truth: np.ndarray) -> np.ndarray:
    """Of half of the targets, 70 % of all wordings."""
    return (rng.random(truth.max() + 1) < 0.5)[truth] & (rng.random(len(truth)) < 0.7)


def few_hot(rng: np.random.Generator, truth: np.ndarray) -> np.ndarray:
    """Of 60 targets that have many wordings 60 % of them, of the others 3 %."""
    hot = rng.choice(np.flatnonzero(np.bincount(truth) >= 8), 60, replace=False)
    return rng.random(len(truth)) < np.where(np.isin(truth, hot), 0.6, 0.03)


def one_wording(size: int, rng: np.random.Generator, truth: np.ndarray) -> np.ndarray:
    """Of `size` targets one wording, in whatever language."""
    rows = rng.permutation(len(truth))
    _, first = np.unique(truth[rows], return_index=True)
    return np.isin(np.arange(len(truth)), rng.choice(rows[first], size, replace=False))


def half_log(folder: Path, turned: bool, log: int, seed: int) -> Setting:
    """The whole gallery, of which `log` targets were asked for; the others are tested."""
    queries, targets = files(
        folder, *(("targets", "queries") if turned else ("queries", "targets"))
    )
    rows = np.random.default_rng(seed).permutation(len(queries))
    tests = {"not asked": (queries[rows[log:]], rows[log:])}
    return Setting(queries[rows[:log]], targets, None, tests, rows[:log])


def seventeen(data: Path) -> Iterator[Family]:
    """The settings that every default is measured by: 11 families, 17 tests."""
    coco, korean, debian, tldr = (
        data / name for name in ("coco500", "tldr_ko", "debian", "tldr_log")
    )
    yield Family(
        "coco, text to image", "clean", coco, 6, partial(half, coco, False, None)
    )
    yield Family(
        "coco, image to text", "clean", coco, 6, partial(half, coco, True, None)
    )
    yield Family(
        "Korean to English", "clean", korean, 6, partial(half, korean, False, None)
    )
    yield Family(
        "English to Korean", "clean", korean, 6, partial(half, korean, True, None)
    )
    for bank in (4000, 1500, 400):
        draw = partial(code, data / "code_search", bank, 2000, False)
        yield Family(
            f"text to code, bank {bank:,}", "clean", data / "code_search", 6, draw
        )
    for bank in (1500, 500):
        yield Family(
            f"packages, bank {bank:,}",
            "clean",
            debian,
            6,
            partial(packages, debian, bank),
        )
    for log, splits in ((1500, 6), (300, 16), (100, 16)):
        yield Family(
            f"packages, log of {log:,}",
            "log",
            debian,
            splits,
            partial(package_log, debian, log),
        )
    yield Family(
        "commands, popular log",
        "popular log",
        tldr,
        6,
        partial(wordings_log, tldr, popular),
    )


def further(data: Path) -> Iterator[Family]:
    """Settings that no default was made on, to see that it is not tuned to the seventeen."""
    coco, korean, tldr, search = (
        data / name for name in ("coco500", "tldr_ko", "tldr_log", "code_search")
    )
    for log in (1000, 300, 100):
        draw = partial(wordings_log, tldr, partial(one_wording, log))
        yield Family(f"commands, log of {log:,}", "log", tldr, 4, draw)
    yield Family(
        "commands, 60 hot targets",
        "popular log",
        tldr,
        4,
        partial(wordings_log, tldr, few_hot),
    )
    for log in (1500, 300):
        yield Family(
            f"text to code, log of {log:,}",
            "log",
            search,
            4,
            partial(code, search, log, 1500, True),
        )
    yield Family(
        "coco, text to image, log of 250",
        "log",
        coco,
        6,
        partial(half_log, coco, False, 250),
    )
    yield Family(
        "coco, image to text, log of 250",
        "log",
        coco,
        6,
        partial(half_log, coco, True, 250),
    )
    yield Family(
        "coco, text to image, bank 100",
        "clean",
        coco,
        6,
        partial(half, coco, False, 100),
    )
    yield Family(
        "Korean to English, log of 500",
        "log",
        korean,
        4,
        partial(half_log, korean, False, 500),
    )
    yield Family(
        "Korean to English, bank 200",
        "clean",
        korean,
        4,
        partial(half, korean, False, 200),
    )
    for bank, splits in ((2500, 1), (400, 4)):
        draw = partial(code, EXAMPLES, bank, 1200, False)
        yield Family(f"examples/data, bank {bank:,}", "clean", EXAMPLES, splits, draw)
    yield Family(
        "examples/data, log of 400",
        "log",
        EXAMPLES,
        4,
        partial(code, EXAMPLES, 400, 1200, True),
    )
    for log in (1000, 300, 100):
        yield Family(
            f"ICD, log of {log:,}",
            "log",
            data / "icd",
            4,
            partial(codes, data / "icd", log),
        )
