"""What a store corrects: a vector column of a table as the catalog knows it, and the index that is built beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

from hubplugin.errors import StoreError
from hubplugin.metric import Metric
from hubplugin.store import Id
from hubplugin_pgvector.transport import WAIT_FOR_TABLE, Transport, name_of, short

OFFSET = "hub_offset"
TYPES = ("vector", "halfvec")
MOST = {"vector": 2000, "halfvec": 4000}
"""The most dimensions that an index of each type can have."""
OPCLASSES = {"cosine": Metric.COSINE, "ip": Metric.DOT, "l2": Metric.EUCLIDEAN}
KINDS = {"v": "a view", "m": "a materialised view", "f": "a foreign table", "S": "a sequence", "i": "an index"}

TABLE = """
SELECT c.oid::bigint, nspname::text, relname::text, relkind::text, relispartition,
    EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid)
    FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = to_regclass(%s)
"""
COLUMNS = """
SELECT attname::text, typname::text, atttypmod, attnum
    FROM pg_attribute JOIN pg_type t ON t.oid = atttypid WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
"""
PARTITIONS = """
SELECT relid::bigint, parentrelid::bigint, isleaf, nspname::text, relname::text, relkind::text
    FROM pg_partition_tree(%s::oid::regclass) JOIN pg_class c ON c.oid = relid
    JOIN pg_namespace n ON n.oid = relnamespace ORDER BY level
"""
INDEXES = """
SELECT split_part(opcname, '_', 2), array_to_string(reloptions, ', '), amname::text
    FROM pg_index i JOIN pg_class c ON c.oid = indexrelid JOIN pg_am a ON a.oid = relam
    JOIN pg_opclass o ON o.oid = indclass[0] JOIN pg_attribute t ON attrelid = indrelid AND attnum = indkey[0]
    WHERE indrelid = %s AND attname = %s AND amname IN ('hnsw', 'ivfflat') ORDER BY amname = 'hnsw'
"""
KEYS = """
SELECT array_agg(attname::text ORDER BY place), array_agg(format_type(atttypid, -1) ORDER BY place), indisprimary,
    bool_and(attnotnull)
    FROM pg_index, unnest(indkey::int2[]) WITH ORDINALITY AS keys(number, place)
    JOIN pg_attribute ON attnum = number
    WHERE attrelid = indrelid AND indrelid = %s AND indisunique AND place <= indnkeyatts
    AND indpred IS NULL AND indexprs IS NULL AND indisvalid GROUP BY indexrelid, indisprimary
"""
TREE = "(SELECT %s::oid UNION SELECT relid FROM pg_partition_tree(%s))"
"""A table by its oid, given twice, and its partitions."""
FIRING = f"""
SELECT 'trigger ' || tgname FROM pg_trigger WHERE tgrelid IN {TREE} AND NOT tgisinternal AND tgenabled IN ('O', 'A')
    AND tgtype & 16 > 0 AND tgattr::text = ''
UNION SELECT 'rule ' || rulename FROM pg_rewrite WHERE ev_class = %s AND ev_type = '2' AND ev_enabled IN ('O', 'A')
    ORDER BY 1
"""
POLICIES = (
    "SELECT row_security_active(%s::oid), ARRAY(SELECT polname::text FROM pg_policy WHERE polrelid = %s ORDER BY 1)"
)
TOUCHED = f"""
SELECT coalesce(sum(pg_stat_get_xact_tuples_inserted(oid) + pg_stat_get_xact_tuples_updated(oid)
    + pg_stat_get_xact_tuples_deleted(oid)), 0)::bigint FROM {TREE} AS tree (oid)
"""

IndexKind = Literal["vector", "halfvec", "none"]


@dataclass(frozen=True)
class Key:
    """The columns that tell one row from another, and the SQL type of each. plain: it is one whole number, and ids are
    int; else an id is the text of the column, and of several columns a JSON list of texts."""

    columns: Sequence[str]
    types: Sequence[str]
    plain: bool

    def selected(self, *table: str) -> str:
        """The columns in a SELECT, of `table` where others have the same names."""
        return ", ".join(name_of(*table, name) + ("" if self.plain else "::text") for name in self.columns)

    def id_of(self, values: Sequence[object]) -> Id:
        if len(values) > 1:
            return json.dumps(values, ensure_ascii=False)
        return cast(Id, values[0])

    def values_of(self, key: Id) -> list[str]:
        """What `id_of` was given, as texts."""
        return [str(key)] if len(self.columns) == 1 else json.loads(str(key))

    def placeholders(self) -> str:
        """The columns of one row as parameters, from texts."""
        return ", ".join(f"%s::text::{kind}" for kind in self.types)

    def listed(self, *table: str) -> str:
        """The columns themselves; of `table`, where those of `selected` have the same names and another order."""
        return ", ".join(name_of(*table, name) for name in self.columns)


@dataclass(frozen=True)
class Table:
    """The column `vector`, of `dim` components and of a `type` of pgvector, in the table `schema`.`name`; oid, number:
    by which PostgreSQL knows both, whatever their names. index: the type of the index that corrected searches use.
    options: those of the HNSW index that the user has on the column."""

    oid: int
    schema: str
    name: str
    partitioned: bool
    vector: str
    number: int
    type: str
    dim: int
    metric: Metric
    key: Key
    index: IndexKind
    options: str
    columns: frozenset[str]

    @property
    def identifier(self) -> str:
        return name_of(self.schema, self.name)

    def vectors_there(self) -> str:
        """The condition on rows that have something to correct."""
        return f"{name_of(self.vector)} IS NOT NULL"


def firing(transport: Transport, table: Table) -> Sequence[str]:
    """What fires on an update of `hub_offset`: `trigger NAME` and `rule NAME`."""
    return [row[0] for row in transport.rows(FIRING, (table.oid,) * 3)]


def hiding(transport: Transport, table: Table) -> str:
    """The policies that may hide rows of `table` from the role; empty where it sees all."""
    active, policies = transport.rows(POLICIES, (table.oid, table.oid))[0]
    return (f"row security ({', '.join(policies)})" if policies else "row security without a policy") if active else ""


def touched(transport: Transport, table: Table) -> int:
    """How often this session has inserted, updated or deleted a row of `table`, since a moment before."""
    return int(transport.rows(TOUCHED, (table.oid, table.oid))[0][0])


def read(transport: Transport, given: Mapping[str, str]) -> Table:
    """The table of which `given`, from a URL, names `table` and, where it is not plain, `vector`, `key`, `metric` and
    `index`. Names are written as in SQL. Raises StoreError for what is not there or cannot carry offsets."""
    url = transport.url
    if not given.get("table"):
        raise StoreError(f"{url}: names no table: postgresql://user@host/db?table=photos&vector=embedding&key=id")
    found = transport.rows(TABLE, (given["table"],))
    if not found:
        raise StoreError(
            f'{url}: there is no table {given["table"]}; names are as in SQL: Photos is photos, "Photos" is not'
        )
    oid, schema, name, kind, is_partition, has_children = found[0]
    if kind not in "rp":
        raise StoreError(
            f"{url}: {given['table']} is {KINDS.get(kind, 'no table')}; name the table that has the vectors"
        )
    if is_partition or (kind == "r" and has_children):
        which = "a partition" if is_partition else "a parent by inheritance, without partitions"
        raise StoreError(f"{url}: {given['table']} is {which}; name a whole table")
    foreign = [row[4] for row in transport.rows(PARTITIONS, (oid,)) if row[5] == "f"] if kind == "p" else []
    if foreign:
        raise StoreError(f"{url}: the partition {foreign[0]} is a foreign table, which can carry no index")
    columns = {name: (made, modifier, number) for name, made, modifier, number in transport.rows(COLUMNS, (oid,))}
    vector = _vector(url, given, {name: made[0] for name, made in columns.items()})
    type_name, dim, number = columns[vector]
    if dim < 1:
        raise StoreError(
            f"{url}: {vector} has no fixed dimension: ALTER TABLE ... ALTER {vector} TYPE {type_name}(384)"
        )
    metric, options = _metric(transport, given, oid, vector)
    index = _index(url, given, type_name, dim)
    key = _key(transport, given, oid)
    return Table(
        oid, schema, name, kind == "p", vector, number, type_name, dim, metric, key, index, options, frozenset(columns)
    )


def _name(name: str) -> str:
    """A column name as SQL reads it: in lower case, or as it stands within double quotes."""
    return name[1:-1].replace('""', '"') if len(name) > 1 and name[0] == name[-1] == '"' else name.lower()


def _vector(url: str, given: Mapping[str, str], columns: Mapping[str, str]) -> str:
    those = sorted(name for name, kind in columns.items() if kind in TYPES)
    if "vector" not in given:
        if len(those) == 1:
            return those[0]
        raise StoreError(f"{url}: {len(those)} columns are vectors, name one: vector={'|'.join(those) or '...'}")
    name = _name(given["vector"])
    if name not in those:
        raise StoreError(f"{url}: no column {name} of type vector or halfvec; there are {', '.join(those) or 'none'}")
    return name


def _metric(transport: Transport, given: Mapping[str, str], oid: int, vector: str) -> tuple[Metric, str]:
    """That of the URL, or of the indexes that the user has on the column; and the options of his HNSW index."""
    found = transport.rows(INDEXES, (oid, vector))
    by_metric = {  # hnsw comes last, and its options are taken
        OPCLASSES[name]: (options or "") if method == "hnsw" else ""
        for name, options, method in found
        if name in OPCLASSES
    }
    if "metric" in given:
        try:
            metric = Metric.parse(given["metric"])
        except ValueError as error:
            raise StoreError(f"{transport.url}: {error}") from None
        return metric, by_metric.get(metric, "")
    if len(by_metric) == 1:
        return next(iter(by_metric.items()))
    several = "indexes of several metrics say" if by_metric else "no index says"
    raise StoreError(f"{transport.url}: {several} how {vector} is compared; add metric=cosine, dot or euclidean")


def _index(url: str, given: Mapping[str, str], type_name: str, dim: int) -> IndexKind:
    index = given.get("index", type_name)
    if index == "none":
        return "none"
    if index not in TYPES:
        raise StoreError(f"{url}: index={index}: expected vector, halfvec or none")
    if dim + 1 <= MOST[index]:
        return cast(IndexKind, index)
    way_out = "index=halfvec, which rounds to 16 bits" if dim + 1 <= MOST["halfvec"] else "index=none, and re-rank"
    raise StoreError(
        f"{url}: a {index} index ends at {MOST[index]:,} dimensions, and {dim:,} and the offset are more; add {way_out}"
    )


def _key(transport: Transport, given: Mapping[str, str], oid: int) -> Key:
    """The primary key, or the unique columns that are named."""
    unique = transport.rows(KEYS, (oid,))
    if "key" in given:
        wanted = [_name(name.strip()) for name in given["key"].split(",")]
        fitting = [row for row in unique if sorted(row[0]) == sorted(wanted) and row[3]]
    else:
        wanted, fitting = [], [row for row in unique if row[2]]
    if not fitting:
        what = f"key={given['key']} is not unique and NOT NULL" if wanted else "has no primary key"
        raise StoreError(f"{transport.url}: {what}; name the columns that tell one row from another: key=id or key=a,b")
    columns, types = fitting[0][0], fitting[0][1]
    return Key(columns, types, len(types) == 1 and types[0] in ("smallint", "integer", "bigint"))


def index_name(relation: str, oid: int, number: int) -> str:
    """That of the index of version `number`; two relations have two, however their names begin."""
    return f"{short(relation, 30)}_hub_offset_{oid}_v{number}"


def build_index(transport: Transport, table: Table, name: str, number: int, expression: str) -> None:
    """The index `name` over `expression`, built while others read and write; one that was cut off is built anew."""
    if _valid(transport, name_of(table.schema, name), table.oid):
        return
    shape = f" USING hnsw {expression}" + (f" WITH ({table.options})" if table.options else "")
    if not table.partitioned:
        _concurrently(transport, table.schema, name, table.oid, table.identifier, shape)
        return
    # An index of a partitioned table can't be built concurrently: those of its partitions are, and then belong to it.
    names = {table.oid: name_of(table.schema, name)}
    for oid, parent, isleaf, schema, relation, _ in transport.rows(PARTITIONS, (table.oid,)):
        part = name if oid == table.oid else index_name(relation, oid, number)
        names[oid] = name_of(schema, part)
        if isleaf:
            _concurrently(transport, schema, part, oid, name_of(schema, relation), shape)
        with transport.transaction(wait=WAIT_FOR_TABLE):
            if not isleaf and not _valid(transport, names[oid], oid):
                create = f"CREATE INDEX IF NOT EXISTS {name_of(part)} ON ONLY {name_of(schema, relation)}"
                transport.run(create + shape)
            if parent is not None:
                transport.run(f"ALTER INDEX {names[parent]} ATTACH PARTITION {names[oid]}")


def _concurrently(transport: Transport, schema: str, name: str, oid: int, relation: str, shape: str) -> None:
    """Builds the index `name` of the relation `oid`. One that was cut off is dropped, also where this one is."""
    index = name_of(schema, name)
    if _valid(transport, index, oid):
        return
    transport.run_alone(f"DROP INDEX CONCURRENTLY IF EXISTS {index}", "dropping an index that was cut off")
    try:
        transport.run_alone(f"CREATE INDEX CONCURRENTLY {name_of(name)} ON {relation}{shape}", "building the index")
    except StoreError:
        # Every write goes into it, and no search uses it. Where that has to wait, the next run does it.
        with suppress(StoreError), transport.transaction(wait=1):
            if not _valid(transport, index, oid):
                transport.run(f"DROP INDEX IF EXISTS {index}")
        raise


def _valid(transport: Transport, index: str, oid: int) -> bool:
    """Whether `index` can be used. Raises StoreError where it is one of another relation than `oid`."""
    name = index.replace("%%", "%")
    found = transport.rows(
        "SELECT indrelid = %s, indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)", (oid, name)
    )
    if found and not found[0][0]:
        raise StoreError(f"{transport.url}: the index {name} is one of another table; rename it, and run it again")
    return bool(found) and found[0][1]
