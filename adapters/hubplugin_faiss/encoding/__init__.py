"""Codes with extra dimensions for offsets, independent of Faiss's index types."""
