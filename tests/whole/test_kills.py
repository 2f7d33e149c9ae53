"""A kill at any moment of a job leaves what was before or what comes behind, and the next run finishes.

HUBPLUGIN_KILLS says how many a store.
"""

import collections
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.keepers import KEEPERS
from tests.pgvector.conftest import database as database
from tests.pgvector.conftest import server as server
from tests.whole.killed import AFTER, CHANGED
from tests.whole.test_lives import place as place

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("HUBPLUGIN_KILLS", "5"))
JOBS = [*AFTER]


class Run:
    """Steps in an interpreter of their own: threads and what is held open end with a process."""

    def __init__(self, kind, place, *steps):
        command = [sys.executable, "-m", "tests.whole.killed", kind, place, *steps]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes)

    def say(self):
        """Return what the next step says. It raises what the process dies of."""
        line = self.process.stdout.readline().rstrip("\n")
        if not line:
            raise AssertionError(self.process.communicate()[1])
        return line


def prepare(job):
    return ["renew", *(["change"] if job == "refresh" else []), "look"]


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_job_that_is_killed_has_done_all_or_nothing(kind, place, capsys):
    steps = [step for job in JOBS for step in (*prepare(job), f"do:{job}")]
    whole = Run(kind, place, "make", *steps)
    took = {}
    assert whole.say() == "made"
    for job in JOBS:
        said = [whole.say() for _ in prepare(job)]
        begun = time.monotonic()
        assert (said[0], whole.say()) == ("left []", job)
        took[job] = time.monotonic() - begun
    whole.process.wait()

    rng = np.random.default_rng(len(kind))
    seen = collections.Counter()
    last = []
    for number in range(KILLS + 1):
        job = JOBS[number % len(JOBS)]
        run = Run(kind, place, *last, *prepare(job), f"do:{job}")
        if last:
            before = JOBS[(number - 1) % len(JOBS)]
            state, wrong = run.say().split()
            assert state in ("nnn", AFTER[before])
            stale = CHANGED if before == "refresh" else 0
            assert 0 <= int(wrong) <= stale
            is_old = state == "nnn" and (before != "refresh" or int(wrong) == stale)
            seen[f"{before}: {'old' if is_old else 'new'}"] += 1
            run.say()
            assert run.say() == f"{AFTER[before]} 0"
        said = [run.say() for _ in prepare(job)]
        assert said[0] == "left []"
        assert said[-1] == f"nnn {CHANGED if job == 'refresh' else 0}"
        time.sleep(rng.uniform(0, 1) * took[job])
        run.process.kill()
        run.process.communicate()
        last = ["look", f"finish:{job}", "look"]
    with capsys.disabled():
        print(f"\n{kind}: {KILLS} kills, {dict(sorted(seen.items()))}")
    assert sum(seen.values()) == KILLS
