"""Whether other versions of Faiss read and rank upgraded indexes as this one does, type by type.

    python -m benchmarks.faiss_versions write FOLDER           # with the Faiss that is installed, and hubplugin
    python benchmarks/faiss_versions.py read FOLDER            # with another Faiss, and numpy

Each type of tests/faiss/cases.py is written raw and upgraded by a model, with what this version finds. `read` counts
the types that the other version ranks alike, and names the others, raw and upgraded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import faiss
import numpy as np

SAME = 0.98
"""The share of the ten best that must agree: kernels of two versions round otherwise."""


def write(folder: Path) -> None:
    import warnings

    import hubplugin
    import hubplugin_faiss
    from tests.faiss import cases

    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [(kind, metric) for kind in cases.ALL for metric in (cases.IP, cases.L2)] + list(cases.ONE_METRIC)
    for number, (kind, metric) in enumerate(kinds):
        case = cases.made(kind, metric)
        cases.look_everywhere(case.index)
        model = hubplugin.fit(case.index, case.queries, metric="cosine")
        upgraded = hubplugin_faiss.upgrade(case.index, model, force=True)
        np.save(folder / f"{number}.queries.npy", case.queries)
        for name, index in (("raw", case.index), ("upgraded", upgraded)):
            faiss.write_index(index, str(folder / f"{number}.{name}.faiss"))
            np.save(folder / f"{number}.{name}.npy", index.search(case.queries, 10)[1])
        (folder / f"{number}.txt").write_text(f"{kind} {'L2' if metric == cases.L2 else 'IP'}")


def verdict(folder: Path, stem: str) -> str:
    """By a process of its own: a version may end it at a type that it does not know."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            index = faiss.read_index(str(folder / f"{stem}.faiss"))
            found = index.search(np.load(folder / f"{stem.partition('.')[0]}.queries.npy"), 10)[1]
        except Exception:
            os._exit(1)
        known = np.load(folder / f"{stem}.npy")
        same = np.mean([len(np.intersect1d(a, b)) / known.shape[1] for a, b in zip(found, known, strict=True)])
        os._exit(0 if same >= SAME else 2)
    status = os.waitpid(child, 0)[1]
    return {0: "alike", 1: "refused", 2: "otherwise"}.get(os.waitstatus_to_exitcode(status), "ends the process")


def read(folder: Path) -> None:
    numbers = sorted(int(path.stem) for path in folder.glob("*.txt"))
    verdicts = {}
    for number in numbers:
        kind = (folder / f"{number}.txt").read_text()
        verdicts[kind] = tuple(verdict(folder, f"{number}.{name}") for name in ("raw", "upgraded"))
    alike = [sum(pair[side] == "alike" for pair in verdicts.values()) for side in (0, 1)]
    print(f"Faiss {faiss.__version__}: of {len(numbers)} files {alike[0]} raw and {alike[1]} upgraded rank alike")
    for kind, (raw, upgraded) in verdicts.items():
        if (raw, upgraded) != ("alike", "alike"):
            print(f"  {kind}: raw {raw}, upgraded {upgraded}")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
