"""Pure: how SQL ranks by the corrected score, and what a client needs to say so.

A target is indexed as one vector of d + 1 components, and a query is compared with it:

    cosine      [t/|t|, offset / scale]            by <#> with [q/|q|, scale]
    dot         [t, offset / scale]                by <#> with [q, scale]
    euclidean   [t, sqrt(2 (scale - offset))]      by <-> with [q, 0]

A row without an offset has the offset 0: nothing that another program inserts can fail, or be lifted or sunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hubplugin.calibration import largest_offset, query_component
from hubplugin.metric import Metric, augment_queries
from hubplugin.model import OffsetModel
from hubplugin.store import Explanation
from hubplugin_pgvector.database import quote_name
from hubplugin_pgvector.schema import VectorTable

if TYPE_CHECKING:
    from django.db.models.expressions import RawSQL
    from sqlalchemy import TextClause


OPERATORS = {Metric.COSINE: "<=>", Metric.DOT: "<#>", Metric.EUCLIDEAN: "<->"}


def scale_of(model: OffsetModel, previous: float | None = None) -> float:
    """Return the scale of the extra dimension for the offsets of `model`, a power of two.

    Under Euclidean distance it is no smaller than any offset, 0 among them. Otherwise it
    is near the one by which an index of inner products finds most.

    The scale of the `previous` version is kept if it will do, so that SQL outlives a
    refit; None is no previous version.
    """
    if model.metric is Metric.EUCLIDEAN:
        least = max(largest_offset(model), 1e-6)
        if previous is not None and previous >= least:
            return previous
        return 2.0 ** math.ceil(math.log2(least))
    best = query_component(model)
    if previous is not None and best / 4 <= previous <= best * 4:
        return previous
    return 2.0 ** round(math.log2(best))


@dataclass(frozen=True)
class RawOrder:
    """The user's own ranking of `table`.

    alias: The name of the table in a query; "" if the query needs none.
    """

    table: VectorTable
    alias: str = ""

    def distance(self) -> str:
        """Return the expression of an ORDER BY. The query is its one parameter."""
        column = self.column(self.table.vector)
        return f"{column} {OPERATORS[self.table.metric]} {self.placeholder}"

    def queries(self, queries: np.ndarray) -> np.ndarray:
        """Return the parameters of `distance` for `queries` [m, d]."""
        return queries

    def score(self, distance: float) -> float:
        """Return the similarity s for a value of `distance`.

        pgvector has 1 - s for cosine, -s for dot, and |q - t| for euclidean, where
        s = -|q - t|^2 / 2.
        """
        if self.table.metric is Metric.EUCLIDEAN:
            return -(distance**2) / 2
        if self.table.metric is Metric.COSINE:
            return 1.0 - distance
        return -distance

    @property
    def placeholder(self) -> str:
        return f"%s::{self.table.type}({self.table.dim})"

    def column(self, name: str) -> str:
        return quote_name(self.alias, name) if self.alias else quote_name(name)


@dataclass(frozen=True)
class ExactOrder(RawOrder):
    """The corrected ranking by the offsets in the column `offsets`, without an index.

    Queries are at unit length for cosine, and mapped if the model has a query map.
    """

    offsets: str = ""

    def distance(self) -> str:
        if self.table.metric is Metric.EUCLIDEAN:
            return f"({self.unit} <-> {self.placeholder}) ^ 2 / 2 - {self.offset}"
        return f"({self.unit} <#> {self.placeholder}) - {self.offset}"

    def score(self, distance: float) -> float:
        return -distance

    @property
    def unit(self) -> str:
        """The vector in SQL, at unit length for cosine."""
        column = self.column(self.table.vector)
        if self.table.metric is Metric.COSINE:
            return f"l2_normalize({column})"
        return column

    @property
    def offset(self) -> str:
        return f"coalesce({self.column(self.offsets)}, 0)"


@dataclass(frozen=True)
class IndexedOrder(ExactOrder):
    """The corrected ranking by the index, whose extra dimension has `scale`."""

    scale: float = 1.0

    def distance(self) -> str:
        operator = "<->" if self.table.metric is Metric.EUCLIDEAN else "<#>"
        return f"{self.expression} {operator} %s::{self._type}"

    def queries(self, queries: np.ndarray) -> np.ndarray:
        """Return `queries` [m, d] with the extra component: float32 [m, d + 1]."""
        return augment_queries(queries, self.table.metric, e=self.scale)

    def score(self, distance: float) -> float:
        if self.table.metric is Metric.EUCLIDEAN:
            return self.scale - distance**2 / 2
        return -distance

    @property
    def expression(self) -> str:
        """The vector of d + 1 components that the index is built over, in SQL."""
        offset = self.offset
        if self.table.metric is Metric.EUCLIDEAN:
            offset = f"sqrt(2 * greatest({self.scale} - {offset}, 0))"
        elif self.scale != 1:
            offset = f"{offset} / {self.scale}"
        return (
            f"({self.unit} || ARRAY[{offset}]::real[]::{self.table.type})::{self._type}"
        )

    @property
    def index(self) -> str:
        """The expression and its operator class, as CREATE INDEX takes them."""
        kind = "l2" if self.table.metric is Metric.EUCLIDEAN else "ip"
        return f"(({self.expression}) {self.table.index}_{kind}_ops)"

    @property
    def _type(self) -> str:
        return f"{self.table.index}({self.table.dim + 1})"


@dataclass(frozen=True)
class OrderBy:
    """An ORDER BY for one query: `sql` has one placeholder %s, for the text in `parameters`."""

    sql: str
    parameters: Sequence[str]

    def sqlalchemy(self) -> TextClause:
        """Return the order for `select(...).order_by(...)` of SQLAlchemy."""
        from sqlalchemy import text

        escaped = (
            self.sql.replace("::", "\\:\\:")
            .replace("%s", ":hub_query")
            .replace("%%", "%")
        )
        return text(escaped).bindparams(hub_query=self.parameters[0])

    def django(self) -> RawSQL:
        """Return the order for `Model.objects.order_by(...)` of Django."""
        from django.db.models.expressions import RawSQL

        return RawSQL(self.sql, list(self.parameters))


def as_text(vector: np.ndarray) -> str:
    """Return `vector` as pgvector reads it, each number as short as float32 allows."""
    return "[" + ",".join(map(str, vector.astype(np.float32))) + "]"


def order_by(order: RawOrder, query: np.ndarray) -> OrderBy:
    return OrderBy(order.distance(), [as_text(order.queries(query[None])[0])])


def explain(
    order: ExactOrder, query: np.ndarray, k: int, *, is_mapped: bool
) -> Explanation:
    """Return how SQL asks for the k nearest of `query` [d]: by the index, and exactly.

    Args:
        order: The order of a search: `IndexedOrder`, or `ExactOrder` without an index.
        query: As `order.queries` takes it.
        k: The number of results.
        is_mapped: True if `query` went through a query map.
    """
    table = order.table
    ordered = order_by(order, query)
    exact = order_by(ExactOrder(table, offsets=order.offsets), query)
    if isinstance(order, IndexedOrder):
        unit = "the query"
        if table.metric is Metric.COSINE:
            unit = "the query divided by its length"
        last = order.queries(query[None])[0, -1]
        hint = f"the vector is {unit}, then {last:g}"
    else:
        hint = "there is none, as index=none says, so that this is the exact form"

    def select(by: OrderBy) -> str:
        """Return the statement that ranks `by`, its parameter filled in, for people to
        run."""
        key = quote_name(table.key.name)
        statement = f"SELECT {key} FROM {table.identifier} ORDER BY {by.sql} LIMIT {k};"
        # `by.sql` is for a driver, to which % in a name is %%.
        return statement.replace("%s", f"'{by.parameters[0]}'").replace("%%", "%")

    lines = [
        f"-- by the index: {hint}",
        select(ordered),
        "-- exact: no index is used, so best behind a filter that leaves few rows",
        select(exact),
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
