"""Vectors planted to lie near every query, made up for `benchmarks.planted`, and the galleries they go to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

import hubplugin
from benchmarks.tables import EXAMPLES
from hubplugin import OffsetModel
from hubplugin.compute import ANSWER_SLACK, MOST_ANSWERS, clusters
from hubplugin.model import Dot, LogSumExp
from hubplugin.model.offset_model import WIDER

NEAREST, STEPS, STEP, CLUSTERS = 10, 80, 0.01, 10

Offsets = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Scene:
    """A gallery [n, d], the defender's bank, the queries that an attacker knows, and those that count: test query i
    asks for row truth[i]. No query is in two of them."""

    name: str
    gallery: np.ndarray
    bank: np.ndarray
    public: np.ndarray
    tests: np.ndarray
    truth: np.ndarray


def unit(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def scenes(data: Path) -> Iterator[Scene]:
    """The examples, and what `data` has: text and images, code, and two languages."""
    bank, gallery, tests = (
        unit(np.load(EXAMPLES / f"{n}.npy")) for n in ("bank_queries", "test_targets", "test_queries")
    )
    yield Scene("examples, 1,200", gallery, bank[:1500], bank[1500:], tests, np.arange(len(tests)))
    if (data / "coco500").is_dir():
        q, t = (unit(np.load(data / "coco500" / f"{n}.npy")) for n in ("queries", "targets"))
        rows = np.random.default_rng(0).permutation(len(q))
        mine = rows[:200]
        yield Scene("text to image, 200", t[mine], q[rows[200:400]], q[rows[400:]], q[mine], np.arange(200))
    if (data / "tldr_ko").is_dir():
        q, t = (unit(np.load(data / "tldr_ko" / f"{n}.npy")) for n in ("queries", "targets"))
        rows = np.random.default_rng(0).permutation(len(q))
        mine = rows[:800]
        yield Scene("two languages, 800", t[mine], q[rows[800:1500]], q[rows[1500:]], q[mine], np.arange(800))
    if (data / "code_search").is_dir():
        bank, q, t = (
            unit(np.load(data / "code_search" / f"{n}.npy")) for n in ("bank_queries", "test_queries", "test_targets")
        )
        yield Scene("code, 5,000", t, bank[:2500], bank[2500:4500], q[::2], np.arange(0, len(q), 2))


def differentiable(model: OffsetModel) -> Offsets:
    """What `model.offsets` gives newcomers, in torch, so that an attacker can follow its gradient."""
    bound = model.bound
    levels = None if bound is None else torch.from_numpy(np.asarray(bound.levels, np.float32))

    def offsets(rows: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(rows)) - model.centre
        for term in model.terms:
            assert not isinstance(term, Dot)
            s = rows @ torch.from_numpy(term.bank).T
            if term.answers is not None:
                s = _without_answers(s, torch.from_numpy(np.asarray(term.answers, np.float32)))
            if isinstance(term, LogSumExp):
                weights = 0 if term.log_weights is None else torch.from_numpy(np.asarray(term.log_weights, np.float32))
                total = total + term.scale * torch.logsumexp(s / term.tau + weights, 1)
            else:
                total = total + term.scale * s.topk(term.k, 1).values.mean(1)
        if model.gallery is not None:
            total = total.clamp(max=model.gallery.cap)
        if bound is None or levels is None:
            return total
        s = rows @ torch.from_numpy(model.terms[0].bank).T
        return _lowered(total, s - levels, WIDER * bound.tau, bound.share * len(levels) / 2)

    return offsets


def _lowered(offsets: torch.Tensor, above: torch.Tensor, tau: float, count: float) -> torch.Tensor:
    """`offsets` [n] within a `Bound`, with its gradient: that of the equation which a lowered offset solves."""
    low, high = torch.full_like(offsets, -10.0), offsets.detach()
    with torch.no_grad():
        for _ in range(40):
            middle = (low + high) / 2
            over = torch.sigmoid((above + middle[:, None]) / tau).sum(1) > count
            low, high = torch.where(over, low, middle), torch.where(over, middle, high)
        values = torch.sigmoid((above + low[:, None]) / tau)
        slope = (values * (1 - values)).sum(1) / tau
    total = torch.sigmoid((above + low[:, None]) / tau).sum(1)
    solved = low - (total - total.detach()) / slope.clamp(min=1e-9)
    return torch.where(low < offsets.detach() - 1e-6, solved, offsets)


def _without_answers(s: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Similarities [n, m] without the entries that are left out; see `hubplugin.compute.LeftOut`."""
    reached = s >= levels - ANSWER_SLACK
    reached &= reached.float().mean(1, keepdim=True) <= MOST_ANSWERS
    s = s.masked_fill(reached, -torch.inf)
    return s.scatter(1, s.argmax(1, keepdim=True), -torch.inf)


def centroids(queries: np.ndarray, count: int) -> torch.Tensor:
    """The centre of `queries`, or their k-means."""
    labels = clusters(queries, count)
    centres = [queries[labels == label].mean(axis=0) for label in range(count) if (labels == label).any()]
    return normalize(torch.from_numpy(np.array(centres, np.float32)))


def climbed(
    queries: np.ndarray, count: int, scene: Scene, offsets: Offsets | None, of_gallery: np.ndarray
) -> np.ndarray:
    """Adam on how far the best planted vector lies above each query's 10th best, softly, and ever more sharply.

    offsets: what planted vectors get, for an attacker who knows; `of_gallery` [n] likewise.
    """
    known, generator = torch.from_numpy(queries), torch.Generator().manual_seed(0)
    scores = known @ torch.from_numpy(scene.gallery).T + torch.from_numpy(of_gallery)
    levels, rows = scores.topk(NEAREST, 1).values[:, -1], centroids(queries, count).requires_grad_(True)
    adam = torch.optim.Adam([rows], STEP)
    for step in range(STEPS):
        planted, some = normalize(rows), torch.randperm(len(known), generator=generator)[:1000]
        s = known[some] @ planted.T
        s = s if offsets is None else s + offsets(planted)
        width = 0.05 * 0.1 ** (step / STEPS)
        loss = -torch.sigmoid((width * torch.logsumexp(s / width, 1) - levels[some]) / width).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return normalize(rows.detach()).numpy()


def oblivious(kind: str, count: int, scene: Scene, queries: np.ndarray | None = None) -> np.ndarray:
    """Vectors of an attacker who aims at the raw search."""
    aimed = scene.bank if kind == "gradient on the bank" else scene.public if queries is None else queries
    if kind == "k-means of queries":
        return centroids(aimed, count).numpy()
    return climbed(aimed, count, scene, None, np.zeros(len(scene.gallery), np.float32))


def adaptive(count: int, scene: Scene, model: OffsetModel, *, knows_bank: bool) -> np.ndarray:
    """Vectors of an attacker who aims at the corrected search: by `model` itself, or by one that is fitted in the same
    way on half of the public queries, whose other half is aimed at."""
    aimed = scene.public
    if not knows_bank:
        half = len(aimed) // 2
        robust = model.bound is not None
        model = hubplugin.fit(scene.gallery, aimed[:half], model.method, robust=robust)
        aimed = aimed[half:]
    return climbed(aimed, count, scene, differentiable(model), model.members.offsets(scene.gallery))


def cluster_of(scene: Scene) -> Scene:
    """The scene of one topic: the queries nearest to the middle one, by size, of ten clusters of the public ones."""
    labels = clusters(scene.public, CLUSTERS)
    sizes = np.bincount(labels, minlength=CLUSTERS)
    centres = np.array([scene.public[labels == label].mean(axis=0) for label in np.flatnonzero(sizes)])
    chosen = int(np.argsort(sizes[sizes > 0])[len(centres) // 2])

    def inside(queries: np.ndarray) -> np.ndarray:
        found: np.ndarray = (queries @ centres.T - (centres**2).sum(axis=1) / 2).argmax(axis=1) == chosen
        return found

    tests = inside(scene.tests)
    return replace(scene, public=scene.public[inside(scene.public)], tests=scene.tests[tests], truth=scene.truth[tests])
