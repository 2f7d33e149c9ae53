"""Steps on a gallery, in a process that may be killed: python -m tests.whole.killed KIND PLACE STEP...

Prints what each step says.
"""

import sys
import warnings

import numpy as np

import hubplugin
from hubplugin.jobs.write import write
from hubplugin.metric import Metric
from tests.core.formulas import similarity
from tests.galleries import assert_near, unit
from tests.keepers import DIM, KEEPERS

COUNT, CHANGED = 600, 100
AFTER = {
    "apply": "csls",
    "refit": "dn",
    "rollback": "is",
    "refresh": "nnn",
    "remove": "raw",
}
"""By what searches rank behind each job; before it they rank by nnn, or in part for a refresh."""


def draw(seed, count):
    centres = np.random.default_rng(0).normal(size=(6, DIM))
    rng = np.random.default_rng(seed)
    return unit(centres[rng.integers(6, size=count)] + rng.normal(size=(count, DIM)))


def make(keeper):
    keeper.create()
    put(keeper, draw(1, COUNT))
    return "made"


def put(keeper, vectors):
    keeper.put([keeper.key(number) for number in range(len(vectors))], vectors)


def renew(keeper):
    """Correct by nnn, and keep is behind it."""
    store = keeper.open()
    hubplugin.remove(store)
    left = keeper.left()
    put(keeper, draw(1, CHANGED))
    for method in ("is", "nnn"):
        write_by(method, store)
    return f"left {left}"


def change(keeper):
    """Change vectors past hubplugin."""
    put(keeper, draw(2, CHANGED))
    return "changed"


def write_by(method, store):
    model = hubplugin.fit(draw(1, COUNT), draw(3, 200), method)
    write(store, model, force=True)


def do(job, keeper):
    store = keeper.open()
    if job == "apply":
        write_by("csls", store)
    elif job == "refit":
        hubplugin.refit(store, draw(4, 200), "dn", force=True)
    else:
        getattr(hubplugin, job)(store)
    return job


def finish(job, keeper):
    """Run `job` again, or bring up to date what it has done."""
    state, wrong = look(keeper).split()
    if state == "raw":
        return do("remove", keeper)
    if state != AFTER[job] or wrong != "0":
        return do(job, keeper)
    return do("refresh", keeper)


def look(keeper):
    """Return by what searches rank, and how many offsets are not those of the model.

    The ranking is compared with the stored offsets, in float64.
    """
    store = keeper.open()
    correction = store.correction()
    batches = list(store.scan())
    ids = [key for batch in batches for key in batch.ids]
    vectors = np.concatenate([batch.vectors for batch in batches])
    offsets = np.concatenate([batch.offsets for batch in batches])
    said = "raw 0"
    if correction is not None and correction.active:
        right = correction.model.offsets(vectors)
        wrong = ~(np.abs(offsets - right) < 1e-4)
        said = f"{correction.model.method} {wrong.sum()}"
        if wrong.any():  # the store has its own way with these
            return said
    queries = draw(5, 20)
    scores = similarity(queries, vectors, "cosine")
    if said != "raw 0":
        scores = scores + offsets
    hits = store.search(queries, 10)
    found = [[ids.index(key) for key in line] for line in hits.ids]
    ranked = np.take_along_axis(scores, np.array(found), axis=1)
    told = np.array([keeper.gains(line) for line in hits.scores])
    assert_near(told - told[:, :1], ranked - ranked[:, :1], 1e-4)
    least = np.sort(scores, axis=1)[:, -10:-9] - 1e-4
    assert (ranked >= least).mean() >= 0.97  # candidates are chosen for 0.995
    return said


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    kind, place, *steps = sys.argv[1:]
    for step in steps:
        name, _, of = step.partition(":")
        on = KEEPERS[kind](place, Metric.COSINE)
        given = [of, on] if of else [on]
        print(globals()[name](*given), flush=True)
        on.restart()
