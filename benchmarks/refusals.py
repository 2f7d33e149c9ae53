"""What the guard says to banks that are none, and what R@1 would be with them.

    python -m benchmarks.refusals [--data FOLDER] [--write docs/banks.md]

The gallery is examples/data in a Faiss file: 1,200 functions, searched by docstrings. Another catalogue is the queries
of `debian` in the data folder, embedded by the same model; without that folder its row is left out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

import hubplugin
from benchmarks.bank_settings import files
from benchmarks.tables import EXAMPLES, SHARED, markdown, write_table


@dataclass(frozen=True)
class Case:
    given: str
    bank: Any
    target_bank: np.ndarray | None = None
    options: dict[str, Any] = field(default_factory=dict)


def cases(data: Path) -> Iterator[Case]:
    queries, documents, gallery = files(EXAMPLES, "bank_queries", "bank_targets", "test_targets")
    rng = np.random.default_rng(0)
    yield Case("queries for other functions", queries)
    yield Case("the gallery itself", gallery)
    yield Case("other documents", documents)
    yield Case("half queries, half documents", np.concatenate([queries[:1250], documents[1250:]]))
    swapped = "pairs, swapped: documents as queries, queries as target bank"
    yield Case(swapped, documents, queries)
    yield Case("vectors of another model", rng.normal(size=(500, 512)))
    # A rotation with its mean elsewhere is what another model's space is to this one's.
    turned = queries @ np.linalg.qr(rng.normal(size=(384, 384)))[0] + 2 * rng.normal(size=384) / 384**0.5
    yield Case("... of the same length", turned)
    yield Case("texts", ["how to open a file", "parse a date"])
    if (data / "debian").is_dir():
        yield Case("queries of another catalogue", files(data / "debian", "queries_a")[0])
    yield Case("5 queries", queries[:5])
    yield Case('100 queries, `method="dbsn"`', queries[:100], options={"method": "dbsn"})


def recall(store: hubplugin.store.Store) -> float:
    queries = files(EXAMPLES, "test_queries")[0]
    found = np.array(store.search(queries, 1).ids)[:, 0]
    return 100 * float((found == np.arange(len(queries))).mean())


def tried(case: Case, folder: Path) -> list[str]:
    """What `apply` says, and R@1 with force where that can be used at all."""
    file = str(folder / "photos.faiss")
    (gallery,) = files(EXAMPLES, "test_targets")
    index = faiss.IndexFlatIP(gallery.shape[1])
    index.add(gallery)
    faiss.write_index(index, file)
    store = hubplugin.open_store(f"faiss:{file}")
    said = "passed"
    try:
        hubplugin.apply(store, hubplugin.Bank(case.bank, case.target_bank), **case.options)
    except hubplugin.CorrectionRefused as error:
        said = f"`CorrectionRefused: {str(error).partition('; nothing was changed')[0]}` ..."
        hubplugin.apply(store, hubplugin.Bank(case.bank, case.target_bank), force=True, **case.options)
    except hubplugin.InputError as error:
        return [case.given, f"`InputError: {error}`".replace(file, "photos.faiss"), ""]
    return [case.given, said, f"{recall(store):.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED, help="folder of debian")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for case in cases(given.data):
        with tempfile.TemporaryDirectory() as folder:
            lines.append(tried(case, Path(folder)))
    text = markdown(["given as the bank", "what is printed", "R@1 if applied"], lines)
    print(text)
    if given.write:
        write_table(given.write, "refusals", text)


if __name__ == "__main__":
    main()
