"""Tables and columns are told apart by their names; what `remove` drops is ours."""

import subprocess

import pytest

from hubplugin import StoreError, inspect, refresh, remove
from tests.pgvector.conftest import VECTORS
from tests.refusals import refused

pytestmark = pytest.mark.slow


def test_tables_whose_names_begin_alike_have_an_index_each(database):
    tables = [
        f"customer_support_articles_of_the_whole_company_{country}"
        for country in ("de", "en")
    ]
    for table in tables:
        database.create(table=table)
        database.correct(table)
    database.setting(enable_seqscan="off")
    assert all(
        "a search uses the index" in database.open(table).notes()[0] for table in tables
    )
    found = database.run(
        "SELECT tablename FROM pg_indexes WHERE indexname LIKE '%hub_offset%' ORDER BY 1"
    )
    assert [row[0] for row in found] == tables


def test_an_index_of_another_table_by_the_name_of_ours_is_not_dropped(database):
    database.create()
    store = database.correct()
    index = store.require_active().index
    database.run(
        f"DROP INDEX {index}",
        "CREATE TABLE other (id int)",
        f"CREATE INDEX {index} ON other (id)",
    )
    with refused(StoreError, "belongs to another table; rename it"):
        refresh(store)
    assert database.run(
        f"SELECT tablename FROM pg_indexes WHERE indexname = '{index}'"
    ) == [("other",)]


def test_a_renamed_table_is_told_that_its_offsets_have_no_correction_any_more(database):
    database.create(VECTORS, "note text")
    database.correct()
    database.run("ALTER TABLE photos RENAME TO pictures")
    with refused(StoreError, r"the table was renamed, .* rename or drop the column"):
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


def test_a_table_that_is_restored_without_our_schema_is_told_what_it_has(database):
    database.create()
    database.correct()
    database.run("DROP SCHEMA hubplugin CASCADE")
    line = "offsets without their correction"
    assert line in str(inspect(database.open()))
    with refused(StoreError, line):
        database.correct()
    database.run("ALTER TABLE photos DROP hub_offset")
    database.correct()


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
