"""Tables and columns are told apart by what PostgreSQL knows them by, and what is gone leaves nothing behind."""

import subprocess

import numpy as np
import pytest

import hubplugin
from hubplugin.errors import StoreError

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
    with pytest.raises(StoreError, match="is one of another table; rename it"):
        hubplugin.refresh(store)
    assert database.run(
        f"SELECT tablename FROM pg_indexes WHERE indexname = '{index}'"
    ) == [("other",)]


def test_a_renamed_table_and_column_keep_their_correction_and_give_it_back(database):
    database.create(VECTORS, "note text")
    before = database.lines()
    model = correct(database).correction().model
    renames = (
        "ALTER TABLE photos RENAME embedding TO old",
        "ALTER TABLE photos RENAME TO pictures",
    )
    database.run(*renames, "CREATE SCHEMA shop", "ALTER TABLE pictures SET SCHEMA shop")
    store = database.open("shop.pictures", metric="dot")
    assert store.correction().model.fingerprint == model.fingerprint
    assert hubplugin.inspect(store, queries=0).missing == 0
    hubplugin.apply(store, BANK, "nnn", force=True)
    hubplugin.rollback(store)
    assert store.correction().model.fingerprint == model.fingerprint
    hubplugin.remove(store)
    database.run(
        "ALTER TABLE shop.pictures SET SCHEMA public",
        "ALTER TABLE pictures RENAME TO photos",
    )
    database.run("DROP SCHEMA shop", "ALTER TABLE photos RENAME old TO embedding")
    assert database.lines() == before


def test_columns_that_change_names_are_not_mixed_up(database):
    database.create(VECTORS)
    model = correct(database).correction().model
    database.run(
        "ALTER TABLE photos RENAME embedding TO old",
        "ALTER TABLE photos ADD embedding vector(8)",
    )
    database.run("UPDATE photos SET embedding = old")
    assert database.open(vector="embedding", metric="dot").correction() is None
    new = correct(database)
    old = database.open(vector="old", metric="dot")
    assert old.correction().model.fingerprint == model.fingerprint
    hubplugin.remove(new)
    assert hubplugin.inspect(old, queries=0).missing == 0


def test_a_dump_that_is_read_back_has_its_correction(database, server):
    database.create(VECTORS, "note text")
    database.run(
        "ALTER TABLE photos ADD x int",
        "ALTER TABLE photos DROP x",
        "ALTER TABLE photos ADD title vector(8)",
    )
    database.run("UPDATE photos SET title = embedding * embedding")
    model = correct(database, vector="title").correction().model
    dump = database.dump()
    database.run(
        "DROP TABLE photos",
        "DROP SCHEMA hubplugin CASCADE",
        "DROP EXTENSION vector",
        "CREATE TABLE taken ()",
    )
    psql = [
        server.bin_path / "psql",
        "--dbname",
        database.address,
        "--quiet",
        "--set",
        "ON_ERROR_STOP=1",
    ]
    subprocess.run(psql, input=dump, text=True, check=True, stdout=subprocess.DEVNULL)
    store = database.open(vector="title", metric="dot")
    assert store.correction().model.fingerprint == model.fingerprint
    assert database.open(vector="embedding", metric="dot").correction() is None
    hubplugin.refresh(store)
    database.run("ALTER TABLE photos RENAME title TO heading")
    assert (
        hubplugin.inspect(
            database.open(vector="heading", metric="dot"), queries=0
        ).missing
        == 0
    )


def run_advice(error, database):
    """Runs what the line of `error` says to run."""
    line = str(error.value)
    assert "\n" not in line
    database.run(*line.partition("to delete them: ")[2].split("; "))


def test_the_model_of_a_dropped_table_goes_by_what_is_said_and_by_a_removal_of_another(
    database,
):
    database.create(VECTORS)
    database.create(VECTORS, table="others")
    correct(database)
    database.run("DROP TABLE photos")
    with pytest.raises(
        StoreError, match=r"there is no table photos.*corrections still has models"
    ) as caught:
        database.open(metric="dot")
    hubplugin.remove(database.open("others", metric="dot"))
    assert "hub" not in database.dump()

    correct(database, "others")
    database.run("DROP TABLE others")
    with pytest.raises(StoreError) as caught:
        database.open("others", metric="dot")
    run_advice(caught, database)
    assert database.run("SELECT count(*) FROM hubplugin.corrections") == [(0,)]


@pytest.mark.parametrize(
    "dropped", ["ALTER TABLE photos DROP title", "DROP EXTENSION vector CASCADE"]
)
def test_the_offsets_of_a_dropped_column_go_by_what_is_said_and_by_a_job_on_another(
    dropped, database
):
    database.create(VECTORS, "title vector(8)")
    database.run("UPDATE photos SET title = embedding")
    correct(database)
    database.run("ALTER TABLE photos DROP embedding")
    store = correct(database, vector="title")
    assert store.require_active().column == "hub_offset"
    assert database.run("SELECT DISTINCT vector FROM hubplugin.corrections") == [
        ("title",)
    ]

    database.run(dropped)
    with pytest.raises(
        StoreError, match=r"0 columns are vectors|no pgvector"
    ) as caught:
        database.open(metric="dot")
    run_advice(caught, database)
    assert "hub_offset" not in database.dump()


def test_a_column_of_offsets_that_somebody_dropped_is_told_with_the_way_out(database):
    database.create(VECTORS)
    store = correct(database)
    database.run("ALTER TABLE photos DROP hub_offset")
    with pytest.raises(StoreError, match="`hubplugin remove` and apply again"):
        hubplugin.inspect(store)
    hubplugin.remove(store)
    assert "hub" not in database.dump()
    correct(database)


def test_a_typing_error_in_a_name_advises_no_deletion(database):
    database.create(VECTORS)
    correct(database)
    for named in ({"table": "photoz"}, {"vector": "embeddinq"}):
        with pytest.raises(StoreError) as caught:
            database.open(metric="dot", **named)
        assert "DELETE" not in str(caught.value)


def test_a_pgvector_whose_vacuum_damages_indexes_is_warned_of(database):
    database.create(VECTORS)
    assert not any("0.8.4" in note for note in correct(database).notes())
    database.run(
        "UPDATE pg_extension SET extversion = '0.8.3' WHERE extname = 'vector'"
    )
    notes = hubplugin.inspect(database.open(metric="dot"), queries=0).notes
    assert [
        note
        for note in notes
        if note.startswith("pgvector 0.8.3: before 0.8.4 a vacuum can damage")
    ]
