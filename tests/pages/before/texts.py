import json
from pathlib import Path

import faiss
import numpy as np

gallery = np.load("examples/data/test_targets.npy").astype("float32")
faiss.normalize_L2(gallery)
index = faiss.IndexFlatIP(384)
index.add(gallery)
faiss.write_index(index, "photos.faiss")
texts = json.loads(Path("examples/data/test_texts.json").read_text())[:300]
Path("log.txt").write_text("\n".join(" ".join(text.split()) for text in texts))
