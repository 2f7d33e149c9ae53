"""hubplugin for PostgreSQL with pgvector: offsets in a column beside the vectors.

Searches use an index over vector and offset. Every job takes
`hubplugin.open_store("postgresql://user@host/db?table=photos")`. An application uses
`order_by` for its searches and `offsets` for its inserts.

The module `store` implements the contract of `hubplugin.store`. It reads and writes the
table that `schema` describes, keeps versions through `metadata`, and sends SQL through
`database`. The module `requests` builds the SQL of a ranking.
"""

from __future__ import annotations

import numpy as np

from hubplugin.vectors import VectorLike
from hubplugin_pgvector.requests import OrderBy
from hubplugin_pgvector.store import PgvectorStore

__all__ = ["OrderBy", "offsets", "order_by"]


def order_by(store: PgvectorStore, query: np.ndarray, alias: str = "") -> OrderBy:
    """Return the ORDER BY of the corrected ranking for one query.

        order = order_by(store, query)
        statement = f"SELECT id FROM photos ORDER BY {order.sql} LIMIT 10"
        connection.execute(statement, order.parameters)
        session.scalars(select(Photo).order_by(order.sqlalchemy()).limit(10))
        Photo.objects.order_by(order.django())[:10]

    It uses the same expression as the index. Each call reads the active correction in
    one short transaction, and applies its query map.

    Args:
        store: The store from `hubplugin.open_store`.
        query: The raw query, [d].
        alias: The name of the table in the statement. "" if no other table has columns
            with the same names.

    Raises:
        InputError: The query has another shape.
        StoreError: No correction is active.
    """
    version = store.require_active()
    mapped = store.map_query(query, version)
    return store.order(version, alias).by(mapped)


def offsets(store: PgvectorStore, vectors: VectorLike) -> np.ndarray:
    """Return the offsets of new vectors, for the column `hub_offset` of new rows.

        INSERT INTO photos (id, embedding, hub_offset) VALUES (%s, %s, %s)

    A row without an offset is ranked by its raw similarity until `hubplugin refresh`.

    Args:
        store: The store from `hubplugin.open_store`. It reads the model again if
            another one has become active.
        vectors: The targets, [n, d].

    Returns:
        The offsets, float32 [n].

    Raises:
        StoreError: No correction is active.
    """
    return store.model(store.require_active()).offsets(vectors)
