"""What docs/learning.md takes for granted: titles of some documents, and real queries that somebody has looked at."""

from example_data import queries

titles = queries[:900]
rows_of_titles = range(900)
looked_at = queries[900:]
their_rows = range(900, 1200)
