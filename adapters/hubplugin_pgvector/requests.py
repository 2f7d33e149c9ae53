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
from typing import TYPE_CHECKING, Any

import numpy as np

from hubplugin.copies import cap_of, e_of
from hubplugin.metric import Metric, augment_queries
from hubplugin.model import OffsetModel
from hubplugin.store import Explanation
from hubplugin_pgvector.schema import Table
from hubplugin_pgvector.transport import name_of

if TYPE_CHECKING:
    from django.db.models.expressions import RawSQL
    from sqlalchemy import TextClause

RAW = {Metric.COSINE: "<=>", Metric.DOT: "<#>", Metric.EUCLIDEAN: "<->"}
CANDIDATES = 10
"""How many candidates for each result `explain` re-ranks."""


def scale_of(model: OffsetModel, before: float | None = None) -> float:
    """A power of two: under Euclidean distance at least every offset, 0 among them, else near that by which an index of
    inner products finds most. That of the version `before` if it will do, so that SQL outlives a refit."""
    if model.metric is Metric.EUCLIDEAN:
        least = max(cap_of(model), 1e-6)
        return before if before is not None and before >= least else 2.0 ** math.ceil(math.log2(least))
    best = e_of(model)
    return before if before is not None and best / 4 <= before <= best * 4 else 2.0 ** round(math.log2(best))


@dataclass(frozen=True)
class Ranking:
    """The corrected ranking of `table` by the offsets in `column`; `scale` as above. alias: what a query calls the
    table, where it must say so."""

    table: Table
    column: str
    scale: float
    alias: str = ""

    def indexed(self) -> str:
        """The expression over which the index is built."""
        offset = self.offset()
        if self.table.metric is Metric.EUCLIDEAN:
            offset = f"sqrt(2 * greatest({self.scale} - {offset}, 0))"
        elif self.scale != 1:
            offset = f"{offset} / {self.scale}"
        vector = self._column(self.table.vector)
        if self.table.metric is Metric.COSINE:
            vector = f"l2_normalize({vector})"
        return f"({vector} || ARRAY[{offset}]::real[]::{self.table.type})::{self.type}"

    def opclass(self) -> str:
        """The expression as an index has it, and how it compares."""
        name = "l2" if self.table.metric is Metric.EUCLIDEAN else "ip"
        return f"(({self.indexed()}) {self._kind}_{name}_ops)"

    def distance(self) -> str:
        """By what an ORDER BY ranks: the index in use, and the query of `query` as the parameter."""
        if self.table.index == "none":
            return self.exact()
        operator = "<->" if self.table.metric is Metric.EUCLIDEAN else "<#>"
        return f"{self.indexed()} {operator} %s::{self.type}"

    def raw(self) -> str:
        """The user's own distance."""
        table = self.table
        return f"{self._column(table.vector)} {RAW[table.metric]} %s::{table.type}({table.dim})"

    def exact(self) -> str:
        """The corrected distance without the index, as of `index` up to a constant."""
        vector, kind = self._column(self.table.vector), f"{self.table.type}({self.table.dim})"
        if self.table.metric is Metric.EUCLIDEAN:
            return f"({vector} <-> %s::{kind}) ^ 2 / 2 - {self.offset()}"
        unit = f"l2_normalize({vector})" if self.table.metric is Metric.COSINE else vector
        return f"({unit} <#> %s::{kind}) - {self.offset()}"

    def reranked(self, candidates: int, k: int) -> str:
        """A query for the best k of the `candidates` that the user's own index finds; it has two parameters."""
        key, table = self.table.key.listed(), self.table.identifier
        inner = f"SELECT {key}, {self.exact()} AS corrected FROM {table} ORDER BY {self.raw()} LIMIT {candidates}"
        return f"SELECT {key} FROM ({inner}) AS candidates ORDER BY corrected LIMIT {k}"

    def queries(self, queries: np.ndarray) -> np.ndarray:
        """What `distance` is given for `queries` [m, d], which are at unit length for cosine, and mapped where
        the model has a map: float32 [m, d + 1]. Without an index the queries themselves."""
        return queries if self.table.index == "none" else augment_queries(queries, self.table.metric, e=self.scale)

    def score(self, distance: float) -> float:
        """The corrected similarity, of what `distance` gives."""
        if self.table.metric is Metric.EUCLIDEAN and self.table.index != "none":
            return self.scale - distance**2 / 2
        return -distance

    def raw_score(self, distance: float) -> float:
        """The similarity, of what `raw` gives: pgvector's distances are 1 - s, -s and |q - t|."""
        if self.table.metric is Metric.EUCLIDEAN:
            return -(distance**2) / 2
        return (1.0 if self.table.metric is Metric.COSINE else 0.0) - distance

    def offset(self) -> str:
        return f"coalesce({self._column(self.column)}, 0)"

    @property
    def type(self) -> str:
        return f"{self._kind}({self.table.dim + 1})"

    @property
    def _kind(self) -> str:
        return self.table.type if self.table.index == "none" else self.table.index

    def _column(self, name: str) -> str:
        return name_of(self.alias, name) if self.alias else name_of(name)


@dataclass(frozen=True)
class OrderBy:
    """An ORDER BY for one query: `sql` has one placeholder %s, for the text in `parameters`."""

    sql: str
    parameters: Sequence[str]

    def sqlalchemy(self) -> TextClause:
        """For `select(...).order_by(...)` of SQLAlchemy."""
        from sqlalchemy import text

        escaped = self.sql.replace("::", "\\:\\:").replace("%s", ":hub_query").replace("%%", "%")
        return text(escaped).bindparams(hub_query=self.parameters[0])

    def django(self) -> RawSQL:
        """For `Model.objects.order_by(...)` of Django."""
        from django.db.models.expressions import RawSQL

        return RawSQL(self.sql, list(self.parameters))


def as_text(vector: np.ndarray) -> str:
    """A vector as pgvector reads it, each number as short as float32 allows."""
    return "[" + ",".join(map(str, vector.astype(np.float32))) + "]"


def order_by(ranking: Ranking, query: np.ndarray) -> OrderBy:
    return OrderBy(ranking.distance(), [as_text(ranking.queries(query[None])[0])])


def explanation(ranking: Ranking, query: np.ndarray, k: int, mapped: bool, width: object = None) -> Explanation:
    """How SQL asks for the k nearest of `query` [d]: by the index, exactly, and by the user's own index and offsets.
    width: the hnsw.ef_search to propose."""
    table = ranking.table
    order = order_by(ranking, query)
    head = f"SELECT {table.key.listed()} FROM {table.identifier} ORDER BY "
    own = as_text(query)

    def filled(text: str, vector: str) -> str:
        return text.replace("%s", f"'{vector}'").replace("%%", "%")

    indexed = f"{filled(head + order.sql, order.parameters[0])} LIMIT {k};"
    exact = f"{filled(head + ranking.exact(), own)} LIMIT {k};"
    reranked = filled(ranking.reranked(CANDIDATES * k, k), own) + ";"
    lines = [
        f"-- by the index: {_last(ranking)}",
        indexed,
        "-- exact: no index is used, so best behind a filter that leaves few rows",
        exact,
        f"-- re-ranked: {CANDIDATES} candidates for each result by your own index",
        reranked,
    ]
    if width:
        lines.insert(1, f"SET hnsw.ef_search = {width};  -- with which it finds as much as your own index did raw")
    if mapped:
        lines.insert(
            0, "-- the correction has a query map, which these vectors went through: hubplugin_pgvector.order_by"
        )
    request: dict[str, Any] = {"sql": order.sql, "parameters": list(order.parameters), "limit": k}
    return Explanation("\n".join(lines), request)


def _last(ranking: Ranking) -> str:
    if ranking.table.index == "none":
        return "there is none, as index=none says, so that this is the exact form"
    unit = "the query divided by its length" if ranking.table.metric is Metric.COSINE else "the query"
    return f"the vector is {unit}, then {0 if ranking.table.metric is Metric.EUCLIDEAN else ranking.scale:g}"
