import numpy as np
from example_data import bank, gallery

np.save("targets.npy", gallery)
np.save("bank.npy", bank)
query = bank[0]
