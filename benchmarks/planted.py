"""How far a planted vector reaches, raw, by each method and by a robust model; who finds it; what the honest pay.

    python -m benchmarks.planted [--data FOLDER] [--write docs/security.md]

The attacks are those of `benchmarks.attacks`, made with queries that are neither in the bank nor among the tests. A
cell is the share of test queries that have a planted vector among their 10 nearest, and as their nearest, in %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import hubplugin
from benchmarks import attacks
from benchmarks.attacks import NEAREST, Scene
from benchmarks.bank_settings import Family, seventeen
from benchmarks.tables import SHARED, markdown, write_table
from hubplugin.methods.robust import floor_of

METHODS = ("blend", "dbsn", "is", "nnn", "csls")
COUNTS = (1, 10, 100)
ALERTS = (0.002, 0.01, 0.02)
LARGEST = 0.05
"""The largest share of a gallery that is planted: more is no attack, but another gallery."""

SPLITS, DRAWS = 3, 20

VARIANTS = {
    "nothing": (1.0, 1.0),
    "half of the share": (0.5, 1.0),
    "twice the share": (2.0, 1.0),
    "0.7 of the temperature": (1.0, 0.7),
    "1.4 of the temperature": (1.0, 1.4),
}
"""What is changed of the bound of newcomers: by how much their share is multiplied, and their temperature."""

OBLIVIOUS = ("k-means of queries", "gradient", "gradient on the bank")


class Defence:
    """A method fitted on a scene without planted vectors, with what it gives them; method "raw" gives nothing."""

    def __init__(self, method: str, scene: Scene):
        self.scene, self.model = scene, None
        self.of_gallery = np.zeros(len(scene.gallery), np.float32)
        if method != "raw":
            named = "blend" if method == "robust" else method
            self.model = hubplugin.fit(scene.gallery, scene.bank, named, robust=method == "robust")
            self.of_gallery = self.model.members.offsets(scene.gallery)

    def given(self, planted: np.ndarray) -> np.ndarray:
        return np.zeros(len(planted), np.float32) if self.model is None else self.model.offsets(planted)

    def reach(self, planted: np.ndarray, tests: np.ndarray, given: np.ndarray | None = None) -> tuple[float, float]:
        """The shares of `tests` with one of `planted` among the 10 nearest, and as the nearest."""
        honest = np.sort(tests @ self.scene.gallery.T + self.of_gallery, axis=1)
        best = (tests @ planted.T + (self.given(planted) if given is None else given)).max(axis=1)
        return float((best > honest[:, -NEAREST]).mean()), float((best > honest[:, -1]).mean())

    def recall(self, planted: np.ndarray | None = None) -> float:
        """R@1 of the test queries, beside `planted`."""
        scores = self.scene.tests @ self.scene.gallery.T + self.of_gallery
        rows = np.arange(len(scores))
        own, scores[rows, self.scene.truth] = scores[rows, self.scene.truth].copy(), -np.inf
        best = scores.max(axis=1)
        if planted is not None:
            best = np.maximum(best, (self.scene.tests @ planted.T + self.given(planted)).max(axis=1))
        return float((own > best).mean())


def cell(shares: tuple[float, float]) -> str:
    return f"{100 * shares[0]:.1f}/{100 * shares[1]:.1f}"


def counts(scene: Scene) -> list[int]:
    return [count for count in COUNTS if count <= max(LARGEST * len(scene.gallery), 1)]


def attacked(scene: Scene, defences: dict[str, Defence]) -> Iterator[list[str]]:
    """A row for each attack: what it reaches under each defence, and R@1 of honest queries by the robust one."""
    clean, robust = defences["robust"].recall(), defences["robust"].model

    def row(count: int, attack: str, planted: np.ndarray, tests: np.ndarray, of: tuple[str, ...]) -> list[str]:
        print(f"{time.strftime('%X')} {scene.name}: {count} by {attack}", file=sys.stderr, flush=True)
        shares = [cell(defences[name].reach(planted, tests)) if name in of else "" for name in defences]
        recall = f"{100 * clean:.1f}, {100 * defences['robust'].recall(planted):.1f}"
        return [scene.name, str(count), attack, *shares, recall]

    for count in counts(scene):
        for kind in OBLIVIOUS:
            yield row(count, kind, attacks.oblivious(kind, count, scene), scene.tests, tuple(defences))
        topic = attacks.cluster_of(scene)
        aimed = attacks.oblivious("gradient", min(count, len(topic.public)), scene, topic.public)
        if count < COUNTS[-1]:
            yield row(count, "at one cluster, of its queries", aimed, topic.tests, tuple(defences))
        for name, knows in (("dbsn", True), ("robust", False), ("robust", True)):
            model = defences[name].model if name == "dbsn" else robust
            assert model is not None
            what = f"adaptive to {name}, bank {'known' if knows else 'unknown'}"
            yield row(count, what, attacks.adaptive(count, scene, model, knows_bank=knows), scene.tests, (name,))


def newcomers(scene: Scene) -> Iterator[list[str]]:
    """What half of an honest gallery pays that arrives after the fit, by what it is given, and what ten planted vectors
    reach that are given the same."""
    late, there = half_late(scene)
    plain, robust = Defence("blend", there), Defence("robust", there)
    assert plain.model is not None
    assert robust.model is not None
    planted = attacks.oblivious("k-means of queries", 10, scene)
    constants = {
        "0": 0.0,
        "the smallest of the gallery": float(robust.of_gallery.min()),
        "the floor": floor_of(robust.model),
    }
    given = {
        "`blend`": (plain, plain.given(scene.gallery[late]), plain.given(planted)),
        "robust, scored": (robust, robust.given(scene.gallery[late]), robust.given(planted)),
    }
    for name, value in constants.items():
        both = (np.full(size, value, np.float32) for size in (int(late.sum()), len(planted)))
        given[f"robust, unscored: {name}"] = (robust, *both)
    for name, (defence, honest, forged) in given.items():
        recalls = recalls_of_both(scene, late, defence.of_gallery, honest)
        yield [scene.name, name, *recalls, cell(defence.reach(planted, scene.tests, forged))]


def variants(scene: Scene) -> Iterator[list[str]]:
    """What newcomers pay, and what ten planted vectors reach, where one number of their bound is another."""
    late, there = half_late(scene)
    half, whole = Defence("robust", there), Defence("robust", scene)
    assert half.model is not None
    assert whole.model is not None
    fitted = (half.model, whole.model)
    blind = attacks.oblivious("k-means of queries", 10, scene)
    for name, (share, tau) in VARIANTS.items():
        half.model, whole.model = (
            model.having(bound=replace(model.bound, share=share * model.bound.share, tau=tau * model.bound.tau))
            for model in fitted
            if model.bound is not None
        )
        recalls = recalls_of_both(scene, late, half.of_gallery, half.given(scene.gallery[late]))
        known = attacks.climbed(scene.public, 10, scene, attacks.differentiable(whole.model), whole.of_gallery)
        reached = [cell(whole.reach(planted, scene.tests)) for planted in (blind, known)]
        yield [scene.name, name, *recalls, *reached]


def half_late(scene: Scene) -> tuple[np.ndarray, Scene]:
    """Which half of the gallery arrives late, and the scene before."""
    late = np.random.default_rng(1).random(len(scene.gallery)) < 0.5
    return late, replace(scene, gallery=scene.gallery[~late])


def recalls_of_both(scene: Scene, late: np.ndarray, early: np.ndarray, given: np.ndarray) -> list[str]:
    """R@1 of the tests that ask for what was there `early`, with these offsets, and for what came `late` and was
    `given` others."""
    offsets = np.zeros(len(scene.gallery), np.float32)
    offsets[~late], offsets[late] = early, given
    right = (scene.tests @ scene.gallery.T + offsets).argmax(axis=1) == scene.truth
    mine = late[scene.truth]
    return [f"{100 * right[which].mean():.1f}" for which in (~mine, mine)]


def honest(scene: Scene) -> Iterator[list[str]]:
    """What as many targets reach that nobody planted, drawn at random, by the default: of all, and of one topic."""
    defence, topic, rng = Defence("blend", scene), attacks.cluster_of(scene), np.random.default_rng(0)

    def reached(tests: np.ndarray, targets: np.ndarray, count: int) -> str:
        scores = tests @ scene.gallery.T + defence.of_gallery
        found = np.argpartition(-scores, NEAREST, axis=1)[:, :NEAREST]
        drawn = (rng.choice(targets, min(count, len(targets)), replace=False) for _ in range(DRAWS))
        return f"{100 * np.mean([np.isin(found, some).any(axis=1).mean() for some in drawn]):.1f}"

    for count in counts(scene):
        of_topic = reached(topic.tests, topic.truth, count) if count < COUNTS[-1] else ""
        yield [scene.name, str(count), reached(scene.tests, np.arange(len(scene.gallery)), count), of_topic]


def planted_before(scene: Scene) -> Iterator[list[str]]:
    """What is reached by vectors that were in the gallery when the correction was fitted."""
    beside = Defence("raw", scene)
    for count in counts(scene)[1:]:
        for kind in OBLIVIOUS[:2]:
            planted = attacks.oblivious(kind, count, scene)
            poisoned = replace(scene, gallery=np.concatenate([scene.gallery, planted]))
            row = [scene.name, str(count), kind]
            for name in ("raw", "blend", "dbsn", "robust"):
                beside.of_gallery, given = np.split(Defence(name, poisoned).of_gallery, [len(scene.gallery)])
                row.append(cell(beside.reach(planted, scene.tests, given)))
            yield row


def members(family: Family) -> Iterator[list[str]]:
    """R@1 of a gallery that nobody attacks: raw, by the default, robust, and with members bounded twice as much."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for seed in range(min(SPLITS, family.splits)):
        setting = family.draw(seed)
        model = hubplugin.fit(setting.targets, setting.bank, robust=True)
        assert model.bound is not None
        halved = replace(model.bound, members_share=model.bound.members_share / 2)
        given = [model.having(bound=bound).members.offsets(setting.targets) for bound in (None, model.bound, halved)]
        for test, (queries, truth) in setting.tests.items():
            scores = queries @ setting.targets.T
            right = [100 * float(((scores + each).argmax(axis=1) == truth).mean()) for each in (0.0, *given)]
            found.setdefault(f"{family.name}: {test}" if test else family.name, []).append(tuple(right))
    for name, lines in found.items():
        yield [name, *(f"{value:.1f}" for value in np.mean(lines, axis=0))]


def detectors(scene: Scene, planted: np.ndarray) -> dict[str, np.ndarray]:
    """How suspicious each target of the gallery and each planted vector looks, by what is at hand: [n + p] each."""
    targets = np.concatenate([scene.gallery, planted])
    model = hubplugin.fit(scene.gallery, scene.bank, "dbsn")
    found = np.argsort(-(scene.bank @ targets.T), axis=1)[:, :NEAREST]
    near = np.sort(targets @ scene.gallery.T, axis=1)[:, -6:-1].mean(axis=1)
    return {
        "found by the bank, raw": np.bincount(found.ravel(), minlength=len(targets)).astype(float),
        "as HubScan describes": _hub_scores(found, scene.bank, len(targets)),
        "penalty by `dbsn`": -model.offsets(targets),
        "far from the gallery": -near,
    }


def _hub_scores(found: np.ndarray, bank: np.ndarray, targets: int) -> np.ndarray:
    """HubScan's idea, written from its description: hits weighted by rank, as a robust z-score over the whole bank, and
    the largest of those within clusters of it."""
    labels = attacks.clusters(bank, attacks.CLUSTERS)
    weights = np.broadcast_to(1 / np.log2(np.arange(2, NEAREST + 2)), found.shape)

    def z_score(rows: np.ndarray) -> np.ndarray:
        hits = np.bincount(found[rows].ravel(), weights[rows].ravel(), targets) / len(rows)
        middle = np.median(hits)
        spread = 1.4826 * np.median(np.abs(hits - middle))
        return (hits - middle) / max(spread, float(hits.std()), 1e-9)

    parts = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return np.max([z_score(rows) for rows in (np.arange(len(bank)), *parts) if len(rows) >= NEAREST], axis=0)


def detected(scene: Scene, robust: Defence) -> Iterator[list[str]]:
    """Precision and recall of each detector at stated rates of alerts."""
    assert robust.model is not None
    for count in counts(scene):
        kinds = {
            "gradient": attacks.oblivious("gradient", count, scene),
            "adaptive, bank unknown": attacks.adaptive(count, scene, robust.model, knows_bank=False),
        }
        for kind, planted in kinds.items():
            for name, scores in detectors(scene, planted).items():
                order = np.argsort(-scores, kind="stable")
                cells = []
                for rate in ALERTS:
                    alerts = max(round(rate * len(scores)), 1)
                    hits = int((order[:alerts] >= len(scene.gallery)).sum())
                    cells.append(f"{hits / alerts:.2f}/{hits / len(planted):.2f}")
                yield [scene.name, str(count), kind, name, *cells]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--only", help="the scenes whose names begin so")
    parser.add_argument("--write", type=Path, help="the page whose tables are replaced")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tables: dict[str, list[list[str]]] = {
        name: [] for name in ("attacks", "honest", "before", "newcomers", "variants", "members", "detection")
    }
    for scene in attacks.scenes(asked.data):
        if asked.only and not scene.name.startswith(asked.only):
            continue
        defences = {name: Defence(name, scene) for name in ("raw", *METHODS, "robust")}
        tables["newcomers"] += newcomers(scene)
        tables["variants"] += variants(scene)
        tables["attacks"] += attacked(scene, defences)
        tables["honest"] += honest(scene)
        tables["before"] += planted_before(scene)
        tables["detection"] += detected(scene, defences["robust"])
    for family in () if asked.only else seventeen(asked.data):
        tables["members"] += members(family)
    heads = {
        "variants": ["gallery", "changed", "R@1 of members", "R@1 of newcomers", "k-means", "adaptive, bank known"],
        "honest": ["gallery", "honest targets", "of all queries", "of the queries of their topic"],
        "before": ["gallery", "planted", "attack", "raw", "blend", "dbsn", "robust"],
        "members": ["setting", "raw", "`blend`", "robust", "robust, members bounded twice as much"],
        "attacks": ["gallery", "planted", "attack", "raw", *METHODS, "robust", "R@1 robust: clean, attacked"],
        "newcomers": ["gallery", "newcomers get", "R@1 of members", "R@1 of newcomers", "10 planted"],
        "detection": ["gallery", "planted", "attack", "detector", *(f"alerts {100 * rate:g} %" for rate in ALERTS)],
    }
    for name, rows in tables.items():
        table = markdown(heads[name], rows)
        print(table, flush=True)
        if asked.write is not None:
            write_table(asked.write, name, table)


if __name__ == "__main__":
    main(sys.argv[1:])
