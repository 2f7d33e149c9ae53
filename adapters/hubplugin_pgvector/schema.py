"""The vector column that a store corrects, and the index over its offsets.

PostgreSQL's catalog is read to find and describe the column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hubplugin.errors import InputError, StoreError
from hubplugin.metric import Metric
from hubplugin_pgvector.database import Database, quote_name

OFFSET = "hub_offset"
MOST_DIMENSIONS = {"vector": 2000, "halfvec": 4000}
"""The maximum dimensions of an index of each type."""
INTEGERS = ("smallint", "integer", "bigint")
METRICS = {"cosine": Metric.COSINE, "ip": Metric.DOT, "l2": Metric.EUCLIDEAN}
"""The metrics, by the second word of an operator class's name."""
TABLE = """
SELECT c.oid::bigint, nspname::text, relname::text, relkind = 'r'
    AND NOT EXISTS (SELECT FROM pg_inherits WHERE c.oid IN (inhparent, inhrelid))
    FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
    WHERE c.oid = to_regclass(%s)
"""
COLUMNS = """
SELECT attname::text, typname::text, atttypmod
    FROM pg_attribute JOIN pg_type t ON t.oid = atttypid
    WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attname
"""
INDEXES = """
SELECT split_part(opcname, '_', 2),
    CASE amname WHEN 'hnsw' THEN coalesce(array_to_string(reloptions, ', '), '') ELSE '' END
    FROM pg_index i JOIN pg_class c ON c.oid = indexrelid JOIN pg_am a ON a.oid = relam
    JOIN pg_opclass o ON o.oid = indclass[0]
    JOIN pg_attribute t ON attrelid = indrelid AND attnum = indkey[0]
    WHERE indrelid = %s AND attname = %s AND amname IN ('hnsw', 'ivfflat')
    AND opcname ~ '_(cosine|ip|l2)_' ORDER BY amname = 'hnsw'
"""
"""Selects the metric and the options of each index on a column, HNSW last."""
KEYS = """
SELECT attname::text, format_type(atttypid, -1)
    FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = indkey[0]
    WHERE indrelid = %(oid)s AND indisunique AND indisvalid AND indpred IS NULL
    AND indnkeyatts = 1 AND attnotnull
    AND CASE WHEN %(key)s::text IS NULL THEN indisprimary ELSE attname = %(key)s END
"""
TRIGGERS = """
SELECT string_agg(name, ', ' ORDER BY name) FROM (
    SELECT 'trigger ' || tgname FROM pg_trigger
        WHERE tgrelid = %(oid)s AND NOT tgisinternal
        AND tgenabled IN ('O', 'A') AND tgtype & 16 > 0 AND tgattr::text = ''
    UNION SELECT 'rule ' || rulename FROM pg_rewrite
        WHERE ev_class = %(oid)s AND ev_type = '2' AND ev_enabled IN ('O', 'A')
    ) AS fires (name)
"""
"""Selects the triggers and rules that fire when offsets are updated."""
LACKING = """
SELECT CASE
    WHEN current_setting('transaction_read_only') = 'on'
        THEN 'the server, or this role, only reads; name one that may write'
    WHEN NOT pg_has_role(relowner, 'USAGE')
        THEN 'only the owner of ' || relname || ' may add a column to it; connect as '
            'that role'
    WHEN NOT has_schema_privilege(relnamespace, 'CREATE')
        THEN 'the role may not create an index: GRANT CREATE ON SCHEMA '
            || relnamespace::regnamespace
    WHEN NOT CASE WHEN to_regnamespace('hubplugin') IS NULL
            THEN has_database_privilege(current_database(), 'CREATE')
            ELSE has_schema_privilege('hubplugin', 'USAGE') END
        THEN 'the role may not create the schema hubplugin: GRANT CREATE ON DATABASE'
    WHEN row_security_active(c.oid)
        THEN 'row security (' || coalesce(
            (SELECT string_agg(polname::text, ', ' ORDER BY polname) FROM pg_policy
                WHERE polrelid = c.oid), 'without a policy')
            || ') may hide rows of ' || relname || ' from this role; connect as one with '
            'BYPASSRLS, or as the owner of the table, without FORCE ROW LEVEL SECURITY'
    END FROM pg_class c WHERE oid = %(oid)s
"""
"""Selects why the role cannot write offsets to every row: it lacks a right, or rows are
hidden from it. Selects NULL if it can."""


@dataclass(frozen=True)
class Key:
    """The column that identifies rows.

    An id is an int if the column's type is an integer type, otherwise the column's
    text.
    """

    name: str
    type: str

    def id(self, table: str = "") -> str:
        """Return the SQL expression of a row's id, qualified by `table` if given."""
        column = quote_name(table, self.name)
        if self.type in INTEGERS:
            return column
        return f"{column}::text"


@dataclass(frozen=True)
class VectorTable:
    """A vector column of a table.

    oid: PostgreSQL's identifier of the table.
    schema, name: The schema and the name of the table.
    vector: The name of the column.
    type: The column's pgvector type.
    dim: The number of components.
    metric: The metric by which vectors are compared.
    key: The column that identifies rows.
    index: The type of the index for corrected searches, "vector" or "halfvec", or
        "none" for searches without an index.
    options: The options of the user's HNSW index on the column.
    """

    oid: int
    schema: str
    name: str
    vector: str
    type: str
    dim: int
    metric: Metric
    key: Key
    index: str
    options: str

    @property
    def identifier(self) -> str:
        """The quoted name of the table, with its schema."""
        return quote_name(self.schema, self.name)

    @property
    def has_vector(self) -> str:
        """The SQL condition for rows that have a vector."""
        return f"{quote_name(self.vector)} IS NOT NULL"


def read_columns(database: Database, oid: int) -> dict[str, tuple[str, int]]:
    """Return the current columns of the table `oid`, with type and type modifier."""
    rows = database.run(COLUMNS, (oid,))
    return {name: (kind, modifier) for name, kind, modifier in rows}


def read(database: Database, options: Mapping[str, str]) -> VectorTable:
    """Find the column that a URL names, and read its description.

    Args:
        database: The database of the URL.
        options: The options of the URL: `table` and, unless the default is unambiguous,
            `vector`, `key`, `metric` and `index`. Names are written as in SQL.

    Raises:
        StoreError: A name does not exist, or the column cannot carry offsets.
    """
    url = database.url
    oid, schema, name = _find_table(database, options.get("table"))
    columns = read_columns(database, oid)
    vectors = [name for name in columns if columns[name][0] in MOST_DIMENSIONS]
    vector = _choose_vector(url, options, vectors)
    sql_type, dim = columns[vector]
    if dim < 1:
        raise StoreError(
            f"{url}: {vector} has no fixed dimension; give it that of its vectors: ALTER "
            f"TABLE {options['table']} ALTER {vector} TYPE {sql_type}(N)"
        )
    metric, index_options = _read_metric(database, options, oid, vector)
    return VectorTable(
        oid=oid,
        schema=schema,
        name=name,
        vector=vector,
        type=sql_type,
        dim=dim,
        metric=metric,
        key=_read_key(database, options, oid),
        index=_choose_index(url, options, sql_type, dim),
        options=index_options,
    )


def _find_table(database: Database, table: str | None) -> tuple[int, str, str]:
    """Return the oid, the schema and the name of `table`.

    Raises StoreError if it does not exist or cannot carry offsets.
    """
    url = database.url
    if not table:
        raise StoreError(
            f"{url}: names no table: postgresql://user@host/db?table=photos"
            "&vector=embedding&key=id"
        )
    rows = database.run(TABLE, (table,))
    if not rows:
        raise StoreError(
            f"{url}: there is no table {table}; names are as in SQL: Photos is photos, "
            '"Photos" is not'
        )
    oid, schema, name, is_whole = rows[0]
    if not is_whole:
        raise StoreError(
            f"{url}: {table} is a view, partitioned, a partition, or uses inheritance; "
            "offsets need one whole table: name the one that has the vectors, or copy "
            "them into one"
        )
    return oid, schema, name


def _parse_name(name: str) -> str:
    """Return the name of a column as SQL reads it: in lower case unless quoted."""
    if len(name) > 1 and name[0] == name[-1] == '"':
        return name[1:-1].replace('""', '"')
    return name.lower()


def _choose_vector(url: str, options: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the column from `names` that the URL names, or the only one."""
    matching = names
    if "vector" in options:
        requested = _parse_name(options["vector"])
        matching = [name for name in names if name == requested]
    if len(matching) == 1:
        return matching[0]
    raise StoreError(
        f"{url}: there are {len(matching)} columns of type vector or halfvec; name "
        f"one: vector={'|'.join(names) or '...'}"
    )


def _read_metric(
    database: Database, options: Mapping[str, str], oid: int, vector: str
) -> tuple[Metric, str]:
    """Return the metric, and the options of the HNSW index for it.

    The metric comes from the URL, or by default from the indexes on the column.
    """
    rows = database.run(INDEXES, (oid, vector))
    # The last index of a metric counts: an HNSW index, if there is one.
    by_metric = {METRICS[name]: index_options for name, index_options in rows}
    if "metric" in options:
        try:
            metric = Metric(options["metric"])
        except InputError as error:
            raise StoreError(f"{database.url}: {error}") from None
        return metric, by_metric.get(metric, "")
    if len(by_metric) == 1:
        return by_metric.popitem()
    raise StoreError(
        f"{database.url}: no single index tells how {vector} is compared; add "
        "metric=cosine, dot or euclidean"
    )


def _choose_index(url: str, options: Mapping[str, str], sql_type: str, dim: int) -> str:
    """Return the type of the index from the URL, by default the column's type.

    Raises StoreError if an index of this type cannot have so many dimensions.
    """
    index = options.get("index", sql_type)
    if index not in (*MOST_DIMENSIONS, "none"):
        raise StoreError(f"{url}: index={index}: expected vector, halfvec or none")
    # The indexed vector has one more dimension, for the offset.
    if index == "none" or dim < MOST_DIMENSIONS[index]:
        return index
    advice = "index=none, and re-rank"
    if dim < MOST_DIMENSIONS["halfvec"]:
        advice = "index=halfvec, which rounds to 16 bits"
    raise StoreError(
        f"{url}: a {index} index has at most {MOST_DIMENSIONS[index]:,} dimensions, and "
        f"{dim:,} and the offset are more; add {advice}"
    )


def _read_key(database: Database, options: Mapping[str, str], oid: int) -> Key:
    """Return the unique column that the URL names, by default the primary key."""
    if "key" in options:
        requested = _parse_name(options["key"])
        fault = f"key={options['key']} is not one column that is UNIQUE and NOT NULL"
    else:
        requested = None
        fault = "has no primary key of one column"
    rows = database.run(KEYS, {"oid": oid, "key": requested})
    if rows:
        return Key(*rows[0])
    raise StoreError(
        f"{database.url}: {fault}; name a unique column, key=id, or add one: ALTER "
        "TABLE ... ADD id bigint GENERATED ALWAYS AS IDENTITY UNIQUE"
    )


def build_index(
    database: Database, table: VectorTable, name: str, expression: str
) -> None:
    """Build an index without blocking reads and writes.

    An incomplete index from an interrupted build is replaced.

    Args:
        database: The database.
        table: The table.
        name: The name of the index, which no other index has: it is random.
        expression: The SQL expression to index, of the type `table.index`.
    """
    index = quote_name(table.schema, name)
    # As a parameter, a name must not have its % doubled.
    rows = database.run(
        "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)",
        (index.replace("%%", "%"),),
    )
    if (True,) in rows:  # a complete index
        return
    database.run_alone(f"DROP INDEX CONCURRENTLY IF EXISTS {index}")
    kind = "l2" if table.metric is Metric.EUCLIDEAN else "ip"
    statement = (
        f"CREATE INDEX CONCURRENTLY {quote_name(name)} ON {table.identifier} "
        f"USING hnsw (({expression}) {table.index}_{kind}_ops)"
    )
    if table.options:
        statement += f" WITH ({table.options})"
    database.run_alone(statement)
