import chromadb
from example_data import bank, gallery

import hubplugin
import hubplugin_chroma

plain = chromadb.PersistentClient("data").create_collection(
    "photos", configuration={"hnsw": {"space": "cosine"}}
)
for start in range(0, len(gallery), 400):
    part = gallery[start : start + 400]
    ids = [str(start + row) for row in range(len(part))]
    plain.add(ids=ids, embeddings=part, metadatas=[{"year": 2025}] * len(part))
hubplugin.apply(
    hubplugin_chroma.open_store(chromadb.PersistentClient("data"), plain), bank
)
vector = bank[0]
