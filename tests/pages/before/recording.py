import faiss
import numpy as np

gallery, queries = (
    np.load(f"examples/data/{name}.npy").astype("float32")
    for name in ("test_targets", "bank_queries")
)
faiss.normalize_L2(gallery)
index = faiss.IndexFlatIP(384)
index.add(gallery)
faiss.write_index(index, "photos.faiss")
