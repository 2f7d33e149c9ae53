"""What a service on Chroma notices while it is corrected: python -m benchmarks.chroma_live

As `benchmarks.qdrant_live`, with plain queries of a collection on a server of its own.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np

from benchmarks.candidates import server
from benchmarks.qdrant_live import COLLECTION, HEAD, Load, draw, print_task, run_job

AT_ONCE = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--points", type=int, default=20_000)
    points = parser.parse_args().points
    with tempfile.TemporaryDirectory() as folder, server(f"{folder}/server") as client:
        configuration = {"hnsw": {"space": "cosine"}}
        collection = client.create_collection(COLLECTION, configuration=configuration)
        vectors = draw(points, 1)
        for first in range(0, points, AT_ONCE):
            part = vectors[first : first + AT_ONCE]
            ids = [str(first + row) for row in range(len(part))]
            collection.add(ids=ids, embeddings=part)
        load = Load(
            lambda query: collection.query(query_embeddings=[query], n_results=10),
            lambda: points,
        )
        load.start()
        time.sleep(15)
        print(HEAD)
        print_task(load, "quiet", load.took[0][0] + 5, time.time())
        host = client.get_settings()
        url = f"chroma://localhost:{host.chroma_server_http_port}/{COLLECTION}"
        for number, job in enumerate(["apply", "refit", "remove"]):
            bank = f"{folder}/{number}.npy"
            np.save(bank, draw(1000, 10 + number))
            run_job(load, url, job, bank)
        load.end()


if __name__ == "__main__":
    main()
