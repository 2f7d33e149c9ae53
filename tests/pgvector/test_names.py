"""Tables and columns are told apart by their names; what `remove` drops is ours."""

import subprocess

import pytest

from hubplugin import StoreError, apply, fit, inspect, remove
from tests.pgvector.conftest import BANK, VECTORS
from tests.refusals import refused

pytestmark = pytest.mark.slow


def test_a_renamed_table_is_told_that_its_offsets_have_no_correction_any_more(database):
    database.create(VECTORS, "note text")
    database.correct()
    database.run("ALTER TABLE photos RENAME TO pictures")
    with refused(StoreError, r"under a former name .* rename or drop the column"):
        database.correct("pictures")
    assert database.open("pictures").correction() is None
    database.run("ALTER TABLE pictures RENAME TO photos")
    remove(database.open())
    assert "hub" not in database.dump()


def test_a_dump_that_is_read_back_has_its_correction(database, server):
    database.create()
    model = database.correct().correction().model
    dump = database.dump()
    database.run(
        "DROP TABLE photos", "DROP SCHEMA hubplugin CASCADE", "DROP EXTENSION vector"
    )
    psql = [server.bin_path / "psql", "--dbname", database.address, "--quiet"]
    subprocess.run(psql, input=dump, text=True, check=True, stdout=subprocess.DEVNULL)
    store = database.open()
    assert store.correction().model.fingerprint == model.fingerprint
    assert inspect(store, queries=0).missing == 0


@pytest.mark.parametrize("left", ["active", "half-written"])
def test_a_table_that_is_restored_without_our_schema_is_corrected_or_cleaned(
    database, left
):
    database.create(VECTORS, '"it\'s" text')
    before = database.lines()
    for job in (remove, lambda store: apply(store, BANK, "is", force=True)):
        store = database.open()
        if left == "active":
            database.correct()
        else:
            store.begin(fit(VECTORS, BANK, "is", metric="dot"))
        database.run("DROP SCHEMA hubplugin CASCADE")
        told = "`hubplugin apply` replaces them, `hubplugin remove` drops them"
        assert (told in str(inspect(store))) == (left == "active")
        job(store)
        if job is remove:
            assert database.lines() == before
    assert inspect(store, queries=0).stale == 0
    remove(store)
    assert database.lines() == before


def test_a_manifest_that_names_a_column_of_the_user_drops_nothing(database):
    database.create(VECTORS, "title text")
    store = database.correct()
    rename = "convert_to(replace(convert_from(content, 'UTF8'), '\"hub_offset\"', '\"title\"'), 'UTF8')"
    database.run(
        f"UPDATE hubplugin.corrections SET content = {rename} WHERE number = 0"
    )
    with refused(StoreError, "damaged"):
        remove(store)
    assert database.run("SELECT count(title) FROM photos") == [(0,)]


def test_a_column_of_offsets_that_somebody_dropped_is_told_with_the_way_out(database):
    database.create()
    store = database.correct()
    database.run("ALTER TABLE photos DROP hub_offset")
    with refused(StoreError, "`hubplugin remove` and apply again"):
        inspect(store)
    remove(store)
    assert "hub" not in database.dump()
    database.correct()
