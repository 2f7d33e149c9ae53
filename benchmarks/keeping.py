"""Where `refit` and `inspect` draw their lines: `python -m benchmarks.keeping [--seeds 2] [--write PAGE]`.

Galleries of text and code, text and image, and two languages, each with queries whose targets are known. A correction
is fitted on a bank; then bank, gallery or stored offsets change. What the two jobs look at is printed beside the change
of R@1 on test queries, which they never see:

rise     of skewness on held-out queries of a new bank, old model to new, as a share of the raw skewness
drift    own share of the new bank and the old one
left     hubness of 200 test queries, corrected by a fit on the new bank, as a share of the raw one, both beyond chance
shift    mean offset of a gallery that has changed, in standard deviations of the fit's
grown    hubness of 200 queries that the old correction leaves, less what it left of the bank's at the fit, both beyond
         chance: of live queries where the bank changes, else of the same ones of the bank
worst    in how many more of their lists the worst hub stands than at the fit: times

R@1 is that of a fit on the new bank less that of the old one; where offsets are missing, what that costs.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.banks import Source, sources
from benchmarks.tables import markdown, write_table
from hubplugin.bank import Bank, own_share
from hubplugin.compute import Compute
from hubplugin.fitting import fit
from hubplugin.measures.hubness import k_occurrence, skewness, skewness_by_chance
from hubplugin.methods import METHODS
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.validation import (
    Figures,
    as_it_is,
    cross_validate,
    fitted_by,
    folds_of,
    uncorrected,
)

TARGETS, PROBES, K = 1_000, 200, 10
COLUMNS = ("rise", "drift", "left", "shift", "grown", "worst", "R@1")


@dataclass(frozen=True)
class Line:
    """One change: of the bank, the gallery or the offsets, to `to`; what was seen, by column."""

    what: str
    source: str
    to: str
    seen: dict[str, float]


@dataclass(frozen=True)
class Setting:
    """A gallery [n, d] with a test query for each target, a bank of other queries, and the correction by half of it."""

    gallery: np.ndarray
    test: np.ndarray
    bank: np.ndarray
    documents: np.ndarray
    old: OffsetModel

    @classmethod
    def draw(cls, source: Source, rng: np.random.Generator) -> Setting:
        order = rng.permutation(len(source.targets))
        half = min(TARGETS, len(order) // 2)
        inside, outside = order[:half], order[half : 2 * half]
        gallery, bank = source.targets[inside], source.queries[outside]
        old = fit(gallery, bank[: half // 2])
        return cls(gallery, source.queries[inside], bank, source.targets[outside], old)

    def recall(self, offsets: np.ndarray | float) -> float:
        """R@1 of the test queries, in points."""
        found = (self.test @ self.gallery.T + offsets).argmax(axis=1)
        return 100 * float((found == np.arange(len(self.gallery))).mean())

    @property
    def asked(self) -> np.ndarray:
        """Queries of the old bank."""
        return evenly(self.bank[: len(self.bank) // 2])

    def since(
        self,
        asked: np.ndarray,
        gallery: np.ndarray | None = None,
        offsets: np.ndarray | None = None,
    ) -> dict[str, float]:
        """`grown` and `worst` of the queries `asked`, on another gallery and with other offsets."""
        gallery = self.gallery if gallery is None else gallery
        offsets = self.old.offsets(gallery) if offsets is None else offsets
        before, most = hubness(self.asked, self.gallery, self.old.offsets(self.gallery))
        after, worst = hubness(asked, gallery, offsets)
        return {"grown": after - before, "worst": worst / most}

    def left(self, offsets: np.ndarray) -> float:
        """The share of the hubness of some test queries that `offsets` leave."""
        raw = self.test[:PROBES] @ self.gallery.T
        chance = skewness_by_chance(len(raw), K, len(self.gallery))
        found = [np.argsort(-scores, axis=1)[:, :K] for scores in (raw, raw + offsets)]
        before, after = (
            skewness(k_occurrence(each, len(self.gallery))) - chance for each in found
        )
        return after / before


def lines(source: Source, others: list[Source], seed: int) -> Iterator[Line]:
    rng = np.random.default_rng(seed)
    setting = Setting.draw(source, rng)
    half = len(setting.bank) // 2
    held, asked = setting.old.offsets(setting.gallery), setting.asked
    before = setting.recall(held)
    for name, new in _banks(setting, others).items():
        offsets = fit(setting.gallery, new).offsets(setting.gallery)
        seen = {
            "rise": _rise(new, setting),
            "drift": own_share(new, setting.bank[:half], Compute("cpu"), rng),
            "left": setting.left(offsets),
            **setting.since(evenly(new)),
            "R@1": setting.recall(offsets) - before,
        }
        yield Line("bank", source.name, name, seen)
    assert setting.old.gallery is not None
    galleries = {"as before": setting.documents, "one corner": _corner(setting.gallery)}
    galleries |= {
        f"of another source, {other.name}": other.targets[:TARGETS] for other in others
    }
    for name, changed in galleries.items():
        shift = (
            float(setting.old.offsets(changed).mean()) / setting.old.gallery.deviation
        )
        yield Line(
            "gallery",
            source.name,
            name,
            {"shift": shift} | setting.since(asked, changed),
        )
    for count in (1, 10):
        planted = np.tile(
            asked.mean(axis=0) / np.linalg.norm(asked.mean(axis=0)), (count, 1)
        ).astype(np.float32)
        whole = np.concatenate([setting.gallery, planted])
        yield Line(
            "planted",
            source.name,
            str(count),
            setting.since(asked, whole, np.append(held, [0.0] * count)),
        )
    for share in (0.02, 0.05, 0.1, 0.3):
        without = [np.where(rng.random(len(held)) < share, 0.0, held) for _ in range(5)]
        lost = float(np.mean([setting.recall(offsets) - before for offsets in without]))
        since = setting.since(asked, offsets=without[0])
        yield Line(
            "offsets missing", source.name, f"{share:.0%}", {"R@1": lost} | since
        )


def hubness(
    queries: np.ndarray, gallery: np.ndarray, offsets: np.ndarray | float
) -> tuple[float, float]:
    """Skewness beyond chance, and the share of the queries that find the worst hub."""
    found = np.argsort(-(queries @ gallery.T + offsets), axis=1)[:, :K]
    occurrence = k_occurrence(found, len(gallery))
    beyond = skewness(occurrence) - skewness_by_chance(len(queries), K, len(gallery))
    return beyond, float(occurrence.max() / len(queries))


def evenly(vectors: np.ndarray) -> np.ndarray:
    some: np.ndarray = vectors[
        np.linspace(0, len(vectors) - 1, min(PROBES, len(vectors))).astype(int)
    ]
    return some


def _banks(setting: Setting, others: list[Source]) -> dict[str, np.ndarray]:
    half = len(setting.bank) // 2
    found = {f"as before, {size}": setting.bank[half:][:size] for size in (400, 100)}
    found |= {
        "the old one and as many more": setting.bank,
        "one corner": _corner(setting.bank),
    }
    found |= {
        f"of another source, {other.name}": other.queries[:400] for other in others
    }
    return found | {"documents": setting.documents[:400]}


def _corner(vectors: np.ndarray) -> np.ndarray:
    nearest: np.ndarray = vectors[
        np.argsort(-(vectors @ vectors[0]))[: max(len(vectors) // 4, 100)]
    ]
    return nearest


def _rise(bank: np.ndarray, setting: Setting) -> float:
    banks = Bank(bank).prepare(Metric.COSINE, Compute("cpu")).against(setting.gallery)
    tried = [uncorrected, as_it_is(setting.old), fitted_by(METHODS["blend"]())]
    margins = cross_validate(tried, banks, folds_of(banks))
    raw, before, after = (Figures.of(margins, number).skewness for number in range(3))
    return (after - before) / max(raw, 1e-9)


def table(found: list[Line]) -> str:
    """The extremes of each kind of change."""
    kinds: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in found:
        kinds[
            line.what, line.to.partition(", of ")[0].partition(" source, ")[0]
        ].append(line)
    rows = []
    for (what, to), part in kinds.items():
        columns = [
            [line.seen[name] for line in part if name in line.seen] for name in COLUMNS
        ]
        rows.append(
            [
                what,
                to,
                str(len(part)),
                *(f"{min(c):+.2f} to {max(c):+.2f}" if c else "" for c in columns),
            ]
        )
    return markdown(["what changes", "to", "cases", *COLUMNS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    given = parser.parse_args()
    known, found = sources(), list[Line]()
    for source in known:
        others = [
            each
            for each in known
            if each is not source and each.targets.shape[1] == source.targets.shape[1]
        ]
        for seed in range(given.seeds):
            for line in lines(
                source, [other for other in others if other.model == source.model], seed
            ):
                found.append(line)
                values = (f"{name} {value:+.2f}" for name, value in line.seen.items())
                print(line.what, line.source, line.to, *values, sep="\t", flush=True)
    text = table(found)
    print(text)
    if given.write:
        write_table(given.write, "keeping", text)


if __name__ == "__main__":
    main()
