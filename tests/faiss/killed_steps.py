"""Kills a step on an index file at many moments: python killed_steps.py STEP KILLS [alike], in a folder with x.faiss.

The folder `before` holds what lies there before the step. With KILLS above 0 it is killed so often, at even distances
in time; with 0 once before each thing that it does to the names of files, so that no order of them is left out. After
each kill the file must be as before or as after, with the model that belongs to it, and the next run must finish the
step. With `alike` an index has the same bits for all models. Prints how often it was as before, as after, or the step
had ended.
"""

import collections
import itertools
import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np

import hubplugin
import hubplugin_faiss
from hubplugin_faiss.encoding import codecs

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


def run(step: str, *, seconds: float = 600, change: int | None = None) -> bool:
    """Runs `step` in a child, and kills that after so many seconds, or before this change; whether it had ended."""
    child = os.fork()
    if child == 0:
        if change is not None:
            kill_before(change)
        STEPS[step]()
        os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0 or (status == signal.SIGKILL and change is not None), (
                f"the step itself failed: {status}"
            )
            return status == 0
        time.sleep(0.0002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


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
    """In the place of `codecs.model_bits`, whose 12 bits any two models may share."""
    return int(fingerprint != "")


def main(step: str, kills: int) -> None:
    bank = np.load("bank.npy")
    renewed()
    before = state(bank)
    start = time.monotonic()
    run(step)
    duration, after, there = time.monotonic() - start, state(bank), lying()
    assert after != before, "the step changes nothing"
    seen: collections.Counter[str] = collections.Counter()
    for kill in range(kills) if kills else itertools.count():
        renewed()
        ended = (
            run(step, seconds=duration * (kill + 0.5) / kills)
            if kills
            else run(step, change=kill)
        )
        found = state(bank)
        assert found in (before, after), (
            f"after kill {kill} the index is neither as before nor as after"
        )
        seen["ended" if ended else "before" if found == before else "after"] += 1
        again = (
            "refresh" if step == "rollback" and found == after else step
        )  # else it would go back once more
        run(again)
        assert state(bank) == after, (
            f"the run after kill {kill} does not finish the step"
        )
        assert lying() == there, (
            f"after kill {kill} there is left {lying()}, expected {there}"
        )
        if ended and not kills:
            break
    print(dict(seen))


if __name__ == "__main__":
    if sys.argv[3:] == ["alike"]:
        codecs.model_bits = same_bits
    main(sys.argv[1], int(sys.argv[2]))
