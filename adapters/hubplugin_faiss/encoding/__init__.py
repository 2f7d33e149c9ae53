"""How codes carry the extra dimensions that hold an offset: no Faiss index type is
known here."""
