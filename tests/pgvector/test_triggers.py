"""Triggers, rules and constraints that do something else with a write: it is undone, and they are named."""

import pytest

import hubplugin_pgvector.store
from hubplugin import StoreError, apply, inspect, refresh, remove
from tests.pgvector.conftest import BANK, VECTORS
from tests.refusals import refused

pytestmark = pytest.mark.slow

ROW = "FOR EACH ROW EXECUTE FUNCTION meddle()"
EMPTIES = "NEW.embedding = NULL; RETURN NEW;"
BEFORE = f"TRIGGER t BEFORE UPDATE ON photos {ROW}"
DEEP = "WHEN (pg_trigger_depth() < 1) EXECUTE FUNCTION meddle()"
MEDDLING = {
    "changes the offset": (
        "NEW.hub_offset_v1 = 0; RETURN NEW;",
        BEFORE,
        "50 lack their offset",
    ),
    "empties a vector of a later batch": (
        EMPTIES,
        "TRIGGER t BEFORE UPDATE ON photos FOR EACH ROW WHEN (OLD.id = 120) EXECUTE FUNCTION meddle()",
        "1 of 50 rows have another vector",
    ),
    "is deferred to the end of the transaction": (
        "UPDATE photos SET embedding = NULL WHERE id = NEW.id; RETURN NULL;",
        f"CONSTRAINT TRIGGER t AFTER UPDATE ON photos DEFERRABLE INITIALLY DEFERRED FOR EACH ROW {DEEP}",
        "50 of 50 rows have another vector",
    ),
    "raises": ("RAISE 'append only' USING ERRCODE = '55000';", BEFORE, "append only"),
    "is a rule": (
        "RETURN NULL;",
        "RULE t AS ON UPDATE TO photos DO INSTEAD NOTHING",
        "50 lack their offset",
    ),
}


@pytest.fixture(autouse=True)
def _pages(monkeypatch):
    monkeypatch.setattr(hubplugin_pgvector.store, "PAGE", 50)


def fill(database, body):
    """A store, and the function of a trigger."""
    database.create(VECTORS, "hits int DEFAULT 0")
    database.run(
        f"CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$"
    )
    return database.open()


@pytest.mark.parametrize("what", MEDDLING)
def test_what_changes_more_than_offsets_is_named_and_undone(what, database):
    body, trigger, line = MEDDLING[what]
    store = fill(database, body)
    database.run(f"CREATE {trigger}")
    before = database.lines()
    with refused(StoreError, line) as caught:
        apply(store, BANK, "is", force=True)
    assert f"{'rule' if 'RULE' in trigger else 'trigger'} t" in str(caught.value)
    remove(store)
    assert database.lines() == before


def test_a_trigger_that_came_later_stops_a_refresh_and_the_active_offsets_stay(
    database,
):
    store = fill(database, EMPTIES)
    apply(store, BANK, "is", force=True)
    database.run(
        "INSERT INTO photos SELECT id + 900, embedding FROM photos WHERE id < 3",
        f"CREATE TRIGGER t BEFORE UPDATE ON photos {ROW}",
    )
    stored = "SELECT id, embedding::text, hub_offset FROM photos ORDER BY id"
    before = database.run(stored)
    with refused(StoreError, "these fire on update: trigger t"):
        refresh(store)
    assert database.run(stored) == before
    database.run("ALTER TABLE photos DISABLE TRIGGER t")
    refresh(store)
    assert inspect(store, queries=0).missing == 0


def test_a_trigger_that_lets_offsets_be_is_named_and_every_row_has_its_offset(database):
    store = fill(database, "NEW.hits = OLD.hits + 1; RETURN NEW;")
    database.run(
        f"CREATE TRIGGER counts BEFORE UPDATE ON photos {ROW}",
        f"CREATE TRIGGER other BEFORE UPDATE OF embedding ON photos {ROW}",
    )
    notes = apply(store, BANK, "is", force=True, dry_run=True).notes
    assert "the update of every row fires trigger counts" in notes
    apply(store, BANK, "is", force=True)
    assert inspect(store, queries=0).stale == 0
    assert database.run(
        "SELECT count(*) FROM photos WHERE hub_offset IS NOT NULL AND hits = 1"
    ) == [(300,)]
