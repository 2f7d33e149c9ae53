"""How far the offsets of each method reach, on every kind of bank: sets the limit of `hubplugin.jobs.correct`.

    python -m benchmarks.reach [--data FOLDER]

Each line is the mean share of the gallery that is nearer to a bank query than its corrected nearest target. The last
column is the same bank as if another model had embedded it: turned, with its mean elsewhere.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import hubplugin
from benchmarks.bank_settings import further, seventeen
from benchmarks.tables import SHARED, markdown
from hubplugin.bank.kinds import displacement
from hubplugin.compute import Compute
from hubplugin.vectors import as_vectors

METHODS = [("blend", {}), ("dbsn", {"tau": 0.05}), ("is", {"tau": 0.02}), ("nnn", {})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED, help="folder of the data sets")
    data = parser.parse_args().data
    lines = []
    for family in [*seventeen(data), *further(data)]:
        if not family.source.is_dir():
            continue
        setting = family.draw(0)
        targets, rng = setting.targets, np.random.default_rng(0)
        d = targets.shape[1]
        turned = setting.bank @ np.linalg.qr(rng.normal(size=(d, d)))[0] + 2 * rng.normal(size=d) / d**0.5
        tried = [(setting.bank, name, parameters) for name, parameters in METHODS] + [(turned, "dbsn", {"tau": 0.05})]
        found = []
        for bank, name, parameters in tried:
            model = hubplugin.fit(targets, bank, name, **parameters)
            share = displacement(model, as_vectors(bank, "bank"), as_vectors(targets, "gallery"), Compute())
            found.append(f"{share:.4f}")
        lines.append([family.name, str(len(targets)), *found])
        print(lines[-1], flush=True)
    head = ["bank", "targets", *(" ".join([name, *map(str, given.values())]) for name, given in METHODS)]
    print(markdown([*head, "dbsn 0.05, another model"], lines))


if __name__ == "__main__":
    main()
