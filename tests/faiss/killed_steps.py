"""Kills a step on an index file at any moment: python killed_steps.py STEP [alike], in a folder with x.faiss.

The folder `before` holds what lies there before the step. It is killed before each thing that it does to the names of
files, so that no order of them is left out: what it writes meanwhile has no name that anybody reads. After each kill
the file must be as before or as after, with the model that belongs to it, and the next run must finish the step. With
`alike` an index has the same bits for all models. Prints how often it was as before, and as after.
"""

import collections
import itertools
import os
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np

import hubplugin
import hubplugin_faiss
from hubplugin_faiss.encoding import offsets

warnings.simplefilter("ignore")
faiss.omp_set_num_threads(1)


STEPS: dict[str, Callable[[], object]] = {
    "apply": lambda: hubplugin.apply(
        hubplugin_faiss.open_store("x.faiss"), hubplugin.load("next.hub")
    ),
    "refresh": lambda: hubplugin.refresh(hubplugin_faiss.open_store("x.faiss")),
    "rollback": lambda: hubplugin.rollback(hubplugin_faiss.open_store("x.faiss")),
    "remove": lambda: hubplugin_faiss.open_store("x.faiss").remove(),
}


def renewed() -> None:
    """The folder as it was before the step."""
    for path in Path().iterdir():
        if path.name.startswith("x."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree("before", ".", dirs_exist_ok=True)


CHANGES = "os.remove", "os.rename", "os.rmdir", "os.mkdir", "open"
"""What Python reports when names are made, changed or deleted; of `open` that for writing counts."""


def kill_before(number: int) -> None:
    """Kills this process right before its change of this `number`, from 0 on."""
    changes = itertools.count()

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        counts = event in CHANGES and (
            event != "open" or int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR)
        )
        if counts and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def run(step: str, *, change: int | None = None) -> bool:
    """Runs `step` in a child, and kills that before its change of this number; whether it had ended."""
    child = os.fork()
    if child == 0:
        if change is not None:
            kill_before(change)
        STEPS[step]()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    expected = (0,) if change is None else (0, signal.SIGKILL)
    assert status in expected, f"the step itself failed: {status}"
    return status == 0


def state(bank: np.ndarray) -> tuple[object, ...]:
    """What a user of the index sees: the ranking, the model and the one before. Raises if they do not fit."""
    index, model = hubplugin_faiss.read_index("x.faiss")
    scores, ids = index.search(bank, 10)
    models = model, hubplugin_faiss.open_store("x.faiss").previous()
    names = [None if each is None else each.fingerprint for each in models]
    return scores.tobytes(), ids.tobytes(), index.ntotal, *names


def lying() -> list[str]:
    """The names of all that lies there, whatever numbers versions have."""
    return sorted(
        re.sub(r"\d+\.", "N.", str(path))
        for path in [*Path("x.faiss.hub").rglob("*"), *Path().glob("x.*")]
    )


def same_bits(fingerprint: str) -> int:
    """In the place of `offsets.model_bits`, whose 12 bits any two models may share."""
    return int(fingerprint != "")


def main(step: str) -> None:
    bank = np.load("bank.npy")
    renewed()
    before = state(bank)
    run(step)
    after = state(bank)
    there = lying()
    assert after != before, "the step changes nothing"
    seen: collections.Counter[str] = collections.Counter()
    for kill in itertools.count():
        renewed()
        if run(step, change=kill):
            break
        found = state(bank)
        assert found in (before, after), (
            f"after kill {kill} the index is neither as before nor as after"
        )
        seen["before" if found == before else "after"] += 1
        is_back = step == "rollback" and found == after
        run("refresh" if is_back else step)  # a rollback would go back once more
        assert state(bank) == after, (
            f"the run after kill {kill} does not finish the step"
        )
        assert lying() == there, (
            f"after kill {kill} there is left {lying()}, expected {there}"
        )
    print(dict(seen))


if __name__ == "__main__":
    if sys.argv[2:] == ["alike"]:
        offsets.model_bits = same_bits
    main(sys.argv[1])
