"""What every store must do with the versions of its correction."""

from __future__ import annotations

import pytest

from hubplugin.errors import StoreError
from hubplugin.jobs.inspection import inspect
from hubplugin.jobs.versions import rollback
from hubplugin.jobs.writing import refresh, write
from hubplugin.store import Store
from hubplugin.testing.store_under_test import MOMENTS, K, StoreUnderTest


class VersionConformance(StoreUnderTest):
    """Versions are kept, returned to, pruned and removed."""

    def test_a_rollback_returns_to_the_version_before_and_back_again(self, store: Store) -> None:
        first, second = self._model(), self._model("nnn")
        write(store, first)
        write(store, second)
        assert self._states(store) == ["kept", "active"]
        assert [version.model for version in store.versions()] == [first.fingerprint, second.fingerprint]
        assert all(version.made for version in store.versions())
        rollback(store)
        store = self.reopen(store)
        assert self._states(store) == ["active", "kept"]
        self._assert_whole(store, first)
        rollback(store, to=store.versions()[-1].number)
        self._assert_whole(self.reopen(store), second)

    def test_versions_are_kept_until_they_are_pruned(self, store: Store) -> None:
        for method in ("is", "nnn", "csls"):
            write(store, self._model(method), keep=2)
        assert [version.method for version in store.versions()] == ["is", "nnn", "csls"]
        write(store, self._model("dn"), keep=1)
        assert [version.method for version in store.versions()] == ["csls", "dn"]
        before = store.search(self.queries(), K)
        store.prune(0)
        assert self._states(self.reopen(store)) == ["active"]
        store = self.reopen(store)
        assert store.search(self.queries(), K).ids == before.ids
        with pytest.raises(StoreError, match="before"):
            rollback(store)

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_kept_version_can_be_returned_to_while_another_is_half_written(self, store: Store, moment: str) -> None:
        first, second = self._model(), self._model("nnn")
        write(store, first)
        write(store, second)
        self._write_until(moment, store, self._model("csls"))
        store = self.reopen(store)
        assert self._states(store) == ["kept", "active", "half-written"]
        rollback(store)
        self._assert_whole(self.reopen(store), first)

    def test_what_came_since_a_version_was_replaced_is_refreshed_after_a_rollback(self, store: Store) -> None:
        first = self._model()
        write(store, first)
        write(store, self._model("nnn"))
        fresh, ids = self.queries(seed=3, count=5), self.fresh_ids()
        store = self.insert_plain(store, ids, fresh)
        refresh(store)
        rollback(store)
        refresh(store)
        report, found = inspect(store, probes=0), store.correction()
        assert (report.count, report.missing, report.stale) == (self.rows + 5, 0, 0)
        assert found is not None
        assert found.model.fingerprint == first.fingerprint

    def test_a_removal_takes_all_versions_out(self, store: Store) -> None:
        write(store, self._model())
        write(store, self._model("nnn"))
        store.remove()
        store = self.reopen(store)
        assert list(store.versions()) == []
        assert store.correction() is None

    def _states(self, store: Store) -> list[str]:
        return [version.state for version in store.versions()]
