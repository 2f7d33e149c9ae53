"""What docs/learning.md takes for granted: titles of some documents, and real queries that somebody has looked at."""

import numpy as np

titles, rows_of_titles = (
    np.load("examples/data/test_queries.npy")[:900].astype(np.float32),
    range(900),
)
looked_at, their_rows = (
    np.load("examples/data/test_queries.npy")[900:].astype(np.float32),
    range(900, 1200),
)
