"""Tables and columns are told apart by their names; what `remove` drops is ours."""

import subprocess

import numpy as np
import pytest

import hubplugin
from hubplugin.errors import StoreError
from tests.refusals import refused

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(13)
VECTORS, BANK = (RNG.normal(size=(count, 8)).astype(np.float32) for count in (200, 60))


def correct(database, table="photos", vector="embedding"):
    store = database.open(table, metric="dot", vector=vector)
    hubplugin.apply(store, BANK, "is", force=True)
    return store


def test_tables_whose_names_begin_alike_have_an_index_each(database):
    tables = [
        f"customer_support_articles_of_the_whole_company_{country}"
        for country in ("de", "en")
    ]
    for table in tables:
        database.create(VECTORS, table=table)
        correct(database, table)
    database.setting(enable_seqscan="off")
    assert all(
        "a search uses the index" in database.open(table, metric="dot").notes()[0]
        for table in tables
    )
    found = database.run(
        "SELECT tablename FROM pg_indexes WHERE indexname LIKE '%hub_offset%' ORDER BY 1"
    )
    assert [row[0] for row in found] == tables


def test_an_index_of_another_table_by_the_name_of_ours_is_not_dropped(database):
    database.create(VECTORS)
    store = correct(database)
    index = store.require_active().index
    database.run(
        f"DROP INDEX {index}",
        "CREATE TABLE other (id int)",
        f"CREATE INDEX {index} ON other (id)",
    )
    with refused(StoreError, "is one of another table; rename it"):
        hubplugin.refresh(store)
    assert database.run(
        f"SELECT tablename FROM pg_indexes WHERE indexname = '{index}'"
    ) == [("other",)]


def test_a_renamed_table_is_told_that_its_offsets_have_no_correction_any_more(database):
    database.create(VECTORS, "note text")
    correct(database)
    database.run("ALTER TABLE photos RENAME TO pictures")
    with refused(StoreError, r"that was renamed, .* or drop the column"):
        correct(database, "pictures")
    assert database.open("pictures", metric="dot").correction() is None
    database.run("ALTER TABLE pictures RENAME TO photos")
    hubplugin.remove(database.open(metric="dot"))
    assert "hub" not in database.dump()


def test_a_dump_that_is_read_back_has_its_correction(database, server):
    database.create(VECTORS)
    model = correct(database).correction().model
    dump = database.dump()
    database.run(
        "DROP TABLE photos", "DROP SCHEMA hubplugin CASCADE", "DROP EXTENSION vector"
    )
    psql = [server.bin_path / "psql", "--dbname", database.address, "--quiet"]
    subprocess.run(psql, input=dump, text=True, check=True, stdout=subprocess.DEVNULL)
    store = database.open(metric="dot")
    assert store.correction().model.fingerprint == model.fingerprint
    assert hubplugin.inspect(store, queries=0).missing == 0


def test_a_table_that_is_restored_without_our_schema_is_told_what_it_has(database):
    database.create(VECTORS)
    correct(database)
    database.run("DROP SCHEMA hubplugin CASCADE")
    line = "column hub_offset holds offsets without their correction"
    assert line in str(hubplugin.inspect(database.open(metric="dot")))
    with refused(StoreError, line):
        correct(database)
    database.run("ALTER TABLE photos DROP hub_offset")
    correct(database)


def test_a_manifest_that_names_a_column_of_the_user_drops_nothing(database):
    database.create(VECTORS, "title text")
    store = correct(database)
    rename = "convert_to(replace(convert_from(content, 'UTF8'), '\"hub_offset\"', '\"title\"'), 'UTF8')"
    database.run(
        f"UPDATE hubplugin.corrections SET content = {rename} WHERE number = 0"
    )
    with refused(StoreError, "damaged"):
        hubplugin.remove(store)
    assert database.run("SELECT count(title) FROM photos") == [(0,)]


def test_a_column_of_offsets_that_somebody_dropped_is_told_with_the_way_out(database):
    database.create(VECTORS)
    store = correct(database)
    database.run("ALTER TABLE photos DROP hub_offset")
    with refused(StoreError, "`hubplugin remove` and apply again"):
        hubplugin.inspect(store)
    hubplugin.remove(store)
    assert "hub" not in database.dump()
    correct(database)
