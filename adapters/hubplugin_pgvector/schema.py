"""What a store corrects: a vector column of a table as the catalog knows it, and the index that is built beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric
from hubplugin_pgvector.database import WAIT_FOR_TABLE, Database, quote_name, truncate

OFFSET = "hub_offset"
MOST_DIMENSIONS = {"vector": 2000, "halfvec": 4000}
"""The most dimensions that an index of each type can have."""
INTEGERS = ("smallint", "integer", "bigint")
METRICS = {"cosine": Metric.COSINE, "ip": Metric.DOT, "l2": Metric.EUCLIDEAN}
"""By the second word of an operator class."""
KINDS = {
    "v": "a view",
    "m": "a materialised view",
    "f": "a foreign table",
    "S": "a sequence",
    "i": "an index",
}

TABLE = """
SELECT c.oid::bigint, nspname::text, relname::text, relkind::text, relispartition,
    EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid)
    FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = to_regclass(%s)
"""
COLUMNS = """
SELECT attname::text, typname::text, atttypmod, attnum
    FROM pg_attribute JOIN pg_type t ON t.oid = atttypid WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped
"""
TREE = """(SELECT relid, parentrelid, level FROM pg_partition_tree(%(oid)s::oid::regclass)
    UNION SELECT %(oid)s::oid::regclass, NULL, 0) AS tree (relation, parent, level)"""
"""A table by its oid, and its partitions."""
RELATIONS = f"""
SELECT relation::oid::bigint, parent::oid::bigint, relkind::text, nspname::text, relname::text
    FROM {TREE} JOIN pg_class c ON c.oid = relation JOIN pg_namespace n ON n.oid = relnamespace ORDER BY level
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
TRIGGERS = f"""
SELECT 'trigger ' || tgname FROM pg_trigger WHERE tgrelid IN (SELECT relation FROM {TREE}) AND NOT tgisinternal
    AND tgenabled IN ('O', 'A') AND tgtype & 16 > 0 AND tgattr::text = ''
UNION SELECT 'rule ' || rulename FROM pg_rewrite
    WHERE ev_class = %(oid)s AND ev_type = '2' AND ev_enabled IN ('O', 'A') ORDER BY 1
"""
POLICIES = """
SELECT row_security_active(%(oid)s::oid), ARRAY(SELECT polname::text FROM pg_policy WHERE polrelid = %(oid)s ORDER BY 1)
"""
CHANGES = f"""
SELECT coalesce(sum(pg_stat_get_xact_tuples_inserted(relation) + pg_stat_get_xact_tuples_updated(relation)
    + pg_stat_get_xact_tuples_deleted(relation)), 0)::bigint FROM {TREE}
"""

IndexKind = Literal["vector", "halfvec", "none"]


@dataclass(frozen=True)
class Key:
    """The columns that tell one row from another, and the SQL type of each. The id of a row is int where one column of
    whole numbers tells it, else the text of the column, and of several columns a JSON list of texts."""

    columns: Sequence[str]
    types: Sequence[str]

    def names(self, *table: str) -> str:
        """The columns in SQL, of `table` where others have the same names."""
        return ", ".join(quote_name(*table, name) for name in self.columns)

    def id(self, *table: str) -> str:
        """The id of a row in SQL."""
        if len(self.columns) > 1:
            texts = ", ".join(
                f"{quote_name(*table, name)}::text" for name in self.columns
            )
            return f"json_build_array({texts})::text"
        return (
            self.names(*table)
            if self.types[0] in INTEGERS
            else f"{self.names(*table)}::text"
        )

    def values(self, id: str) -> str:
        """The columns of the row whose id is `id` in SQL, a text."""
        texts = (
            [f"({id}::json ->> {place})" for place in range(len(self.types))]
            if len(self.types) > 1
            else [id]
        )
        return ", ".join(
            f"{text}::{sql_type}"
            for text, sql_type in zip(texts, self.types, strict=True)
        )


@dataclass(frozen=True)
class VectorTable:
    """The column `vector`, of `dim` components and of a `type` of pgvector, in the table `schema`.`name`; oid, number:
    by which PostgreSQL knows both, whatever their names. index: the type of the index that corrected searches use.
    options: those of the HNSW index that the user has on the column."""

    oid: int
    schema: str
    name: str
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
        return quote_name(self.schema, self.name)

    @property
    def has_vector(self) -> str:
        """The condition on rows that have something to correct."""
        return f"{quote_name(self.vector)} IS NOT NULL"


def list_triggers(database: Database, oid: int) -> Sequence[str]:
    """What fires in `database` on an update of `hub_offset` in the table `oid`: "trigger NAME" and "rule NAME"."""
    return [row[0] for row in database.rows(TRIGGERS, {"oid": oid})]


def describe_policies(database: Database, oid: int) -> str:
    """The policies of `database` that may hide rows of the table `oid` from the role; empty where it sees all."""
    is_active, policies = database.rows(POLICIES, {"oid": oid})[0]
    security = (
        f"row security ({', '.join(policies)})"
        if policies
        else "row security without a policy"
    )
    return security if is_active else ""


def count_changes(database: Database, oid: int) -> int:
    """How often this session of `database` has inserted, updated or deleted a row of the table `oid`, since a moment
    before."""
    return int(database.rows(CHANGES, {"oid": oid})[0][0])


def read(database: Database, options: Mapping[str, str]) -> VectorTable:
    """Reads which column a URL names.

    Args:
        database: the database of the URL.
        options: those of the URL: `table` and, where it is not plain, `vector`, `key`, `metric` and `index`. Names are
            written as in SQL.

    Raises:
        StoreError: a name stands for nothing, or the column cannot carry offsets.
    """
    url, table = database.url, options.get("table")
    if not table:
        raise StoreError(
            f"{url}: names no table: postgresql://user@host/db?table=photos&vector=embedding&key=id"
        )
    rows = database.rows(TABLE, (table,))
    if not rows:
        raise StoreError(
            f'{url}: there is no table {table}; names are as in SQL: Photos is photos, "Photos" is not'
        )
    oid, schema, name, kind, is_partition, has_children = rows[0]
    if kind not in "rp":
        raise StoreError(
            f"{url}: {table} is {KINDS.get(kind, 'no table')}; name the table that has the vectors"
        )
    if is_partition or (kind == "r" and has_children):
        part = (
            "a partition"
            if is_partition
            else "a parent by inheritance, without partitions"
        )
        raise StoreError(f"{url}: {table} is {part}; name a whole table")
    for *_, relation_kind, _, relation in database.rows(RELATIONS, {"oid": oid}):
        if relation_kind == "f":
            raise StoreError(
                f"{url}: the partition {relation} is a foreign table, which can carry no index"
            )
    columns = {column: rest for column, *rest in database.rows(COLUMNS, (oid,))}
    vectors = sorted(
        column
        for column, (sql_type, *_) in columns.items()
        if sql_type in MOST_DIMENSIONS
    )
    vector = _choose_vector(url, options, vectors)
    sql_type, dim, number = columns[vector]
    if dim < 1:
        raise StoreError(
            f"{url}: {vector} has no fixed dimension: ALTER TABLE ... ALTER {vector} TYPE {sql_type}(384)"
        )
    metric, index_options = _read_metric(database, options, oid, vector)
    index, key = (
        _choose_index(url, options, sql_type, dim),
        _read_key(database, options, oid),
    )
    names = frozenset(columns)
    return VectorTable(
        oid,
        schema,
        name,
        vector,
        number,
        sql_type,
        dim,
        metric,
        key,
        index,
        index_options,
        names,
    )


def _parse_name(name: str) -> str:
    """A column name as SQL reads it: in lower case, or as it stands within double quotes."""
    return (
        name[1:-1].replace('""', '"')
        if len(name) > 1 and name[0] == name[-1] == '"'
        else name.lower()
    )


def _choose_vector(url: str, options: Mapping[str, str], names: Sequence[str]) -> str:
    """The column that is meant, of those whose `names` are given."""
    if "vector" not in options:
        if len(names) == 1:
            return names[0]
        raise StoreError(
            f"{url}: {len(names)} columns are vectors, name one: vector={'|'.join(names) or '...'}"
        )
    name = _parse_name(options["vector"])
    if name not in names:
        raise StoreError(
            f"{url}: no column {name} of type vector or halfvec; there are {', '.join(names) or 'none'}"
        )
    return name


def _read_metric(
    database: Database, options: Mapping[str, str], oid: int, vector: str
) -> tuple[Metric, str]:
    """The metric that the URL names, or that of the indexes on the column; and the options of the HNSW index on it."""
    by_metric = {  # hnsw comes last, and its options are taken
        METRICS[name]: (index_options or "") if method == "hnsw" else ""
        for name, index_options, method in database.rows(INDEXES, (oid, vector))
        if name in METRICS
    }
    if "metric" in options:
        try:
            metric = Metric.parse(options["metric"])
        except InputError as error:
            raise StoreError(f"{database.url}: {error}") from None
        return metric, by_metric.get(metric, "")
    if len(by_metric) == 1:
        return next(iter(by_metric.items()))
    lack = "indexes of several metrics say" if by_metric else "no index says"
    raise StoreError(
        f"{database.url}: {lack} how {vector} is compared; add metric=cosine, dot or euclidean"
    )


def _choose_index(
    url: str, options: Mapping[str, str], sql_type: str, dim: int
) -> IndexKind:
    index = options.get("index", sql_type)
    if index not in (*MOST_DIMENSIONS, "none"):
        raise StoreError(f"{url}: index={index}: expected vector, halfvec or none")
    if index == "none" or dim < MOST_DIMENSIONS[index]:
        return cast(IndexKind, index)
    most, is_short = MOST_DIMENSIONS[index], dim < MOST_DIMENSIONS["halfvec"]
    way_out = (
        "index=halfvec, which rounds to 16 bits"
        if is_short
        else "index=none, and re-rank"
    )
    raise StoreError(
        f"{url}: a {index} index ends at {most:,} dimensions, and {dim:,} and the offset are more; add {way_out}"
    )


def _read_key(database: Database, options: Mapping[str, str], oid: int) -> Key:
    """The primary key, or the unique columns that are named."""
    names = (
        sorted(_parse_name(name.strip()) for name in options["key"].split(","))
        if "key" in options
        else None
    )
    for columns, types, is_primary, is_not_null in database.rows(KEYS, (oid,)):
        if is_primary if names is None else sorted(columns) == names and is_not_null:
            return Key(columns, types)
    lack = (
        "has no primary key"
        if names is None
        else f"key={options['key']} is not unique and NOT NULL"
    )
    raise StoreError(
        f"{database.url}: {lack}; name the columns that tell one row from another: key=id or key=a,b"
    )


def index_name(relation: str, oid: int, number: int) -> str:
    """The name of the index of version `number` on the table `relation`; its `oid` keeps two tables apart whose names
    begin alike."""
    return f"{truncate(relation, 30)}_hub_offset_{oid}_v{number}"


def build_index(
    database: Database, table: VectorTable, name: str, number: int, expression: str
) -> None:
    """Builds an index while others read and write; an index that was cut off is built anew.

    An index of a partitioned table can't be built concurrently: those of its partitions are, and then belong to it.

    Args:
        database: the database.
        table: the table.
        name: of the index.
        number: of the version.
        expression: what is indexed, in SQL.
    """
    if _is_valid(database, quote_name(table.schema, name), table.oid):
        return
    shape = f" USING hnsw {expression}" + (
        f" WITH ({table.options})" if table.options else ""
    )
    indexes = dict[int, str]()
    for oid, parent, kind, schema, relation in database.rows(
        RELATIONS, {"oid": table.oid}
    ):
        part = name if oid == table.oid else index_name(relation, oid, number)
        indexes[oid], on = (
            quote_name(schema, part),
            f"{quote_name(schema, relation)}{shape}",
        )
        if kind != "p":
            _build_concurrently(
                database, indexes[oid], oid, f"{quote_name(part)} ON {on}"
            )
        elif not _is_valid(database, indexes[oid], oid):
            with database.transaction(wait=WAIT_FOR_TABLE):
                database.run(
                    f"CREATE INDEX IF NOT EXISTS {quote_name(part)} ON ONLY {on}"
                )
        if parent is not None:
            with database.transaction(wait=WAIT_FOR_TABLE):
                database.run(
                    f"ALTER INDEX {indexes[parent]} ATTACH PARTITION {indexes[oid]}"
                )


def _build_concurrently(
    database: Database, index: str, oid: int, definition: str
) -> None:
    """Builds `index` of the relation `oid`. What was cut off is dropped before, and where this one is cut off, too."""
    if _is_valid(database, index, oid):
        return
    database.run_alone(
        f"DROP INDEX CONCURRENTLY IF EXISTS {index}",
        "dropping an index that was cut off",
    )
    try:
        database.run_alone(
            f"CREATE INDEX CONCURRENTLY {definition}", "building the index"
        )
    except StoreError:
        # Every write goes into it, and no search uses it. Where that has to wait, the next run does it.
        with suppress(StoreError), database.transaction(wait=1):
            if not _is_valid(database, index, oid):
                database.run(f"DROP INDEX IF EXISTS {index}")
        raise


def _is_valid(database: Database, index: str, oid: int) -> bool:
    """Whether `index` can be used. Raises StoreError where it is one of another relation than `oid`."""
    name = index.replace("%%", "%")
    query = "SELECT indrelid = %s, indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)"
    rows = database.rows(query, (oid, name))
    if rows and not rows[0][0]:
        raise StoreError(
            f"{database.url}: the index {name} is one of another table; rename it, and run it again"
        )
    return bool(rows) and rows[0][1]
