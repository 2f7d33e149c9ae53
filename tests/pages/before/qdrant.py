import numpy as np
from qdrant_client import QdrantClient, models

gallery, bank, queries = (
    np.load(f"examples/data/{name}.npy")
    for name in ("test_targets", "bank_queries", "test_queries")
)
np.save("bank.npy", bank)
client = QdrantClient(":memory:")
client.create_collection(
    "photos", {"image": models.VectorParams(size=384, distance=models.Distance.COSINE)}
)
client.upload_collection(
    "photos", {"image": gallery.astype("float32")}, ids=range(len(gallery))
)
query = queries[0].tolist()
