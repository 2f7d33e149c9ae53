"""The data of the examples, for the programs in `before`."""

import numpy as np

gallery, bank, queries, others = (
    np.load(f"examples/data/{name}.npy").astype("float32")
    for name in ("test_targets", "bank_queries", "test_queries", "bank_targets")
)
