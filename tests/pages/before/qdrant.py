import numpy as np
from example_data import bank, gallery, queries
from qdrant_client import QdrantClient, models

np.save("bank.npy", bank)
client = QdrantClient(":memory:")
client.create_collection(
    "photos", {"image": models.VectorParams(size=384, distance=models.Distance.COSINE)}
)
client.upload_collection("photos", {"image": gallery}, ids=range(len(gallery)))
query = queries[0].tolist()
