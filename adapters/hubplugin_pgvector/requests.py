"""SQL expressions that rank by the corrected score. This module does no I/O.

A target is indexed as one vector of d + 1 components and compared with a query:

    cosine      [t/|t|, offset / scale]            by <#> with [q/|q|, scale]
    dot         [t, offset / scale]                by <#> with [q, scale]
    euclidean   [t, sqrt(2 (scale - offset))]      by <-> with [q, 0]

A row without an offset counts with offset 0, so other programs can insert rows without
an error and without a change of their rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hubplugin.calibration import largest_offset, query_component
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel
from hubplugin.store import Explanation
from hubplugin_pgvector.database import quote_name
from hubplugin_pgvector.schema import VectorTable

if TYPE_CHECKING:
    from django.db.models.expressions import RawSQL
    from sqlalchemy import TextClause


OPERATORS = {Metric.COSINE: "<=>", Metric.DOT: "<#>", Metric.EUCLIDEAN: "<->"}


def scale_of(model: OffsetModel, previous: float | None = None) -> float:
    """Return the scale of the extra dimension for the offsets of `model`.

    A new scale is a power of two. For Euclidean distance, it is at least the largest
    offset, and positive. For other metrics, it is near the scale with the best recall
    in an index of inner products.

    The scale of the `previous` version is kept if it is suitable, so that SQL remains
    valid after a refit. `previous` is None if there is no such version.
    """
    if model.metric is Metric.EUCLIDEAN:
        smallest_scale = max(largest_offset(model), 1e-6)
        if previous is not None and previous >= smallest_scale:
            return previous
        return 2.0 ** math.ceil(math.log2(smallest_scale))
    best = query_component(model)
    if previous is not None and best / 4 <= previous <= best * 4:
        return previous
    return 2.0 ** round(math.log2(best))


@dataclass(frozen=True)
class OrderBy:
    """The ORDER BY expression for one query.

    sql: The expression, with one placeholder %s.
    parameters: The text for the placeholder.
    """

    sql: str
    parameters: Sequence[str]

    def sqlalchemy(self) -> TextClause:
        """Return the order for SQLAlchemy's `select(...).order_by(...)`."""
        from sqlalchemy import text

        escaped = (
            self.sql.replace("::", "\\:\\:")
            .replace("%s", ":hub_query")
            .replace("%%", "%")
        )
        return text(escaped).bindparams(hub_query=self.parameters[0])

    def django(self) -> RawSQL:
        """Return the order for Django's `Model.objects.order_by(...)`."""
        from django.db.models.expressions import RawSQL

        return RawSQL(self.sql, list(self.parameters))


@dataclass(frozen=True)
class Order:
    """A ranking in SQL, for any query.

    distance: The ORDER BY expression. The query is its only parameter.
    components: The components to append to a query; empty if there are none.
    peak: The score at distance 0.
    halves_square: True if a score falls by half the squared distance, False if it falls
        by the distance.
    """

    distance: str
    components: tuple[float, ...] = ()
    peak: float = 0.0
    halves_square: bool = False

    def by(self, query: np.ndarray) -> OrderBy:
        """Return the ORDER BY for `query` [d].

        The numbers of the query are as short as float32 allows.
        """
        numbers = np.array([*query, *self.components], np.float32)
        return OrderBy(self.distance, ["[" + ",".join(map(str, numbers)) + "]"])

    def score(self, distance: float) -> float:
        """Return the similarity s, corrected or raw, for a value of `distance`."""
        if self.halves_square:
            distance = distance**2 / 2
        return self.peak - distance


def raw_order(table: VectorTable) -> Order:
    """Return the uncorrected ranking of `table`.

    pgvector's distance is 1 - s for cosine, -s for dot, and |q - t| for euclidean,
    where s = -|q - t|^2 / 2.
    """
    vector = quote_name(table.vector)
    return Order(
        f"{vector} {OPERATORS[table.metric]} %s::{table.type}({table.dim})",
        peak=float(table.metric is Metric.COSINE),
        halves_square=table.metric is Metric.EUCLIDEAN,
    )


def exact_order(table: VectorTable, column: str, alias: str = "") -> Order:
    """Return the corrected ranking without an index.

    Queries must be of unit length for cosine, and mapped if the model has a query map.

    Args:
        table: The table.
        column: The column of the offsets.
        alias: The name of the table in a query; "" if the query needs none.
    """
    vector, offset = _expressions(table, column, alias)
    query = f"%s::{table.type}({table.dim})"
    if table.metric is Metric.EUCLIDEAN:
        return Order(f"({vector} <-> {query}) ^ 2 / 2 - {offset}")
    return Order(f"({vector} <#> {query}) - {offset}")


def indexed_order(
    table: VectorTable, column: str, scale: float, alias: str = ""
) -> Order:
    """Return the same ranking as `exact_order`, but by the index.

    Args:
        table: The table.
        column: The column of the offsets.
        scale: The scale of the extra dimension in the index.
        alias: The name of the table in a query; "" if the query needs none.
    """
    expression = indexed_expression(table, column, scale, alias)
    query = f"%s::{table.index}({table.dim + 1})"
    if table.metric is Metric.EUCLIDEAN:
        distance = f"{expression} <-> {query}"
        return Order(distance, (0.0,), peak=scale, halves_square=True)
    return Order(f"{expression} <#> {query}", (scale,))


def indexed_expression(
    table: VectorTable, column: str, scale: float, alias: str = ""
) -> str:
    """Return the SQL expression of the indexed vector of d + 1 components."""
    vector, offset = _expressions(table, column, alias)
    if table.metric is Metric.EUCLIDEAN:
        offset = f"sqrt(2 * greatest({scale} - {offset}, 0))"
    elif scale != 1:
        offset = f"{offset} / {scale}"
    target = f"{vector} || ARRAY[{offset}]::real[]::{table.type}"
    return f"({target})::{table.index}({table.dim + 1})"


def _expressions(table: VectorTable, column: str, alias: str) -> tuple[str, str]:
    """Return the SQL expressions of a vector and of its offset, 0 if missing.

    The vector is normalised for cosine.
    """
    vector = quote_name(alias, table.vector)
    if table.metric is Metric.COSINE:
        vector = f"l2_normalize({vector})"
    return vector, f"coalesce({quote_name(alias, column)}, 0)"


def explain(
    table: VectorTable,
    order: Order,
    exact: Order,
    query: np.ndarray,
    k: int,
    *,
    is_mapped: bool,
) -> Explanation:
    """Return SQL for the k nearest targets, by the index and exactly.

    Args:
        table: The table.
        order: The order of a search.
        exact: The order without an index, which may be the same.
        query: The query, prepared for `order`, [d].
        k: The number of results.
        is_mapped: True if `query` went through a query map.
    """
    heading = "-- by the index: there is none (index=none), so this is the exact form"
    if order.components:
        query_text = "the query"
        if table.metric is Metric.COSINE:
            query_text = "the query divided by its length"
        heading = (
            f"-- by the index: the vector is {query_text}, then {order.components[0]:g}"
        )

    def select(by: OrderBy) -> str:
        """Return the statement ordered `by`, with its parameter filled in."""
        key = quote_name(table.key.name)
        statement = f"SELECT {key} FROM {table.identifier} ORDER BY {by.sql} LIMIT {k};"
        # In `by.sql`, each % of a name is doubled, since drivers use % for parameters.
        return statement.replace("%s", f"'{by.parameters[0]}'").replace("%%", "%")

    ordered = order.by(query)
    lines = [
        heading,
        select(ordered),
        "-- exact: no index is used, so this is best if a filter leaves few rows",
        select(exact.by(query)),
    ]
    if is_mapped:
        lines += [
            "-- these vectors already went through the query map; for other queries, "
            "hubplugin_pgvector.order_by applies it"
        ]
    return Explanation(
        "\n".join(lines),
        {"sql": ordered.sql, "parameters": list(ordered.parameters), "limit": k},
    )
