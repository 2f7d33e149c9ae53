import faiss
from example_data import bank, gallery, queries

import hubplugin
import hubplugin_faiss

for each in (gallery, queries):
    faiss.normalize_L2(each)
raw_index = faiss.index_factory(384, "IVF16,Flat", faiss.METRIC_INNER_PRODUCT)
raw_index.train(gallery)
raw_index.add(gallery)
model = hubplugin.fit(gallery, bank)
index = hubplugin_faiss.upgrade(raw_index, model)
