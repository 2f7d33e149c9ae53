"""What every adapter must do, as tests that its author runs on his own store."""

from __future__ import annotations

import numpy as np
import pytest

from hubplugin.errors import HubpluginError, StoreError
from hubplugin.fitting import fit
from hubplugin.jobs.correction import apply
from hubplugin.jobs.inspection import inspect
from hubplugin.jobs.writing import refresh, write
from hubplugin.metric import Metric
from hubplugin.store import Store
from hubplugin.testing.store_under_test import MOMENTS, K
from hubplugin.testing.versions import VersionConformance


class StoreConformance(VersionConformance):
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
        assert store.search(self.queries(), K).ids == before.ids
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
        store = self.reopen(store)
        found = store.correction()
        assert found is not None
        assert found.active
        assert found.model.fingerprint == model.fingerprint
        self._assert_ranking(store.search(self.queries(), K), model)

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
        report = inspect(store, probes=0)
        # A store whose neutral offset is a number like any other cannot tell that it is missing.
        assert (report.count, report.missing + report.stale) == (self.rows + 5, 5)
        applied = refresh(store)
        assert applied.missing + applied.stale == 5
        assert (inspect(store, probes=0).missing, inspect(store, probes=0).stale) == (0, 0)

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
            write(store, fit(self.queries(), "is", targets=self.vectors(), metric=other))
        with pytest.raises(StoreError, match="no correction"):
            refresh(store)
        self.test_a_scan_sees_every_vector_once_with_no_offsets(store)
