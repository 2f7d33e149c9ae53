import pickle
from concurrent.futures import Executor, Future

import numpy as np
import pytest

UNEVEN = {
    1: [0, 1900],
    3: [0, 20, 1300, 1900],
    8: [0, 100, 100, 600, 650, 900, 1200, 1500, 1900],  # the second is empty
}


class Serial(Executor):
    """Does each task at once, as another process would: what goes there and comes back is pickled. Remembers the shards
    that it met."""

    def __init__(self):
        self.shards: list[str] = []

    def submit(self, fn, /, number, shard):
        future: Future = Future()
        self.shards.append(shard.name)
        fn, shard = pickle.loads(pickle.dumps((fn, shard)))
        try:
            found = fn(number, shard)
        except Exception as error:
            future.set_exception(pickle.loads(pickle.dumps(error)))
        else:
            future.set_result(pickle.loads(pickle.dumps(found)))
        return future


@pytest.fixture
def serial():
    return Serial()


@pytest.fixture(scope="session")
def gallery(real):
    return np.concatenate([real["test_targets"], real["bank_targets"][:700]])


@pytest.fixture(scope="session")
def parts(gallery, tmp_path_factory):
    """A pattern of the names of .npy files, by their number."""

    def written(count):
        folder = tmp_path_factory.mktemp(f"parts{count}")
        for number, (start, stop) in enumerate(
            zip(UNEVEN[count][:-1], UNEVEN[count][1:], strict=True)
        ):
            np.save(folder / f"part-{number}.npy", gallery[start:stop])
        return str(folder / "part-*.npy")

    return {count: written(count) for count in UNEVEN}
