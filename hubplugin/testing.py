"""Tests that every adapter must pass; its author runs them on the adapter's store.

    from hubplugin.testing import StoreConformance

    class TestMyStore(StoreConformance):
        def create(self, ids, vectors):
            return MyStore(...)  # a fresh store, filled with these

        def reopen(self, store):
            return MyStore(...)  # the same data, as another process would open it

The tests need pytest. They run against the real store; there is nothing to mock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from hubplugin.bank import Bank
from hubplugin.errors import HubpluginError, InputError, StoreError
from hubplugin.fitting import fit
from hubplugin.jobs.correct import apply, refit
from hubplugin.jobs.health import inspect
from hubplugin.jobs.write import refresh, rollback, write
from hubplugin.measures.hubness import skewness
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, QueryMap
from hubplugin.store import Hits, Id, Store

K = 10

at_each_moment = pytest.mark.parametrize(
    "moment", ["begun", "within a batch", "behind a batch", "all written", "raised"]
)
"""The moments at which `_cut_off` ends a run."""

with_and_without_a_map = pytest.mark.parametrize(
    "mapped", [False, True], ids=["offsets", "query map"]
)


class Gallery(ABC):
    """A gallery in a store of the adapter, with assertions about it.

    rows, dim: The size of the gallery in the tests.
    recall: The share of the exact corrected top 10 that a search must at least return;
        1.0 for an exact store.
    metric: The metric of the store that `create` makes.
    resumes: False for a store that is a single file, where the next run writes again
        what a killed run has written.
    """

    rows: int = 300
    dim: int = 24
    recall: float = 1.0
    metric: Metric = Metric.COSINE
    resumes: bool = True

    @abstractmethod
    def create(self, ids: Sequence[Id], vectors: np.ndarray) -> Store:
        """Return a fresh store, filled as its user would fill it.

        Args:
            ids: The ids of the targets [n].
            vectors: The vectors of the targets [n, d], in the same order.
        """

    @abstractmethod
    def reopen(self, store: Store) -> Store:
        """Return a new store on the data of `store`, as another process would open it.

        The tests do not use `store` again.
        """

    def insert_plain(
        self, store: Store, ids: Sequence[Id], vectors: np.ndarray
    ) -> Store:
        """Add targets without hubplugin, as another program would.

        Do not override this method if the store cannot take such targets.

        Args:
            store: The store to add them to. If a query map runs before the store, the
                targets are added behind the map.
            ids: The ids of the new targets [n].
            vectors: The vectors of the new targets [n, d], in the same order.

        Returns:
            The store that the tests go on with.
        """
        pytest.skip("this store takes no targets past hubplugin")

    def ids(self) -> list[Id]:
        """Return the ids of the gallery. Override it for a store that takes strings."""
        return list(range(self.rows))

    def fresh_ids(self) -> list[Id]:
        """Return five ids that are not in the gallery, of the same kind."""
        return list(range(self.rows, self.rows + 5))

    def vectors(self) -> np.ndarray:
        """Return the gallery: clustered, so that it has hubs; unit length for cosine."""
        rng = np.random.default_rng(1)
        centres = rng.normal(size=(8, self.dim))[rng.integers(8, size=self.rows)]
        return self._scale(centres + rng.normal(size=(self.rows, self.dim)))

    def queries(self, seed: int = 2, count: int = 40) -> np.ndarray:
        """Return queries near targets of the gallery."""
        rng = np.random.default_rng(seed)
        targets = self.vectors()[rng.integers(self.rows, size=count)]
        scale = 0.5 * float(np.abs(targets).mean())
        return self._scale(targets + scale * rng.normal(size=targets.shape))

    @pytest.fixture
    def store(self) -> Store:
        return self.create(self.ids(), self.vectors())

    def _scale(self, vectors: np.ndarray) -> np.ndarray:
        """Return `vectors` [n, d] as float32, at unit length for cosine."""
        if self.metric is Metric.COSINE:
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors.astype(np.float32)

    def _model(self, method: str = "is") -> OffsetModel:
        """Return a model of the gallery without a query map."""
        bank = self.queries(seed=4, count=200)
        return fit(self.vectors(), bank, method, metric=self.metric)

    def _models(self, store: Store, mapped: bool) -> tuple[OffsetModel, OffsetModel]:
        """Return two models. If `mapped`, their query maps change most rankings."""
        if not mapped:
            return self._model(), self._model("nnn")
        if not store.maps_queries or self.metric is Metric.EUCLIDEAN:
            pytest.skip("this store holds no map")
        return self._mapped_model(seed=5), self._mapped_model(seed=6)

    def _mapped_model(self, seed: int) -> OffsetModel:
        """Return a model with a random query map that claims to come from 200 pairs."""
        step = 0.1 * np.random.default_rng(seed).normal(size=(self.dim, self.dim))
        query_map = QueryMap(step.astype(np.float32), 1.0, 200)
        mapped = replace(self._model(), query_map=query_map)
        return mapped.centre_on(self.vectors())

    def _pairs(self, store: Store) -> tuple[np.ndarray, np.ndarray]:
        """Return two queries for each target, and the ids of their targets.

        The queries are turned away from the targets; a query map can turn them back.
        """
        self._models(store, mapped=True)  # skips the test if the store holds no map
        rng = np.random.default_rng(8)
        vectors = self.vectors()
        turn = np.eye(self.dim) + 0.3 * rng.normal(size=(self.dim, self.dim))
        noisy = vectors + 0.1 * vectors.std() * rng.normal(size=vectors.shape)
        queries = np.concatenate([vectors, noisy]) @ np.linalg.inv(turn)
        return self._scale(queries), np.array(2 * self.ids())

    def _cut_off(
        self, moment: str, store: Store, model: OffsetModel
    ) -> tuple[Store, list[Id]]:
        """Begin to write `model`, and end the run at a `moment`.

        Args:
            moment: "begun": killed before the first batch. "within a batch": killed
                after half of the first batch. "behind a batch": killed after the first
                batch. "all written": killed before the activation. "raised": an error
                is raised after half of the first batch.
            store: The store; it is not used again.
            model: The model that the run writes.

        Returns:
            The store as another process opens it, and the ids of the targets whose
            offsets were written.
        """
        writing = store.begin(model)
        written: list[Id] = []
        if moment == "begun":
            return self.reopen(store), written
        for batch in writing.scan():
            if moment in ("within a batch", "raised"):
                batch = batch.take(np.arange(len(batch.ids) // 2))
            writing.write(batch, model.offsets(batch.vectors))
            written += batch.ids
            if moment != "all written":
                break
        if moment == "raised":
            # The error leaves the `with` statement, so the writing is closed.
            with pytest.raises(KeyboardInterrupt), writing:
                raise KeyboardInterrupt
        return self.reopen(store), written

    def _assert_active(
        self, store: Store, model: OffsetModel, previous: OffsetModel | None = None
    ) -> Store:
        """Assert that `model` is active and complete, and that searches rank by it.

        `previous` is the model that `rollback` would write. Returns the store,
        reopened.
        """
        store = self.reopen(store)
        correction = store.correction()
        assert correction is not None
        assert correction.active
        assert correction.model.fingerprint == model.fingerprint
        self._assert_counts(store, self.rows)
        self._assert_ranking(store, model)
        if previous is not None:
            stored = store.previous()
            assert stored is not None
            assert stored.fingerprint == previous.fingerprint
        return store

    def _assert_counts(self, store: Store, count: int, lacking: int = 0) -> None:
        """Assert that an inspection counts `count` targets, `lacking` of them wrong.

        Missing and stale offsets are added up: a store whose neutral offset is an
        ordinary number cannot tell them apart.
        """
        report = inspect(store, queries=0)
        assert (report.count, report.missing + report.stale) == (count, lacking)

    def _assert_ranking(
        self,
        store: Store,
        model: OffsetModel | None,
        fresh: np.ndarray | None = None,
        *,
        refreshed: bool = False,
    ) -> None:
        """Assert that searches return the exact rankings, raw and by `model`.

        Results may differ from these in ties, and as far as `recall` allows. `fresh`
        are the vectors of targets that were added to the gallery, in the order of
        `fresh_ids`. Their offset is 0 until a refresh; `refreshed` is True after it.
        """
        vectors = self.vectors()
        if fresh is not None:
            vectors = np.concatenate([vectors, fresh])
        raw = store.search(self.queries(), K, raw=True)
        self._assert_hits(raw, self._similarities(None, vectors))
        offsets = np.zeros(len(vectors))
        if model is not None:
            offsets += model.offsets(vectors)
        if not refreshed:
            offsets[self.rows :] = 0
        scores = self._similarities(model, vectors) + offsets
        self._assert_hits(store.search(self.queries(), K), scores)

    def _assert_hits(self, hits: Hits, scores: np.ndarray) -> None:
        """Assert that `hits` have the K largest `scores` [q, t], in sorted order."""
        ids = self.ids() + self.fresh_ids()
        ranked = np.array([[ids.index(key) for key in found] for found in hits.ids])
        assert ranked.shape == (len(scores), K)
        # Any target that ties with the K-th best is right.
        kth_score = np.sort(scores, axis=1)[:, -K][:, None]
        is_right = np.take_along_axis(scores, ranked, axis=1) >= kth_score - 1e-5
        assert is_right.mean() >= self.recall
        # A store's scores may be similarities, which fall, or distances, which rise.
        for row in map(list, hits.scores):
            assert sorted(row) in (row, row[::-1])

    def _similarities(
        self, model: OffsetModel | None, vectors: np.ndarray
    ) -> np.ndarray:
        """Return the similarities [q, t] of queries, mapped by `model`, in float64."""
        queries = self.queries().astype(np.float64)
        targets = vectors.astype(np.float64)
        if model is not None and model.query_map is not None:
            queries = queries + queries @ model.query_map.step.astype(np.float64).T
        similarities: np.ndarray = queries @ targets.T
        if self.metric is Metric.EUCLIDEAN:
            # -|q - t|^2 / 2 = q.t - (|q|^2 + |t|^2) / 2
            lengths = (queries**2).sum(axis=1)[:, None] + (targets**2).sum(axis=1)
            similarities -= lengths / 2
        return similarities

    def _assert_stored(self, store: Store, model: OffsetModel | None) -> None:
        """Assert that a scan yields each target once, with its offset under `model`."""
        gallery_ids = self.ids()
        ids: list[Id] = []
        for batch in store.scan():
            ids += batch.ids
            vectors = self.vectors()[[gallery_ids.index(key) for key in batch.ids]]
            if model is None:
                offsets = np.full(len(vectors), np.nan)
                tolerance = 1e-6
            else:
                offsets = model.offsets(vectors)
                tolerance = max(store.precision, 1e-5)
            np.testing.assert_allclose(batch.vectors, vectors, rtol=0, atol=tolerance)
            np.testing.assert_allclose(batch.offsets, offsets, rtol=0, atol=tolerance)
        assert sorted(ids, key=str) == sorted(gallery_ids, key=str)

    def _assert_raw(self, store: Store) -> Store:
        """Assert that the store is in the state of one that was never corrected.

        Returns the store, reopened.
        """
        store = self.reopen(store)
        assert store.correction() is None
        assert store.previous() is None
        self._assert_stored(store, None)
        assert store.count() == self.rows
        assert (store.dim, store.metric) == (self.dim, self.metric)
        self._assert_ranking(store, None)
        return store


class StoreConformance(Gallery):
    """The tests. Subclass it as `Test...` and define how a store is made."""

    def test_without_a_correction_a_scan_sees_every_vector_once_and_searches_are_raw(
        self, store: Store
    ) -> None:
        self._assert_raw(store)

    @with_and_without_a_map
    def test_searches_return_the_exact_corrected_ranking_and_a_refresh_keeps_it(
        self, store: Store, mapped: bool
    ) -> None:
        model, _ = self._models(store, mapped)
        applied = write(store, model)
        assert (applied.scanned, applied.missing) == (self.rows, self.rows)
        self._assert_ranking(store, model)
        store = self._assert_active(store, model)
        self._assert_stored(store, model)
        again = refresh(store)
        assert (again.scanned, again.missing, again.stale) == (self.rows, 0, 0)
        self._assert_ranking(store, model)

    @with_and_without_a_map
    def test_searches_stay_as_they_are_until_another_correction_takes_their_place(
        self, store: Store, mapped: bool
    ) -> None:
        first, second = self._models(store, mapped)
        for active, model in ((None, first), (first, second)):
            # Until `activate`, searches and scans must not change.
            hits = store.search(self.queries(), K)
            with store.begin(model) as writing:
                for batch in writing.scan():
                    assert np.isnan(batch.offsets).all()
                    writing.write(batch, model.offsets(batch.vectors))
                    assert store.search(self.queries(), K).ids == hits.ids
                self._assert_stored(store, active)
                correction = store.correction()
                assert correction is not None
                assert correction.active is (active is not None)
                writing.activate()
            self._assert_ranking(store, model)
        self._assert_active(store, second, previous=first)

    @with_and_without_a_map
    @at_each_moment
    def test_a_run_that_was_cut_off_goes_on_and_is_finished_by_the_next(
        self, store: Store, moment: str, mapped: bool
    ) -> None:
        model, _ = self._models(store, mapped)
        store, written = self._cut_off(moment, store, model)
        correction = store.correction()
        assert correction is None or not correction.active
        self._assert_ranking(store, None)
        to_write: list[Id] = []
        with store.begin(model) as writing:
            for batch in writing.scan():
                lacking = np.flatnonzero(np.isnan(batch.offsets))
                to_write += batch.take(lacking).ids
        # A store that resumes offers only the targets that the killed run had left.
        # Any other store offers all targets again.
        if self.resumes:
            to_write += written
        assert sorted(to_write, key=str) == sorted(self.ids(), key=str)
        write(store, model)
        self._assert_active(store, model)

    def test_an_amendment_that_was_cut_off_changes_no_search_and_is_finished_by_the_next(
        self, store: Store
    ) -> None:
        model = self._model()
        write(store, model)
        hits = store.search(self.queries(), K)
        store, _ = self._cut_off("within a batch", store, model)
        # A write may change which near targets an approximate index finds.
        again = store.search(self.queries(), K)
        pairs = zip(hits.ids, again.ids, strict=True)
        shared = [len({*first} & {*second}) for first, second in pairs]
        assert np.mean(shared) >= self.recall * K
        write(store, model)
        self._assert_active(store, model)

    def test_another_model_takes_the_place_of_a_half_written_one(
        self, store: Store
    ) -> None:
        store, _ = self._cut_off("within a batch", store, self._model())
        second = self._model("nnn")
        write(store, second)
        self._assert_active(store, second)

    @with_and_without_a_map
    def test_targets_added_by_another_program_are_found_and_refreshed(
        self, store: Store, mapped: bool
    ) -> None:
        model, _ = self._models(store, mapped)
        write(store, model)
        fresh = self.queries(seed=3, count=5)
        store = self.insert_plain(store, self.fresh_ids(), fresh)
        if not mapped:  # a mapped query need not find the target that equals it
            hits = store.search(fresh, K)
            for key, ids in zip(self.fresh_ids(), hits.ids, strict=True):
                assert key in ids
        self._assert_counts(store, self.rows + 5, lacking=5)
        applied = refresh(store)
        assert applied.missing + applied.stale == 5
        store = self.reopen(store)
        self._assert_counts(store, self.rows + 5)
        self._assert_ranking(store, model, fresh, refreshed=True)

    def test_a_target_without_an_offset_is_neither_lifted_nor_sunk(
        self, store: Store
    ) -> None:
        model = self._model()
        write(store, model)
        fresh = self.queries(seed=3, count=5)
        store = self.insert_plain(store, self.fresh_ids(), fresh)
        self._assert_ranking(store, model, fresh)

    @pytest.mark.parametrize("state", ["nothing", "half", "offsets", "query map"])
    def test_a_removal_leaves_the_store_as_it_was(
        self, store: Store, state: str
    ) -> None:
        models = self._models(store, mapped=state == "query map")
        raw = store.search(self.queries(), K)
        if state == "half":
            store, _ = self._cut_off("within a batch", store, models[0])
        elif state != "nothing":
            for model in models:
                write(store, model)
        store.remove()
        after = self._assert_raw(store).search(self.queries(), K)
        assert after.ids == raw.ids
        np.testing.assert_allclose(after.scores, raw.scores, rtol=0, atol=1e-5)

    def test_what_does_not_fit_the_store_is_refused_and_changes_nothing(
        self, store: Store
    ) -> None:
        wrong = np.ones((3, self.dim + 1), np.float32)
        wrong_metric = Metric.EUCLIDEAN
        if self.metric is wrong_metric:
            wrong_metric = Metric.DOT
        with pytest.raises(HubpluginError, match=str(self.dim + 1)):
            apply(store, wrong)
        with pytest.raises(HubpluginError, match=wrong_metric.value):
            write(store, fit(self.vectors(), self.queries(), "is", metric=wrong_metric))
        with pytest.raises(StoreError, match="no correction"):
            refresh(store)
        if not store.maps_queries:
            for job in (write, apply):
                with pytest.raises(InputError, match="has a query map"):
                    job(store, self._mapped_model(seed=5))
        self._assert_raw(store)

    @with_and_without_a_map
    def test_a_rollback_writes_the_model_before_and_a_second_one_returns(
        self, store: Store, mapped: bool
    ) -> None:
        first = self._model("csls")
        second, _ = self._models(store, mapped)
        write(store, first)
        with pytest.raises(StoreError, match="before"):
            rollback(store)
        write(store, second)
        for restored, active in ((first, second), (second, first)):
            # A dry run must change nothing.
            planned = rollback(store, dry_run=True)
            assert planned.model.fingerprint == restored.fingerprint
            assert not planned.written
            store = self._assert_active(store, active, previous=restored)
            rollback(store)
            store = self._assert_active(store, restored, previous=active)

    @at_each_moment
    @pytest.mark.parametrize("cut_off", ["the model before", "another model"])
    def test_a_rollback_is_possible_behind_a_run_that_was_cut_off(
        self, store: Store, moment: str, cut_off: str
    ) -> None:
        first, second = self._models(store, mapped=False)
        write(store, first)
        write(store, second)
        model = first if cut_off == "the model before" else self._model("csls")
        store, _ = self._cut_off(moment, store, model)
        store = self._assert_active(store, second, previous=first)
        rollback(store)
        self._assert_active(store, first, previous=second)

    def test_rollback_after_refresh_ranks_later_targets_by_the_previous_model(
        self, store: Store
    ) -> None:
        first, second = self._models(store, mapped=False)
        write(store, first)
        write(store, second)
        fresh = self.queries(seed=3, count=5)
        store = self.insert_plain(store, self.fresh_ids(), fresh)
        refresh(store)
        store = self.reopen(store)
        rollback(store)
        self._assert_counts(store, self.rows + 5)
        self._assert_ranking(store, first, fresh, refreshed=True)

    def test_what_pairs_teach_is_applied_and_learned_anew_by_a_refit(
        self, store: Store
    ) -> None:
        queries, answers = self._pairs(store)
        first = apply(store, Bank(queries, answers), learn=True, force=True).model
        store = self._assert_active(store, first)
        second = refit(store, Bank(queries[:-20], answers[:-20]), force=True).model
        assert second.fingerprint != first.fingerprint
        assert None not in (first.query_map, second.query_map)
        self._assert_active(store, second)

    def test_an_inspection_counts_what_mapped_queries_find(self, store: Store) -> None:
        write(store, self._models(store, mapped=True)[0])
        live = self.queries(seed=7, count=150)
        hubness = inspect(store, live).hubness
        assert hubness is not None
        tolerance = 1e-6 if self.recall == 1 else 0.3
        for reported, raw in ((hubness.raw, True), (hubness.corrected, False)):
            counts = Counter(chain.from_iterable(store.search(live, 10, raw=raw).ids))
            expected = skewness(np.array([counts[key] for key in self.ids()]))
            assert abs(reported - expected) < tolerance
