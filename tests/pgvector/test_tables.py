"""What a table may look like: corrected, and after a removal as it was to the last line of a dump; or refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest

import hubplugin_pgvector.store
from hubplugin import Bank, StoreError, apply, inspect, open_store, refresh, remove
from tests.core.formulas import similarity
from tests.pgvector.conftest import BANK, QUERIES, VECTORS
from tests.refusals import refused

pytestmark = pytest.mark.slow

ROWS = 200

PLAIN = "id int PRIMARY KEY, embedding vector(8)"


@dataclass
class Kind:
    """The columns of a table, what is done behind its creation, how it is filled, and the options of its URL."""

    columns: str = PLAIN
    after: Sequence[str] = ()
    insert: str = "INSERT INTO {t} SELECT i, {v}"
    options: Mapping[str, str] = field(default_factory=dict)


INDEX = "CREATE INDEX ON photos USING hnsw (embedding vector_cosine_ops) WITH (m = 8, ef_construction = 32)"
KINDS = {
    "unique": Kind(
        "id text NOT NULL, embedding vector(8), UNIQUE (id)",
        insert="INSERT INTO photos SELECT 'key ' || i, {v}",
        options={"key": "id"},
    ),
    "quoted": Kind(
        '"The Id" int PRIMARY KEY, "Em{bed}ding" vector(8)',
        options={"vector": '"Em{bed}ding"', "key": '"The Id"'},
    ),
    "halfvec": Kind(
        "id int PRIMARY KEY, embedding halfvec(8)",
        insert="INSERT INTO {t} SELECT i, {v}::halfvec",
    ),
    "rounded": Kind(options={"index": "halfvec"}),
    "unindexed": Kind(options={"index": "none"}),
    "indexed": Kind(f"{PLAIN}, hits int DEFAULT 0", [INDEX], options={"metric": ""}),
}


@pytest.fixture(params=sorted(KINDS))
def kind(request, database):
    """A table of each kind: what the kind is called, the table, and the options of its URL."""
    kind, table = KINDS[request.param], "photos"
    if request.param == "quoted":
        database.run(
            'CREATE SCHEMA "My Schema"', "CREATE SCHEMA hubplugin"
        )  # which others made, and which stays
        table = '"My Schema"."Photos ""1"" of 100%"'
    database.run(f"CREATE TABLE {table} ({kind.columns})", *kind.after)
    vector = "(SELECT array_agg(random() - 0.5 + 0 * i * j)::real[]::vector FROM generate_series(1, 8) j)"
    insert = kind.insert.format(t=table, v=vector)
    database.run("SELECT setseed(0.5)", f"{insert} FROM generate_series(0, 199) i")
    return request.param, table, {"metric": "cosine", **kind.options}


def exact(store, model):
    """The corrected top 10 of `queries`, in float64 from what is stored."""
    batches = list(store.scan())
    ids = [key for batch in batches for key in batch.ids]
    vectors = np.concatenate([batch.vectors for batch in batches])
    scores = similarity(QUERIES, vectors, "cosine") + model.offsets(vectors)
    return [[ids[row] for row in line] for line in np.argsort(-scores, axis=1)[:, :10]]


def test_each_kind_of_table_is_corrected_refreshed_and_left_as_it_was(
    kind, database, monkeypatch
):
    name, table, options = kind
    monkeypatch.setattr(hubplugin_pgvector.store, "PAGE", 17)
    before = database.lines()
    store = database.open(table, **options)
    assert store.count() == ROWS
    model = apply(store, BANK, "is", force=True).model
    report = inspect(store, queries=0)
    ids = [key for batch in store.scan() for key in batch.ids]
    assert len(ids) == len(set(ids)) == ROWS
    assert (report.count, report.missing, report.stale) == (ROWS, 0, 0)

    database.setting(enable_seqscan="off", enable_sort="off")
    again = database.open(table, **options)
    assert ("uses the index" in "".join(again.notes())) == (name != "unindexed")
    if name == "indexed":  # as the index that is there
        (built,) = database.run(
            "SELECT indexdef FROM pg_indexes WHERE indexname LIKE 'hub_offset_%'"
        )[0]
        assert "(m='8', ef_construction='32')" in built
    found, expected = again.search(QUERIES, 10).ids, exact(again, model)
    same = np.mean([np.isin(*pair) for pair in zip(found, expected, strict=True)])
    assert same >= (0.95 if name in ("halfvec", "rounded", "indexed") else 0.98)

    assert refresh(again).stale == 0
    remove(again)
    database.setting()
    assert database.lines() == before
    assert database.open(table, **options).correction() is None


def test_two_columns_of_one_table_are_corrected_each_on_its_own(database):
    database.create(VECTORS, "title vector(8)")
    database.run("UPDATE photos SET title = embedding * embedding")
    one, other = (database.correct(vector=vector) for vector in ("embedding", "title"))
    assert one.require_active().column == "hub_offset"
    assert other.require_active().column == "title_hub_offset"
    ours = "SELECT count(*) FROM pg_indexes WHERE indexname LIKE 'hub_offset_%'"
    assert database.run(ours) == [(2,)]
    remove(one)
    assert inspect(other, queries=0).missing == 0


REFUSED = {
    "no table": ("SELECT", {"table": "nothing"}, "there is no table nothing"),
    "a view": (
        "CREATE VIEW seen AS SELECT * FROM photos",
        {"table": "seen"},
        "seen is a view, partitioned, a partition",
    ),
    "a partition": (
        "CREATE TABLE p (id int PRIMARY KEY, embedding vector(8)) PARTITION BY RANGE (id);"
        " CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (9)",
        {"table": "p1"},
        "p1 is a view, partitioned, a partition",
    ),
    "a key of two columns": (
        "ALTER TABLE photos DROP CONSTRAINT photos_pkey, ADD PRIMARY KEY (id, hits)",
        {},
        "no primary key of one column",
    ),
    "another key": (
        "SELECT",
        {"key": "hits"},
        "key=hits is not one column that is UNIQUE",
    ),
    "no vector": (
        "SELECT",
        {"vector": "hits"},
        "there are 0 columns of type vector or halfvec; name one: vector=embedding",
    ),
    "two vectors": (
        "ALTER TABLE photos ADD v2 vector(3)",
        {},
        r"name one: vector=embedding\|v2",
    ),
    "no dimension": (
        "ALTER TABLE photos ALTER embedding TYPE vector",
        {},
        r"no fixed dimension; .* ALTER TABLE photos ALTER embedding TYPE vector\(N\)",
    ),
    "no metric": (
        "SELECT",
        {"metric": ""},
        "no single index tells how embedding is compared; add metric=cosine",
    ),
    "2,000 dimensions": (
        "ALTER TABLE photos ALTER embedding TYPE vector(2000)",
        {},
        "add index=halfvec",
    ),
    "another index": (
        "SELECT",
        {"index": "ivfflat"},
        "expected vector, halfvec or none",
    ),
    "no pgvector": ("DROP EXTENSION vector CASCADE", {}, "CREATE EXTENSION vector"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_can_carry_no_offsets_is_refused_in_one_line(what, database):
    statements, options, line = REFUSED[what]
    database.run(
        "CREATE TABLE photos (id int PRIMARY KEY, embedding vector(8), hits int)",
        *statements.split(";"),
    )
    with refused(StoreError, line):
        database.open(**options)


def test_a_column_of_the_users_own_is_not_written_over(database):
    database.create(VECTORS, "hub_offset text")
    before, store = database.dump(), database.open()
    with refused(
        StoreError,
        r"the column hub_offset holds data that are not hubplugin's.*, or rename or drop the column",
    ):
        apply(store, BANK, "is", force=True)
    assert database.dump() == before


def test_a_url_without_a_host_is_of_a_local_server(database):
    database.run("CREATE TABLE photos (id int PRIMARY KEY, embedding vector(3))")
    host = dict(parse_qsl(urlsplit(database.address).query))["host"]
    url = f"postgresql:///{database.name}?host={host}&user=postgres&table=photos&metric=dot"
    store = open_store(url)
    assert (store.count(), store.url) == (0, url)


def test_no_message_has_a_password_in_it(database):
    host = database.address.partition("?")[2]
    for url in (
        f"postgresql://postgres:geheim@/{database.name}?{host}&table=nothing",
        f"postgresql://postgres@/{database.name}?{host}&password=geheim&table=nothing",
        "postgresql://me:geheim@127.0.0.1:1/db?table=nothing",
        "postgresql://me:geheim%zz@127.0.0.1:1/db?table=nothing",
        "postgresql://me:geheim%00@127.0.0.1:1/db?table=nothing",
        "postgresql://me:geheim/2@127.0.0.1:1/db?table=nothing",
        "postgresql://me:geheim?2@127.0.0.1:1/db?table=nothing",
        "postgresql://me:2?geheim@127.0.0.1:1/db?table=nothing",
        "postgresql://me:geheim#2@127.0.0.1:1/db?table=nothing",
        "postgresql://me:geheim[2@127.0.0.1:1/db?table=nothing",
        "postgresql://me:p@geheim/2@127.0.0.1:1/db?table=nothing",
        f"postgresql://postgres@/{database.name}?{host}&PASSWORD=geheim&table=nothing",
        "postgresql://me@127.0.0.1:1/db?passwd=geheim&table=nothing",
        f"postgresql://postgres%3Ageheim@/{database.name}?{host}&table=nothing",
        "postgresql://me@127.0.0.1:1/db?oauth_client_secret=geheim&table=nothing",
    ):
        with pytest.raises(StoreError) as caught:
            open_store(url)
        assert "geheim" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_rows_without_a_vector_have_no_offset(database):
    database.create(VECTORS)
    database.run("INSERT INTO photos VALUES (300)")
    store = database.correct()
    assert store.count() == inspect(store).count == 300
    assert store.search(QUERIES[:1], 400).ids[0].count(300) == 0
    found = database.run("SELECT hub_offset FROM photos WHERE id = 300")
    assert found == [(None,)]


def test_a_column_is_read_as_pairs_and_what_a_row_has_by_id(database):
    database.create(VECTORS[:5], "title text", "year int")
    database.run("UPDATE photos SET title = 'it''s ' || id, year = 2000 WHERE id <> 3")
    store = database.open()
    pairs = Bank.from_field(store, "title", "model:embed")
    assert sorted(pairs.answers) == [0, 1, 2, 4]
    assert list(pairs.queries) == [f"it's {row}" for row in pairs.answers]
    with refused(StoreError, "has no column 'headline'"):
        Bank.from_field(store, "headline", "model:embed")
    fields = store.read_fields([3, 1, 99])
    assert [each.get("title") for each in fields] == [None, "it's 1", None]
    assert fields[1]["year"] == 2000
    assert "embedding" not in fields[1]
