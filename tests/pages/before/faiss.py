import faiss
import numpy as np

import hubplugin

gallery, bank, queries, others = (
    np.load(f"examples/data/{name}.npy").astype("float32")
    for name in ("test_targets", "bank_queries", "test_queries", "bank_targets")
)
for each in (gallery, queries, others):
    faiss.normalize_L2(each)
np.save("bank.npy", bank)
plain = faiss.index_factory(384, "IVF16,Flat", faiss.METRIC_INNER_PRODUCT)
plain.train(gallery)
plain.add(gallery)
faiss.write_index(plain, "photos.faiss")
vectors, ids = others[:5], np.arange(3)
other_model = hubplugin.fit(gallery, bank, "nnn")
offsets = other_model.offsets(gallery)
raw_index = plain
