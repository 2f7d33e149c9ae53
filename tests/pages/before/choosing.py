import numpy as np

import hubplugin  # noqa: F401, the blocks use it

gallery, queries, target_bank = (
    np.load(f"examples/data/{name}.npy")[:600] for name in ("test_targets", "bank_queries", "bank_targets")
)
