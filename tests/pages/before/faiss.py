import faiss
import numpy as np
from example_data import bank, gallery, others

for each in (gallery, others):
    faiss.normalize_L2(each)
np.save("bank.npy", bank)
plain = faiss.index_factory(384, "IVF16,Flat", faiss.METRIC_INNER_PRODUCT)
plain.train(gallery)
plain.add(gallery)
faiss.write_index(plain, "photos.faiss")
vectors, ids = others[:5], np.arange(3)
