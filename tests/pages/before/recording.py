import faiss
from example_data import bank, gallery

queries = bank
faiss.normalize_L2(gallery)
index = faiss.IndexFlatIP(384)
index.add(gallery)
faiss.write_index(index, "photos.faiss")
