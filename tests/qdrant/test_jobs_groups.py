"""Offsets fitted within each tenant: a search filtered by tenant is corrected as if the tenant were alone."""

import re

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

import hubplugin
from hubplugin import Bank, Compute, CorrectionRefused, StoreError, apply, refit
from hubplugin.measures.hubness import k_occurrence, skewness
from hubplugin.methods import METHODS
from hubplugin.model import GroupedModel
from hubplugin.validation import cross_validate, folds_of
from tests.qdrant.conftest import DIM, Photos, apply_to, clustered, ids, names, stopped

LARGE = 130
TENANTS = {"acme": 0, "brown": 1, 7: 2}
"""Tenant to number; each has LARGE points, in turn. Points 3 * LARGE and 1 above belong to "tiny", 2 above to none."""


def tenant_of(key):
    return "tiny" if key < 3 * LARGE + 2 else None


class Shops(Photos):
    gallery = clustered(11, 3 * LARGE + 3)

    def point(self, key, vector, **payload):
        tenant = [*TENANTS][key % 3] if key < 3 * LARGE else tenant_of(key)
        at = {"shop": {"tenant": tenant}} if tenant is not None else {}
        return super().point(key, vector, **(at | payload))

    def settings(self):
        return super().settings() | {"group_by": "shop.tenant", "method": "sn"}

    def alone(self, tenant, method="sn"):
        """The rows of a tenant, and a model fitted on nothing else."""
        rows = np.arange(TENANTS[tenant], 3 * LARGE, 3)
        metric = {
            models.Distance.COSINE: "cosine",
            models.Distance.EUCLID: "euclidean",
        }.get(self.distance, "dot")
        return rows, hubplugin.fit(self.gallery[rows], self.bank, method, metric=metric)

    def assert_alone(self, client, method="sn"):
        """A search within a tenant is that of a fit on the tenant alone."""
        for tenant in TENANTS:
            rows, model = self.alone(tenant, method)
            for query in self.queries[:3]:
                scores = self.raw([query])[0, rows] + model.offsets(self.gallery[rows])
                found = client.query_points(
                    "photos", query, self.using or None, query_filter=of(tenant)
                ).points
                assert ids(found) == rows[np.argsort(-scores)[:10]].tolist()

    def offset(self, key):
        (found,) = self.stored(key).values()
        return found


class EvenShops(Shops):
    """Shops of which "acme" has its targets in all directions alike, so that the guard refuses to correct it."""

    gallery = Shops.gallery.copy()
    gallery[0 : 3 * LARGE : 3] = np.random.default_rng(1).normal(size=(LARGE, DIM))


def batch(key, vector, **payload):
    return models.Batch(ids=[key], vectors=[vector.tolist()], payloads=[payload])


def of(tenant):
    return models.Filter(
        must=[
            models.FieldCondition(
                key="shop.tenant", match=models.MatchValue(value=tenant)
            )
        ]
    )


@pytest.fixture
def even_shops(monkeypatch) -> EvenShops:
    """With a guard that takes banks as small as these."""
    monkeypatch.setattr("hubplugin.guard.SMALLEST", 100)
    return EvenShops(QdrantClient(":memory:"), "", models.Distance.COSINE)


@pytest.fixture
def shops() -> Shops:
    return Shops(QdrantClient(":memory:"), "", models.Distance.COSINE)


@pytest.mark.parametrize("method", ["sn", "nnn", "dn"])
@pytest.mark.parametrize(
    ("using", "distance", "storage"),
    [
        ("", models.Distance.COSINE, "payload"),
        ("image", models.Distance.DOT, "vector"),
        ("image", models.Distance.EUCLID, "vector"),
    ],
)
def test_a_search_within_a_tenant_is_that_of_a_fit_on_the_tenant_alone(
    using, distance, storage, method
):
    shops = Shops(QdrantClient(":memory:"), using, distance, storage)
    shops.assert_alone(shops.apply(method=method), method)


def test_points_of_a_small_group_or_of_none_are_neutral_and_the_group_is_named(shops):
    applied = apply_to(shops.plain, "photos", shops.bank, **shops.settings())
    assert [shops.offset(3 * LARGE + more) for more in range(3)] == [0, 0, 0]
    assert "kept at offset 0: 'tiny': 2 targets, 100 are needed" in str(applied)
    report = hubplugin.inspect(shops.store())
    assert (report.missing, report.stale) == (0, 0)
    assert "within each 'shop.tenant', 3 of them corrected" in str(report)


def test_what_a_wrapped_client_writes_gets_the_offset_of_its_tenant(shops):
    client = shops.apply()
    fresh, acme, brown = clustered(12, 5), {"tenant": "acme"}, {"tenant": "brown"}
    written = [
        (3, "acme", lambda v: client.upsert("photos", [shops.point(3, v)])),
        (
            1000,
            "brown",
            lambda v: client.upload_points(
                "photos", [shops.point(1000, v, shop=brown)]
            ),
        ),
        (
            1001,
            7,
            lambda v: client.upload_collection(
                "photos", [v.tolist()], [{"shop": {"tenant": 7}}], ids=[1001]
            ),
        ),
        (
            4,
            "brown",
            lambda v: client.update_vectors(
                "photos", [models.PointVectors(id=4, vector=v.tolist())]
            ),
        ),
        (1002, "acme", lambda v: client.upsert("photos", batch(1002, v, shop=acme))),
    ]
    for (key, tenant, write), vector in zip(written, fresh, strict=True):
        write(vector)
        _, model = shops.alone(tenant)
        assert shops.offset(key) == pytest.approx(model.offsets([vector])[0], abs=1e-5)
    client.upsert(
        "photos", [shops.point(1003, fresh[0], shop={"tenant": "unheard of"})]
    )
    assert shops.offset(1003) == 0
    assert hubplugin.inspect(shops.store()).stale == 0


def test_points_that_went_to_another_tenant_get_its_offsets_at_once_or_by_a_refresh(
    shops,
):
    client = shops.apply()
    _, model = shops.alone("brown")
    client.set_payload("photos", {"shop": {"tenant": "brown"}}, points=[0])
    shops.plain.set_payload("photos", {"shop": {"tenant": "brown"}}, points=[3])
    assert shops.offset(0) == pytest.approx(
        model.offsets(shops.gallery[:1])[0], abs=1e-5
    )
    applied = hubplugin.refresh(shops.store())
    assert (applied.missing, applied.stale) == (0, 1)
    assert shops.offset(3) == pytest.approx(
        model.offsets(shops.gallery[3:4])[0], abs=1e-5
    )


def test_a_run_that_was_cut_off_goes_on_by_the_same_key_and_not_by_another(shops):
    with pytest.raises(KeyboardInterrupt):
        shops.apply(compute=stopped("writing offsets"))
    begun = shops.store().correction().model
    assert hubplugin.inspect(shops.store()).missing == len(shops.gallery)
    resumed = apply_to(shops.plain, "photos", shops.bank, **shops.settings())
    assert resumed.model.fingerprint == begun.fingerprint
    whole = apply_to(
        shops.plain, "photos", shops.bank, **(shops.settings() | {"group_by": None})
    )
    assert not isinstance(whole.model, GroupedModel)


def test_the_guard_judges_each_tenant_and_a_run_with_none_left_is_refused(
    shops, monkeypatch
):
    with pytest.raises(
        CorrectionRefused, match=r"needs 400 distinct queries, the bank has 150"
    ):
        shops.apply(force=False)  # which no tenant changes
    monkeypatch.setattr("hubplugin.guard.SMALLEST", 100)
    with pytest.raises(
        CorrectionRefused,
        match=r"no value of 'shop\.tenant' can be corrected .*'acme': the bank",
    ):
        shops.apply(force=False)
    with pytest.raises(CorrectionRefused, match="no target has one"):
        shops.apply(group_by="brand")
    assert names(shops.plain) == ["photos"]


def test_a_refit_stays_within_the_groups_and_the_version_before_is_kept(shops):
    client, fresh = shops.apply(), clustered(21, 160)
    store = shops.store()
    before = store.correction().model
    tried = refit(store, fresh, force=True, dry_run=True)
    assert (tried.written, store.correction().model.fingerprint) == (
        False,
        before.fingerprint,
    )
    done = refit(store, fresh, force=True)
    assert "kept at offset 0: 'tiny': 2 targets, 100 are needed" in str(done)
    assert done.versus.new.skewness == tried.versus.new.skewness
    shops.bank = fresh
    shops.assert_alone(shops.wrapped())
    assert client.query_points("photos", shops.queries[0]).points
    assert shops.store().previous().fingerprint == before.fingerprint


def test_a_refit_that_is_worse_over_the_groups_is_refused_with_both_figures(
    shops, monkeypatch
):
    monkeypatch.setattr("hubplugin.guard.SMALLEST", 100)
    monkeypatch.setattr(
        "hubplugin.bank.kinds.OWN_SHARE", 0
    )  # its queries lie as documents do
    shops.apply()
    store = shops.store()
    before = store.correction().model.fingerprint
    says = r"goes from -?\d+\.\d+ to \d+\.\d+, where it is .* nothing was changed"
    with pytest.raises(CorrectionRefused, match=says):
        refit(store, clustered(21, 160), "nnn", k=10, alpha=0.1)
    assert shops.store().correction().model.fingerprint == before


def test_clicks_decide_over_the_groups_together(shops):
    shops.apply()
    clicked = np.arange(3 * LARGE)
    queries = shops.gallery[clicked] + 0.05 * clustered(31, len(clicked))
    store = shops.store()
    bank = hubplugin.Bank(queries, clicked)
    worse = refit(
        store, bank, "nnn", k=1, alpha=8.0, force=True, dry_run=True
    ).versus.objection
    assert re.match(r"R@1 of held-out queries goes from \d+\.\d to \d+\.\d", worse)
    done = refit(store, bank, force=True, dry_run=True)
    assert done.versus.raw.recall > 0.9
    assert done.versus.gain == pytest.approx(
        done.versus.new.recall - done.versus.old.recall
    )


def test_the_groups_count_by_their_targets_and_a_neutral_one_as_not_corrected(
    even_shops, monkeypatch
):
    shops, fresh = even_shops, clustered(21, 160)
    shops.apply()
    store = shops.store()
    all_new = refit(store, fresh, force=True, dry_run=True).versus
    monkeypatch.setattr("hubplugin.jobs.results.WORSE", 10.0)
    monkeypatch.setattr(
        "hubplugin.bank.kinds.OWN_SHARE", 0
    )  # its queries lie as documents do
    without = refit(store, fresh, dry_run=True)
    assert [*without.neutral] == ["acme", "tiny"]
    (rows, _), metric = shops.alone("acme"), "cosine"
    banks = Bank(fresh).prepare(metric, Compute("cpu")).against(shops.gallery[rows])
    found = cross_validate([None, METHODS["sn"]()], banks, folds_of(banks)).hits
    raw, new = (skewness(k_occurrence(each, len(rows))) for each in found)
    less = (raw - new) / 3
    assert without.versus.new.skewness - all_new.new.skewness == pytest.approx(
        less, abs=1e-6
    )


def test_a_tenant_that_is_refused_stays_neutral_and_is_named(even_shops, monkeypatch):
    shops = even_shops
    monkeypatch.setattr(
        "hubplugin.bank.kinds.OWN_SHARE", 0
    )  # its queries lie as documents do
    applied = apply_to(
        shops.plain, "photos", shops.bank, **(shops.settings() | {"force": False})
    )
    assert "the bank looks as if it came from elsewhere" in applied.neutral["acme"]
    assert {shops.offset(key) for key in range(0, 3 * LARGE, 3)} == {0}
    assert shops.offset(1) != 0


def test_a_store_whose_targets_have_no_payload_says_so(tmp_path):
    import faiss

    index = faiss.IndexFlatIP(DIM)
    index.add(clustered(1, 50))
    faiss.write_index(index, str(tmp_path / "a.faiss"))
    with pytest.raises(StoreError, match="vectors alone, without a field"):
        apply(
            hubplugin.open_store(f"faiss:{tmp_path}/a.faiss"),
            clustered(2, 20),
            "is",
            group_by="tenant",
            force=True,
        )
