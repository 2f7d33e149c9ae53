"""How a store is made for a test, and what is asked of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import pytest

from hubplugin.fitting import fit
from hubplugin.jobs.inspection import inspect
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.store import Hits, Id, Store

K = 10

MOMENTS = ("begun", "within a batch", "behind a batch", "all written")
"""When a run is killed."""


class StoreUnderTest(ABC):
    """A store that tests fill, write and search.

    rows, dim: the size of the gallery in the tests. recall: the least share of the exact corrected top 10 that
    a search must return; 1.0 for an exact store. metric: that of the store that `create` makes.
    """

    rows: int = 300
    dim: int = 24
    recall: float = 1.0
    metric: Metric = Metric.COSINE

    @abstractmethod
    def create(self, ids: Sequence[Id], vectors: np.ndarray) -> Store:
        """A fresh store that holds `vectors` [n, d] under `ids`, as its user would have filled it."""

    @abstractmethod
    def reopen(self, store: Store) -> Store:
        """The data of `store` opened anew, as another process would; `store` is not used again."""

    def insert_plain(self, store: Store, ids: Sequence[Id], vectors: np.ndarray) -> Store:
        """Adds targets past hubplugin, as another program would. Leave it out where the store cannot."""
        pytest.skip("this store takes no targets past hubplugin")

    def ids(self) -> list[Id]:
        """Ids of the gallery; override it for a store that takes strings."""
        return list(range(self.rows))

    def fresh_ids(self) -> list[Id]:
        """Five ids that are not in the gallery, of the same kind."""
        return list(range(self.rows, self.rows + 5))

    def vectors(self) -> np.ndarray:
        """The gallery: clustered, so that it has hubs; at unit length where the metric is cosine."""
        rng = np.random.default_rng(1)
        centres = rng.normal(size=(8, self.dim))
        return self._scaled(centres[rng.integers(8, size=self.rows)] + rng.normal(size=(self.rows, self.dim)))

    def queries(self, seed: int = 2, count: int = 40) -> np.ndarray:
        rng = np.random.default_rng(seed)
        near = self.vectors()[rng.integers(self.rows, size=count)]
        scale = 0.5 * float(np.abs(near).mean())
        return self._scaled(near + scale * rng.normal(size=near.shape))

    @pytest.fixture
    def store(self) -> Store:
        return self.create(self.ids(), self.vectors())

    def _model(self, method: str = "is") -> OffsetModel:
        return fit(self.queries(seed=4, count=200), method, targets=self.vectors(), metric=self.metric)

    def _scaled(self, vectors: np.ndarray) -> np.ndarray:
        if self.metric is Metric.COSINE:
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors.astype(np.float32)

    def _assert_whole(self, store: Store, model: OffsetModel) -> None:
        found, report = store.correction(), inspect(store, probes=0)
        assert found is not None
        assert found.active
        assert found.model.fingerprint == model.fingerprint
        assert (report.missing, report.stale) == (0, 0)
        self._assert_ranking(store.search(self.queries(), K), model)

    def _write_until(self, moment: str, store: Store, model: OffsetModel) -> list[Id]:
        """A run that is killed at one of MOMENTS; the ids of what it wrote."""
        writing = store.begin(model)
        written: list[Id] = []
        for batch in writing.scan() if moment != "begun" else ():
            part = batch.some(np.arange(len(batch.ids) // 2)) if moment == "within a batch" else batch
            writing.write(part, model.offsets(part.vectors))
            written += part.ids
            if moment != "all written":
                break
        return written

    def _assert_ranking(self, hits: Hits, model: OffsetModel | None, fresh: np.ndarray | None = None) -> None:
        """`hits` are the exact ranking, up to ties and to the recall that the store promises.

        `fresh` are targets behind the gallery, with the offset 0.
        """
        ids, gallery = self.ids(), self.vectors()
        offsets = np.zeros(len(ids)) if model is None else model.offsets(gallery).astype(np.float64)
        if fresh is not None:
            ids, gallery = ids + self.fresh_ids(), np.concatenate([gallery, fresh])
            offsets = np.concatenate([offsets, np.zeros(len(fresh))])
        queries, targets = self.queries().astype(np.float64), gallery.astype(np.float64)
        if self.metric is Metric.EUCLIDEAN:
            scores = -((queries[:, None, :] - targets[None, :, :]) ** 2).sum(axis=2) / 2
        else:
            scores = np.einsum("qd,td->qt", queries, targets)
        scores = scores + offsets
        row = {key: number for number, key in enumerate(ids)}
        found = np.array([[row[key] for key in line] for line in hits.ids])
        assert found.shape == (len(queries), K)
        least = np.sort(scores, axis=1)[:, -K][:, None] - 1e-5
        assert (np.take_along_axis(scores, found, axis=1) >= least).mean() >= self.recall
        for line in hits.scores:
            assert list(line) == sorted(line, reverse=True) or list(line) == sorted(line)
