"""Asking for the corrected ranking: by psycopg, SQLAlchemy and Django, and by the SQL that `explain` prints."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import psycopg
import pytest

import hubplugin_pgvector
from hubplugin import InputError, StoreError, apply, fit, remove, rollback
from tests.core.formulas import similarity
from tests.galleries import normal, with_map
from tests.pgvector.conftest import BANK, DIM, QUERIES, RNG, VECTORS
from tests.refusals import refused

pytestmark = pytest.mark.slow


@pytest.fixture(params=["cosine", "dot", "euclidean"])
def store(request, database):
    database.create(VECTORS, "tenant text")
    database.run("UPDATE photos SET tenant = chr(97 + id % 3)")
    return database.correct(metric=request.param)


def exact(store, query, keep=slice(None)):
    """The corrected top 10, in float64 from the definition."""
    (scores,) = similarity([query], VECTORS, store.metric.value)
    scores = scores + store.correction().model.offsets(VECTORS)
    rows = np.arange(len(VECTORS))[keep]
    return rows[np.argsort(-scores[keep])][:10].tolist()


def test_psycopg(store, database):
    for query in QUERIES:
        order = hubplugin_pgvector.order_by(store, query, alias="p")
        assert database.by_order(order, "photos p") == exact(store, query)


def test_sqlalchemy(store, database):
    sqlalchemy = pytest.importorskip(
        "sqlalchemy", reason="needs SQLAlchemy: pip install sqlalchemy"
    )
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(database.address)
    )
    photos = sqlalchemy.table(
        "photos", sqlalchemy.column("id"), sqlalchemy.column("tenant")
    )
    with engine.connect() as connection:
        for query in QUERIES:
            order = hubplugin_pgvector.order_by(store, query).sqlalchemy()
            statement = (
                sqlalchemy.select(photos.c.id)
                .where(photos.c.tenant == "b")
                .order_by(order)
                .limit(10)
            )
            assert list(connection.scalars(statement)) == exact(
                store, query, slice(1, None, 3)
            )
    engine.dispose()


@lru_cache
def django_model():
    """A model without a project: its SQL is run as it stands."""
    django = pytest.importorskip("django", reason="needs Django: pip install django")
    from django.conf import settings

    settings.configure(
        DATABASES={
            "default": {"ENGINE": "django.db.backends.postgresql", "NAME": "none"}
        }
    )
    django.setup()
    from django.db import models

    class Photo(models.Model):
        id = models.IntegerField(primary_key=True)
        tenant = models.TextField()

        class Meta:
            app_label, db_table, managed = "photos", "photos", False

    return Photo


def test_django(store, database):
    photos = django_model().objects.filter(tenant="c")
    with psycopg.connect(database.address) as connection:
        for query in QUERIES:
            ordered = photos.order_by(
                hubplugin_pgvector.order_by(store, query).django()
            ).values_list("id")[:10]
            text, parameters = ordered.query.sql_with_params()
            assert [row[0] for row in connection.execute(text, parameters)] == exact(
                store, query, slice(2, None, 3)
            )


def test_each_form_that_explain_prints_gives_the_corrected_ranking(store, database):
    for query in QUERIES[:5]:
        forms = forms_of(store, query)
        assert len(forms) == 2
        for form in forms:
            assert [row[0] for row in database.run(form)] == exact(store, query)


def forms_of(store, query):
    lines = store.explain(query, 10).text.splitlines()
    return [line for line in lines if line.startswith("SELECT")]


def test_a_filtered_search_finds_enough_by_the_index(store, database):
    database.setting(enable_seqscan="off", enable_sort="off")
    again = database.open(metric=store.metric.value)
    tenant = again.with_filter("tenant LIKE 'b%'")
    found = tenant.search(QUERIES, 10).ids
    expected = [exact(store, query, slice(1, None, 3)) for query in QUERIES]
    assert np.mean(np.sort(found) == np.sort(expected)) >= 0.95
    for wrong in (
        "tenant ~",
        "nothing = 1",
        "true); DROP TABLE photos; --",
        "pg_terminate_backend(0) = (",
    ):
        with refused(InputError, "a filter is the condition after WHERE"):
            again.with_filter(wrong)


def test_a_refit_changes_no_sql_of_the_application(store, database):
    before = hubplugin_pgvector.order_by(store, QUERIES[0]).sql
    apply(store, BANK, "is", tau=0.03, force=True)
    rollback(store)
    rollback(store)
    after = hubplugin_pgvector.order_by(store, QUERIES[0])
    assert after.sql == before
    assert database.by_order(after) == exact(store, QUERIES[0])


def test_a_mapped_query_is_mapped_in_every_form(database):
    database.create()
    store = database.open(metric="cosine")
    step = 0.3 * normal(RNG, DIM, DIM)
    model = with_map(fit(VECTORS, BANK, "is"), step)
    apply(store, model)
    (scores,) = similarity(QUERIES[:1], VECTORS, "cosine", model.query_map)
    expected = np.argsort(-scores - model.offsets(VECTORS))[:10].tolist()
    for form in forms_of(store, QUERIES[0]):
        assert [row[0] for row in database.run(form)] == expected


def test_a_query_of_another_shape_and_a_store_without_a_correction_are_refused(store):
    with refused(InputError, "vectors of 8 dimensions"):
        hubplugin_pgvector.order_by(store, np.ones(9, np.float32))
    remove(store)
    with refused(StoreError, "no correction is active"):
        hubplugin_pgvector.order_by(store, QUERIES[0])
    with refused(StoreError, "no correction is active"):
        hubplugin_pgvector.offsets(store, VECTORS)


def test_a_search_beside_a_switch_is_of_one_correction(database):
    """Offsets a million apart: a mixture of two corrections would score far off."""
    database.create()
    models = []
    for scale in (1.0, 1e3):
        plain = fit(VECTORS, BANK, "is", metric="dot")
        step = scale * np.eye(DIM, dtype=np.float32)
        models.append(with_map(plain, step))
    apply(database.open(), models[0])

    def switch():
        for _ in range(4):
            for model in reversed(models):
                apply(database.open(), model)

    expected = []
    for model in models:
        scores = model.queries(QUERIES[:1]) @ VECTORS.T + model.offsets(VECTORS)
        expected.append(float(scores.max()))
    store = database.open()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(switch)
        while not run.done():
            score = store.search(QUERIES[:1], 1).scores[0][0]
            assert min(abs(score - value) for value in expected) < 1e-2
        run.result()
