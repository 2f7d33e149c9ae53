"""Figures of a ranking: hubness, recall of what is true, and how sure both are."""
