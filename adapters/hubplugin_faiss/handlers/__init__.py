"""One handler a Faiss index type: how it is read, upgraded and downgraded."""
