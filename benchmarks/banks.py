"""Banks of every kind for the galleries of `examples/data` and, where it is there, of the shared data.

A `Case` is a gallery with test queries, and a bank that is its own, a log of it, made of documents, from elsewhere, ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.cluster.vq import kmeans2

from benchmarks.tables import EXAMPLES, ROOT, pairs

DATA = Path(os.environ.get("HUBPLUGIN_DATA", ROOT.parent / "shared" / "data"))
GALLERY = 1_200


@dataclass(frozen=True)
class Source:
    """Paired vectors of one kind. again: a second wording of each query, where there is one."""

    name: str
    model: str
    queries: np.ndarray
    targets: np.ndarray
    again: np.ndarray | None = None


@dataclass(frozen=True)
class Case:
    """tests: by name, queries and the row of each one's target. target_bank: that of the bank queries, row by row."""

    source: str
    kind: str
    size: int
    gallery: np.ndarray
    tests: dict[str, tuple[np.ndarray, np.ndarray]]
    bank: np.ndarray
    target_bank: np.ndarray | None = None


def turned(vectors: np.ndarray) -> np.ndarray:
    """As another model of as many dimensions would embed the same: a rotation."""
    d = vectors.shape[1]
    return unit(vectors @ np.linalg.qr(np.random.default_rng(0).normal(size=(d, d)))[0])


def unit(vectors: np.ndarray) -> np.ndarray:
    rows = np.asarray(vectors, np.float32)
    return np.ascontiguousarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def sources() -> list[Source]:
    found = [Source("python", "MiniLM", *map(unit, pairs(EXAMPLES)))]
    if not DATA.exists():
        return found

    def load(folder: str, *names: str) -> list[np.ndarray]:
        return [unit(np.load(DATA / folder / f"{name}.npy")) for name in names]

    found.append(Source("code", "MiniLM", *map(unit, pairs(DATA / "code_search"))))
    first, second, targets = load("debian", "queries_a", "queries_b", "targets")
    found += [
        Source("debian", "MiniLM", first, targets, second),
        Source("debian b", "MiniLM", second, targets, first),
    ]
    names = load("icd", "queries", "targets")
    found.append(
        Source("icd", "MiniLM", names[0], names[1][np.load(DATA / "icd" / "truth.npy")])
    )
    for folder, model, there, back in (
        ("coco500", "CLIP", "text-image", "image-text"),
        ("tldr_ko", "e5", "korean-english", "english-korean"),
    ):
        queries, targets = load(folder, "queries", "targets")
        found += [
            Source(there, model, queries, targets),
            Source(back, model, targets, queries),
        ]
    return found


def cases(seed: int) -> Iterator[Case]:
    known = sources()
    for source in known:
        yield from _cases(source, known, np.random.default_rng(seed))
    if DATA.exists():
        yield from _popular(np.random.default_rng(seed))


def _cases(
    source: Source, known: list[Source], rng: np.random.Generator
) -> Iterator[Case]:
    q, t = source.queries, source.targets
    n = min(GALLERY, len(q) // 2)
    order = rng.permutation(len(q))
    mine, rest = order[:n], order[n:]
    gallery, asked = t[mine], {"": (q[mine], np.arange(n))}

    def case(
        kind: str, bank: np.ndarray, second: np.ndarray | None = None, **other: object
    ) -> Case:
        given = {"gallery": gallery, "tests": asked, **other}
        return Case(
            source.name, kind, len(bank), bank=bank, target_bank=second, **given
        )  # type: ignore[arg-type]

    for size in (30, 100, 400, 1_000, 4_000):
        if size <= len(rest):
            yield case("own", q[rest[:size]], t[rest[:size]])
    for size in (30, 100, 300, 1_000):
        if size < len(rest):
            yield case(
                "log", q[rest[:size]], gallery=np.vstack([gallery, t[rest[:size]]])
            )
        if source.again is not None and size < len(rest):
            tests = {
                "asked": (source.again[order[:size]], np.arange(size)),
                "other": (source.again[order[size:2_400]], np.arange(size, 2_400)),
            }
            yield case("log", q[order[:size]], gallery=t[order[:2_400]], tests=tests)
    some = rest[:400]
    half = len(some) // 2
    for size in (100, 300, 1_000):
        if size <= len(rest):
            yield case("another model", turned(q[rest[:size]]))
            yield case("documents", t[rest[:size]])
    side = kmeans2(t.astype(np.float64), 6, minit="++", seed=0)[1] < 3
    here, there = (
        order[rng.random(len(q)) < np.where(side[order] == which, 0.85, 0.15)]
        for which in (True, False)
    )
    there = np.setdiff1d(there, here)[:400]
    here = here[:n]
    tests = {"": (q[here], np.arange(len(here)))}
    yield case("documents, other subjects", t[there], gallery=t[here], tests=tests)
    yield case(
        "one query, repeated",
        unit(q[rest[0]] + 0.5 * rng.normal(size=(400, q.shape[1])) / q.shape[1] ** 0.5),
    )
    yield case("half log", q[some], gallery=np.vstack([gallery, t[some[:half]]]))
    yield case("documents", gallery.copy())
    yield case("documents", _near(gallery, 0.8, rng))
    yield case("half documents", np.vstack([q[some[:half]], t[some[half:]]]))
    yield case("random", unit(rng.normal(size=(400, q.shape[1]))))
    yield from _from_elsewhere(source, known, case, rng)
    yield from _corners(source, case, mine, rest)


def _near(vectors: np.ndarray, cosine: float, rng: np.random.Generator) -> np.ndarray:
    away = rng.normal(size=vectors.shape).astype(np.float32)
    away = unit(away - (away * vectors).sum(axis=1, keepdims=True) * vectors)
    return unit(cosine * vectors + np.sqrt(1 - cosine**2) * away)


def _from_elsewhere(
    source: Source, known: list[Source], case, rng: np.random.Generator
) -> Iterator[Case]:  # type: ignore[no-untyped-def]
    for other in known:
        family = {source.name[:6], other.name[:6]}
        if (
            other.model == source.model
            and source.model == "MiniLM"
            and len(family) == 2
        ):
            rows = rng.permutation(len(other.queries))
            for size in (100, 400):
                yield case(
                    "foreign", other.queries[rows[:size]], other.targets[rows[:size]]
                )
            yield case("foreign documents", other.targets[rows[:400]])
        elif (
            other.model != source.model
            and other.queries.shape[1] == source.queries.shape[1]
        ):
            yield case(
                "another model",
                other.queries[rng.permutation(len(other.queries))[:400]],
            )


def _corners(
    source: Source, case, mine: np.ndarray, rest: np.ndarray
) -> Iterator[Case]:  # type: ignore[no-untyped-def]
    q, t = source.queries, source.targets
    halves = (
        kmeans2(part.astype(np.float64), 2, minit="++", seed=0)[1]
        for part in (q[rest], t)
    )
    asked_for, side = halves
    for which in (0, 1):
        rows = rest[asked_for == which][:1_000]
        if len(rows) >= 50:
            yield case("corner", q[rows], t[rows])
        here = mine[side[mine] == which]
        for kind, other in (("corner", 1 - which), ("own", which)):
            rows = rest[side[rest] == other][:1_000]
            if min(len(here), len(rows)) >= 80:
                yield case(
                    kind,
                    q[rows],
                    t[rows],
                    gallery=t[here],
                    tests={"": (q[here], np.arange(len(here)))},
                )
    middle = t[rest[0]]
    rows = rest[np.argsort(-(t[rest] @ middle))][: min(500, len(rest) // 4)]
    far = mine[np.argsort(-(t[mine] @ middle))[len(mine) // 4 :]]
    yield case(
        "corner",
        q[rows],
        t[rows],
        gallery=t[far],
        tests={"": (q[far], np.arange(len(far)))},
    )


def _popular(rng: np.random.Generator) -> Iterator[Case]:
    """Logs in which some targets were asked for in many wordings."""
    wordings, targets, truth = (
        np.load(DATA / "tldr_log" / f"{name}.npy")
        for name in ("wordings", "targets", "truth")
    )
    wordings, targets = unit(wordings), unit(targets)
    known, before = rng.random(len(targets)) < 0.5, rng.random(len(wordings)) < 0.7

    def some(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = rng.permutation(np.flatnonzero(mask))[:GALLERY]
        return wordings[rows], truth[rows]

    log = rng.permutation(np.flatnonzero(known[truth] & before))
    tests = {"asked": some(known[truth] & ~before), "other": some(~known[truth])}
    for size in (30, 100, 300, 1_000, len(log)):
        yield Case(
            "many languages", "popular log", size, targets, tests, wordings[log[:size]]
        )
    here = np.flatnonzero(~known)
    place = np.full(len(targets), -1)
    place[here] = np.arange(len(here))
    queries, rows = some(~known[truth])
    bank = rng.permutation(np.flatnonzero(known[truth]))
    asked = {"": (queries, place[rows])}
    for size in (30, 100, 400, 1_000):
        yield Case(
            "many languages", "own", size, targets[here], asked, wordings[bank[:size]]
        )
    yield Case(
        "many languages",
        "documents",
        400,
        targets[here],
        asked,
        rng.permutation(targets[known])[:400],
    )
    often = np.flatnonzero(np.bincount(truth, minlength=len(targets)) >= 8)
    hot = np.isin(truth, rng.permutation(often)[:60])
    seldom = ~hot & (rng.random(len(truth)) < 0.03)
    logged = (hot & before) | seldom
    tests = {
        "asked": some(hot & ~before),
        "other": some(~hot & ~np.isin(truth, truth[seldom])),
    }
    yield Case(
        "many languages",
        "popular log",
        int(logged.sum()),
        targets,
        tests,
        wordings[logged],
    )
