import numpy as np

gallery, bank = (
    np.load(f"examples/data/{name}.npy").astype("float32")
    for name in ("test_targets", "bank_queries")
)
np.save("targets.npy", gallery)
np.save("bank.npy", bank)
query = bank[0]
