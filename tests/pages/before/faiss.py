import faiss
import numpy as np

gallery, bank, others = (
    np.load(f"examples/data/{name}.npy").astype("float32")
    for name in ("test_targets", "bank_queries", "bank_targets")
)
for each in (gallery, others):
    faiss.normalize_L2(each)
np.save("bank.npy", bank)
plain = faiss.index_factory(384, "IVF16,Flat", faiss.METRIC_INNER_PRODUCT)
plain.train(gallery)
plain.add(gallery)
faiss.write_index(plain, "photos.faiss")
vectors, ids = others[:5], np.arange(3)
