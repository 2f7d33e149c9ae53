import json
from pathlib import Path

import faiss
from example_data import gallery

faiss.normalize_L2(gallery)
index = faiss.IndexFlatIP(384)
index.add(gallery)
faiss.write_index(index, "photos.faiss")
texts = json.loads(Path("examples/data/test_texts.json").read_text())[:300]
Path("log.txt").write_text("\n".join(" ".join(text.split()) for text in texts))
