"""What every adapter must do, as tests that its author runs on his own store.

    from hubplugin.testing import StoreConformance

    class TestMyStore(StoreConformance):
        def create(self, ids, vectors):
            ...fill a fresh store...
            return MyStore(...)

        def reopen(self, store):
            return MyStore(...)  # the same data, as another process would open it

Needs pytest. Every test runs against the real store; there is nothing to mock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hubplugin.bank import Bank
from hubplugin.errors import HubpluginError, InputError, StoreError
from hubplugin.fitting import fit
from hubplugin.jobs.correct import apply, refit
from hubplugin.jobs.health import inspect
from hubplugin.jobs.write import refresh, rollback, write
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel, QueryMap
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
        """Adds targets past hubplugin, as another program would; behind the query map, where one stands before what is
        added, too. Leave it out where the store cannot."""
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
        return fit(self.vectors(), self.queries(seed=4, count=200), method, metric=self.metric)

    def _scaled(self, vectors: np.ndarray) -> np.ndarray:
        if self.metric is Metric.COSINE:
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors.astype(np.float32)

    @staticmethod
    def _active(store: Store) -> OffsetModel:
        found = store.correction()
        assert found is not None
        assert found.active
        return found.model

    def _assert_whole(self, store: Store, model: OffsetModel) -> None:
        report = inspect(store, queries=0)
        assert self._active(store).fingerprint == model.fingerprint
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

    def _assert_ranking(
        self, hits: Hits, model: OffsetModel | None, fresh: np.ndarray | None = None, of_fresh: np.ndarray | None = None
    ) -> None:
        """`hits` are the exact ranking, up to ties and to the recall that the store promises.

        `fresh` are targets behind the gallery, with the offsets `of_fresh`, 0 by default.
        """
        ids, scores = self.ids() + ([] if fresh is None else self.fresh_ids()), self._scores(model, fresh, of_fresh)
        row = {key: number for number, key in enumerate(ids)}
        found = np.array([[row[key] for key in line] for line in hits.ids])
        assert found.shape == (len(scores), K)
        least = np.sort(scores, axis=1)[:, -K][:, None] - 1e-5
        assert (np.take_along_axis(scores, found, axis=1) >= least).mean() >= self.recall
        for line in hits.scores:
            assert list(line) == sorted(line, reverse=True) or list(line) == sorted(line)

    def _scores(
        self,
        model: OffsetModel | None,
        fresh: np.ndarray | None = None,
        of_fresh: np.ndarray | None = None,
        queries: np.ndarray | None = None,
    ) -> np.ndarray:
        """What `_assert_ranking` compares with, in float64: [q, t], of `self.queries()` by default."""
        gallery = self.vectors()
        offsets = np.zeros(len(gallery)) if model is None else model.offsets(gallery).astype(np.float64)
        if fresh is not None:
            gallery = np.concatenate([gallery, fresh])
            offsets = np.concatenate([offsets, np.zeros(len(fresh)) if of_fresh is None else of_fresh])
        asked = (self.queries() if queries is None else queries).astype(np.float64)
        targets = gallery.astype(np.float64)
        if model is not None and model.query_map is not None:
            asked = asked + np.einsum("qd,ed->qe", asked, model.query_map.step.astype(np.float64))
        if self.metric is Metric.EUCLIDEAN:
            scores = -((asked[:, None, :] - targets[None, :, :]) ** 2).sum(axis=2) / 2
        else:
            scores = np.einsum("qd,td->qt", asked, targets)
        return np.asarray(scores + offsets)


class RollbackConformance(StoreUnderTest):
    """The model that was active before is kept, written by `rollback` and removed, where the store keeps it."""

    @pytest.fixture
    def keeping(self, store: Store) -> Store:
        if type(store).previous is Store.previous:
            pytest.skip("this store does not keep the model before")
        return store

    def test_a_rollback_writes_the_model_before_and_a_second_one_returns(self, keeping: Store) -> None:
        store, first, second = keeping, self._model(), self._model("nnn")
        write(store, first)
        with pytest.raises(StoreError, match="before"):
            rollback(store)
        write(store, second)
        for now, before in ((first, second), (second, first)):
            rollback(store)
            store = self.reopen(store)
            self._assert_whole(store, now)
            self._assert_previous(store, before)

    def test_only_the_model_that_was_active_last_is_kept(self, keeping: Store) -> None:
        store, models = keeping, [self._model(method) for method in ("is", "nnn", "csls")]
        for model in models:
            write(store, model)
        store = self.reopen(store)
        self._assert_whole(store, models[2])
        self._assert_previous(store, models[1])

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_rollback_is_possible_while_another_model_is_half_written(self, keeping: Store, moment: str) -> None:
        store, first, second = keeping, self._model(), self._model("nnn")
        write(store, first)
        write(store, second)
        self._write_until(moment, store, self._model("csls"))
        store = self.reopen(store)
        self._assert_whole(store, second)
        self._assert_previous(store, first)
        rollback(store)
        store = self.reopen(store)
        self._assert_whole(store, first)
        self._assert_previous(store, second)

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_rollback_that_was_cut_off_is_finished_by_the_next(self, keeping: Store, moment: str) -> None:
        store, first, second = keeping, self._model(), self._model("nnn")
        write(store, first)
        write(store, second)
        self._write_until(moment, store, first)
        store = self.reopen(store)
        self._assert_whole(store, second)
        rollback(store)
        self._assert_whole(self.reopen(store), first)

    def test_a_rollback_gives_newcomers_their_offsets_and_a_refresh_keeps_the_model_before(
        self, keeping: Store
    ) -> None:
        store, first, second = keeping, self._model(), self._model("nnn")
        write(store, first)
        write(store, second)
        store = self.insert_plain(store, self.fresh_ids(), self.queries(seed=3, count=5))
        refresh(store)
        store = self.reopen(store)
        self._assert_previous(store, first)
        rollback(store)
        report = inspect(store, queries=0)
        assert (report.count, report.missing, report.stale) == (self.rows + 5, 0, 0)
        assert self._active(store).fingerprint == first.fingerprint

    def test_a_dry_rollback_changes_nothing(self, keeping: Store) -> None:
        store, first, second = keeping, self._model(), self._model("nnn")
        write(store, first)
        write(store, second)
        seen = rollback(store, dry_run=True)
        assert (seen.model.fingerprint, seen.written) == (first.fingerprint, False)
        store = self.reopen(store)
        self._assert_whole(store, second)
        self._assert_previous(store, first)

    def test_a_removal_takes_the_model_before_out(self, keeping: Store) -> None:
        store = keeping
        write(store, self._model())
        write(store, self._model("nnn"))
        store.remove()
        store = self.reopen(store)
        assert store.correction() is None
        assert store.previous() is None

    def _assert_previous(self, store: Store, model: OffsetModel) -> None:
        found = store.previous()
        assert found is not None
        assert found.fingerprint == model.fingerprint


class QueryMapConformance(StoreUnderTest):
    """A store with `maps_queries` ranks as `model.queries(q)` and the offsets do, in all that is done to a correction;
    others refuse a model that has a map."""

    @pytest.fixture
    def mapping(self, store: Store) -> Store:
        if not store.maps_queries or self.metric is Metric.EUCLIDEAN:
            pytest.skip("this store holds no map")
        return store

    def test_a_store_that_would_leave_out_what_was_learned_refuses_it_and_is_unchanged(self, store: Store) -> None:
        if store.maps_queries:
            pytest.skip("this store holds a map")
        model, said = self._mapped(), "has a query map"
        with pytest.raises(InputError, match=said):
            write(store, model)
        with pytest.raises(InputError, match=said):
            apply(store, model, dry_run=True)
        assert store.correction() is None

    def test_searches_are_by_the_mapped_query_and_raw_ones_by_what_was_asked(self, mapping: Store) -> None:
        store, model = mapping, self._mapped()
        write(store, model)
        self._assert_whole(store, model)
        store = self.reopen(store)
        self._assert_whole(store, model)
        self._assert_ranking(store.search(self.queries(), K, raw=True), None)

    def test_vectors_and_offsets_do_not_know_the_map(self, mapping: Store) -> None:
        store, model = mapping, self._mapped()
        write(store, model)
        expected = dict(zip(self.ids(), self.vectors(), strict=True))
        for batch in self.reopen(store).scan():
            given = np.array([expected[key] for key in batch.ids])
            np.testing.assert_allclose(batch.vectors, given, rtol=0, atol=1e-5)
            np.testing.assert_allclose(batch.offsets, model.offsets(given), rtol=0, atol=max(store.precision, 1e-5))

    def test_no_search_is_mapped_before_the_correction_is_active(self, mapping: Store) -> None:
        store, first, second = mapping, self._mapped(), self._mapped(seed=6)
        for before, model in ((None, first), (first, second)):
            with store.begin(model) as writing:
                for batch in writing.scan():
                    writing.write(batch, model.offsets(batch.vectors))
                self._assert_ranking(store.search(self.queries(), K), before)
                writing.activate()
            self._assert_whole(store, model)

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_run_with_a_map_that_was_cut_off_is_finished_by_the_next(self, mapping: Store, moment: str) -> None:
        store, model = mapping, self._mapped()
        self._write_until(moment, store, model)
        store = self.reopen(store)
        self._assert_ranking(store.search(self.queries(), K), None)
        write(store, model)
        self._assert_whole(self.reopen(store), model)

    def test_another_map_takes_the_place_of_the_first_and_none_that_of_both(self, mapping: Store) -> None:
        store, plain = mapping, self._model()
        for model in (self._mapped(), self._mapped(seed=6), plain, self._mapped()):
            write(store, model)
            store = self.reopen(store)
            self._assert_whole(store, model)

    def test_newcomers_of_a_mapped_correction_are_found_and_refreshed(self, mapping: Store) -> None:
        store, model = mapping, self._mapped()
        write(store, model)
        fresh = self.queries(seed=3, count=5)
        store = self.insert_plain(store, self.fresh_ids(), fresh)
        report = inspect(store, queries=0)
        assert (report.count, report.missing + report.stale) == (self.rows + 5, 5)
        applied = refresh(store)
        assert applied.missing + applied.stale == 5
        store = self.reopen(store)
        assert (inspect(store, queries=0).missing, inspect(store, queries=0).stale) == (0, 0)
        self._assert_ranking(store.search(self.queries(), K), model, fresh, model.offsets(fresh).astype(np.float64))
        self._assert_ranking(store.search(self.queries(), K, raw=True), None, fresh)

    def test_a_rollback_changes_the_map_with_the_offsets(self, mapping: Store) -> None:
        if type(mapping).previous is Store.previous:
            pytest.skip("this store does not keep the model before")
        plain, mapped, store = self._model("nnn"), self._mapped(), self.reopen(mapping)
        for model in (plain, mapped):
            write(store, model)
        for model in (plain, mapped):
            rollback(store)
            store = self.reopen(store)
            self._assert_whole(store, model)

    def test_a_removal_takes_the_map_out(self, mapping: Store) -> None:
        store, raw = mapping, mapping.search(self.queries(), K)
        write(store, self._mapped())
        store.remove()
        store = self.reopen(store)
        assert store.correction() is None
        after = store.search(self.queries(), K)
        assert after.ids == raw.ids
        np.testing.assert_allclose(after.scores, raw.scores, rtol=0, atol=1e-5)

    def test_what_pairs_teach_is_applied_and_learned_anew_by_a_refit(self, mapping: Store) -> None:
        asked, answers = self._pairs()
        apply(mapping, Bank(asked, answers), learn=True, force=True)
        store = self.reopen(mapping)
        first = self._active(store)
        self._assert_whole(store, first)
        refit(store, Bank(asked[:-20], answers[:-20]), force=True)
        store = self.reopen(store)
        second = self._active(store)
        assert second.fingerprint != first.fingerprint
        for model in (first, second):
            assert model.query_map is not None
        self._assert_whole(store, second)

    def test_what_was_cut_off_is_learned_anew_where_other_answers_are_known(self, mapping: Store) -> None:
        asked, answers = self._pairs()
        fewer = answers.astype(object)
        fewer[-20:] = -1
        model = apply(mapping, Bank(asked, answers), learn=True, force=True, dry_run=True).model
        self._write_until("all written", mapping, model)
        mapping = self.reopen(mapping)
        apply(mapping, Bank(asked, fewer), learn=True, force=True)
        found = self._active(self.reopen(mapping))
        pairs = [each.query_map.pairs for each in (model, found) if each.query_map is not None]
        assert pairs == [len(answers), len(answers) - 20]

    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Queries of which a map finds the way to their targets, two for each, and the ids of these."""
        rng, vectors = np.random.default_rng(8), self.vectors()
        turn = np.eye(self.dim) + 0.3 * rng.normal(size=(self.dim, self.dim))
        worded = np.concatenate([vectors, vectors + 0.1 * vectors.std() * rng.normal(size=vectors.shape)])
        return self._scaled(worded @ np.linalg.inv(turn)), np.array([*self.ids(), *self.ids()])

    def test_an_inspection_counts_what_mapped_queries_find(self, mapping: Store) -> None:
        model, live = self._mapped(), self.queries(seed=7, count=150)
        write(mapping, model)
        seen = inspect(mapping, live).hubness
        assert seen is not None
        for skewness, which in ((seen.raw, None), (seen.corrected, model)):
            found = np.argsort(-self._scores(which, queries=live), axis=1)[:, :10]
            counts = np.bincount(found.ravel(), minlength=self.rows).astype(np.float64)
            expected = (((counts - counts.mean()) / counts.std()) ** 3).mean()
            assert abs(skewness - expected) < (1e-6 if self.recall == 1 else 0.3)

    def _mapped(self, seed: int = 5) -> OffsetModel:
        """A model with a map that changes most rankings."""
        step = 0.1 * np.random.default_rng(seed).normal(size=(self.dim, self.dim))
        model = replace(self._model(), query_map=QueryMap(step.astype(np.float32), 1.0, 200))
        return model.centred_on(self.vectors())


class StoreConformance(RollbackConformance, QueryMapConformance):
    """Subclass it as `Test...`, and say how a store is made."""

    def test_a_scan_sees_every_vector_once_with_no_offsets(self, store: Store) -> None:
        batches = list(store.scan())
        ids = [key for batch in batches for key in batch.ids]
        assert store.count() == len(ids) == self.rows
        assert set(ids) == set(self.ids())
        assert store.dim == self.dim
        assert store.metric is self.metric
        expected = dict(zip(self.ids(), self.vectors(), strict=True))
        for batch in batches:
            for key, vector in zip(batch.ids, batch.vectors, strict=True):
                np.testing.assert_allclose(vector, expected[key], rtol=0, atol=1e-6)
            assert np.isnan(batch.offsets).all()
        assert store.correction() is None

    def test_searches_return_the_exact_corrected_ranking(self, store: Store) -> None:
        self._assert_ranking(store.search(self.queries(), K), None)
        model = self._model()
        applied = write(store, model)
        assert (applied.scanned, applied.missing) == (self.rows, self.rows)
        self._assert_ranking(store.search(self.queries(), K), model)
        self._assert_ranking(store.search(self.queries(), K, raw=True), None)

    def test_the_offsets_written_are_the_offsets_read(self, store: Store) -> None:
        model = self._model()
        write(store, model)
        for batch in store.scan():
            np.testing.assert_allclose(batch.offsets, model.offsets(batch.vectors), rtol=0, atol=1e-5)

    def test_searches_stay_raw_until_the_correction_is_active(self, store: Store) -> None:
        model, raw = self._model(), store.search(self.queries(), K)
        with store.begin(model) as writing:
            for batch in writing.scan():
                writing.write(batch, model.offsets(batch.vectors))
                assert store.search(self.queries(), K).ids == raw.ids
            found = store.correction()
            assert found is not None
            assert not found.active
            writing.activate()
        self._assert_ranking(store.search(self.queries(), K), model)

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_run_that_was_cut_off_goes_on_and_is_finished_by_the_next(self, store: Store, moment: str) -> None:
        model = self._model()
        written = self._write_until(moment, store, model)
        store = self.reopen(store)
        found = store.correction()
        assert found is None or not found.active
        with store.begin(model) as writing:
            lacking = [batch.some(np.flatnonzero(np.isnan(batch.offsets))) for batch in writing.scan()]
        there = [*written, *(key for batch in lacking for key in batch.ids)]
        assert sorted(there, key=str) == sorted(self.ids(), key=str)
        write(store, model)
        self._assert_whole(store, model)

    def test_an_error_while_writing_leaves_the_store_to_the_next_run(self, store: Store) -> None:
        model, raw = self._model(), store.search(self.queries(), K)

        def cut_off() -> None:
            with store.begin(model) as writing:
                batch = next(iter(writing.scan()))
                writing.write(batch, model.offsets(batch.vectors))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            cut_off()
        assert store.search(self.queries(), K).ids == raw.ids
        write(store, model)
        self._assert_whole(store, model)

    def test_an_amendment_that_was_cut_off_changes_no_search_and_is_finished_by_the_next(self, store: Store) -> None:
        model = self._model()
        write(store, model)
        before = store.search(self.queries(), K)
        self._write_until("within a batch", store, model)
        store = self.reopen(store)
        again = store.search(self.queries(), K)  # an approximate index that is written to may find another near one
        same = [len(set(one) & set(other)) / K for one, other in zip(before.ids, again.ids, strict=True)]
        assert np.mean(same) >= self.recall
        write(store, model)
        self._assert_whole(store, model)

    def test_another_model_takes_the_place_of_a_half_written_one(self, store: Store) -> None:
        first, second = self._model(), self._model("nnn")
        self._write_until("within a batch", store, first)
        store = self.reopen(store)
        write(store, second)
        self._assert_whole(store, second)

    def test_a_store_opened_anew_is_corrected_by_the_same_model(self, store: Store) -> None:
        model = self._model()
        write(store, model)
        self._assert_whole(self.reopen(store), model)

    def test_a_second_correction_replaces_the_first_in_one_step(self, store: Store) -> None:
        first, second = self._model(), self._model("nnn")
        write(store, first)
        before = store.search(self.queries(), K)
        with store.begin(second) as writing:
            for batch in writing.scan():
                assert np.isnan(batch.offsets).all()
                writing.write(batch, second.offsets(batch.vectors))
                assert store.search(self.queries(), K).ids == before.ids
            for batch in store.scan():
                np.testing.assert_allclose(batch.offsets, first.offsets(batch.vectors), rtol=0, atol=store.precision)
            writing.activate()
        self._assert_whole(store, second)

    def test_targets_added_by_another_program_are_found_and_refreshed(self, store: Store) -> None:
        model = self._model()
        write(store, model)
        fresh, ids = self.queries(seed=3, count=5), self.fresh_ids()
        store = self.insert_plain(store, ids, fresh)
        top = store.search(fresh, K)
        assert all(key in found for key, found in zip(ids, top.ids, strict=True))
        report = inspect(store, queries=0)
        # A store whose neutral offset is a number like any other cannot tell that it is missing.
        assert (report.count, report.missing + report.stale) == (self.rows + 5, 5)
        applied = refresh(store)
        assert applied.missing + applied.stale == 5
        assert (inspect(store, queries=0).missing, inspect(store, queries=0).stale) == (0, 0)

    def test_a_target_without_an_offset_is_neither_lifted_nor_sunk(self, store: Store) -> None:
        model, fresh = self._model(), self.queries(seed=3, count=5)
        write(store, model)
        store = self.insert_plain(store, self.fresh_ids(), fresh)
        self._assert_ranking(store.search(self.queries(), K), model, fresh)

    def test_a_refresh_of_a_whole_correction_changes_nothing(self, store: Store) -> None:
        model = self._model()
        write(store, model)
        before = store.search(self.queries(), K)
        applied = refresh(store)
        assert (applied.scanned, applied.missing, applied.stale) == (self.rows, 0, 0)
        assert store.search(self.queries(), K).ids == before.ids

    def test_a_removal_leaves_the_store_as_it_was(self, store: Store) -> None:
        raw = store.search(self.queries(), K)
        write(store, self._model())
        store.remove()
        store = self.reopen(store)
        assert store.correction() is None
        assert store.search(self.queries(), K).ids == raw.ids
        self.test_a_scan_sees_every_vector_once_with_no_offsets(store)

    def test_a_removal_takes_a_half_written_correction_out(self, store: Store) -> None:
        self._write_until("within a batch", store, self._model())
        store.remove()
        assert store.correction() is None
        self.test_a_scan_sees_every_vector_once_with_no_offsets(store)

    def test_a_removal_without_a_correction_does_nothing(self, store: Store) -> None:
        store.remove()
        self.test_a_scan_sees_every_vector_once_with_no_offsets(store)

    def test_what_does_not_fit_the_store_is_refused_and_changes_nothing(self, store: Store) -> None:
        wrong = np.ones((3, self.dim + 1), np.float32)
        other = Metric.EUCLIDEAN if self.metric is not Metric.EUCLIDEAN else Metric.DOT
        with pytest.raises(HubpluginError, match=str(self.dim + 1)):
            apply(store, wrong)
        with pytest.raises(HubpluginError, match=other.value):
            write(store, fit(self.vectors(), self.queries(), "is", metric=other))
        with pytest.raises(StoreError, match="no correction"):
            refresh(store)
        self.test_a_scan_sees_every_vector_once_with_no_offsets(store)
