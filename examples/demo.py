"""Correct a Faiss index and a Qdrant collection of real docstring-to-function pairs in place, and show the difference.

make demo                             # or, in an environment with the extras faiss and qdrant:
python examples/demo.py [--folder .demo]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from qdrant_client import QdrantClient, models
from rich import box
from rich.console import Console
from rich.table import Table

from hubplugin.bank import Bank
from hubplugin.compute import Compute
from hubplugin.errors import HubpluginError
from hubplugin.jobs.correct import apply
from hubplugin.measures.hubness import k_occurrence, skewness
from hubplugin.progress import bars
from hubplugin.registry import open_store
from hubplugin.store import Store
from hubplugin.vectors import Progress

DATA = Path(__file__).parent / "data"
K = 10


@dataclass(frozen=True)
class ExampleData:
    """Docstrings (queries) and functions (targets) of the Python standard library, row by row."""

    bank_queries: np.ndarray
    bank_targets: np.ndarray
    test_queries: np.ndarray
    test_targets: np.ndarray
    names: list[str]
    texts: list[str]


@dataclass(frozen=True)
class Run:
    """The results of all test queries in one store: rows of the targets found [q, K]."""

    hits: np.ndarray

    def ranks(self) -> np.ndarray:
        """Return the rank of each query's own target: float [q], infinity if it is not among the K found."""
        own = self.hits == np.arange(len(self.hits))[:, None]
        return np.where(own.any(axis=1), own.argmax(axis=1) + 1.0, np.inf)


def example_data() -> ExampleData:
    arrays = {
        path.stem: np.load(path).astype(np.float32) for path in DATA.glob("*.npy")
    }
    for array in arrays.values():
        array /= np.linalg.norm(array, axis=1, keepdims=True)
    names = json.loads((DATA / "names.json").read_text())["test"]
    return ExampleData(
        names=names, texts=json.loads((DATA / "test_texts.json").read_text()), **arrays
    )


def run(folder: Path, console: Console | None = None) -> dict[str, tuple[Run, Run]]:
    """Build both stores under `folder` (emptied first), correct them in place, and print the changes.

    Return the raw and the corrected run of each store. Raise HubpluginError if `folder` holds anything but an
    earlier demo.
    """
    console, started = console or Console(), time.perf_counter()
    clear(folder)
    data = example_data()
    console.print(
        f"The gallery is {len(data.names):,} functions of the Python standard library. Each is searched for by its "
        f"docstring. A bank of {len(data.bank_queries):,} other docstrings shows which functions are hubs.\n"
    )
    console.print(
        "Building a Faiss index, and a Qdrant collection that runs in this process ..."
    )
    build_index(folder / "functions.faiss", data)
    build_collection(folder / "qdrant", data)
    urls = {
        "Faiss": f"faiss:{folder}/functions.faiss",
        "Qdrant": f"qdrant-local:{folder}/qdrant/functions",
    }
    stores = {name: open_store(url) for name, url in urls.items()}

    with bars(console) as progress:
        raw = {
            name: search_all(store, data, f"searching raw {name}", progress)
            for name, store in stores.items()
        }
    console.print(hub_table(raw["Faiss"], data))
    with bars(console) as progress:
        for name, store in stores.items():
            console.print(f"Correcting {name} ...")
            applied = apply(
                store,
                Bank(data.bank_queries, data.bank_targets),
                compute=Compute(progress=progress),
            )
        corrected = {
            name: search_all(store, data, f"searching corrected {name}", progress)
            for name, store in stores.items()
        }

    runs = {name: (raw[name], corrected[name]) for name in stores}
    console.print(gain_table(runs))
    console.print(
        "\nThree queries whose own function (✓) came after a hub before, and comes first now:\n"
    )
    for query in captured_queries(*runs["Faiss"]):
        console.print(answer_table(query, data, runs))
    for name, pair in runs.items():
        console.print(f"{name}: {won_and_lost(*pair)}")
    console.print(
        f"\nFitted: {applied.model}\n{time.perf_counter() - started:.0f} seconds. To inspect the stores, run"
    )
    beside = Path(sys.executable).with_name(
        "hubplugin"
    )  # which `make demo` has not put on PATH
    command = "hubplugin" if shutil.which("hubplugin") else beside
    for url in urls.values():
        console.print(f"  {command} inspect {url}", soft_wrap=True)
    return runs


def build_index(file: Path, data: ExampleData) -> None:
    """Write a Faiss index of the functions, as any program would."""
    index: Any = faiss.IndexFlatIP(data.test_targets.shape[1])
    index.add(data.test_targets)
    faiss.write_index(index, str(file))


def build_collection(path: Path, data: ExampleData) -> None:
    """Write a Qdrant collection of the functions, in the client's local mode."""
    with contextlib.closing(QdrantClient(path=str(path))) as client:
        vectors = models.VectorParams(
            size=data.test_targets.shape[1], distance=models.Distance.COSINE
        )
        client.create_collection("functions", vectors)
        payload = [{"name": name} for name in data.names]
        client.upload_collection(
            "functions", data.test_targets, payload, ids=range(len(data.names))
        )


def clear(folder: Path) -> None:
    """Empty `folder` if an earlier demo made it. Refuse if it holds anything else."""
    marker = folder / "made-by-hubplugin-demo"
    try:
        if folder.exists() and not marker.exists() and any(folder.iterdir()):
            raise HubpluginError(
                f"folder {str(folder)!r} is not empty and no demo made it; name another one with --folder"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        marker.touch()
    except OSError as error:
        raise HubpluginError(
            f"folder {str(folder)!r} cannot be made: {error.strerror}; name another one"
        ) from None


def search_all(store: Store, data: ExampleData, what: str, progress: Progress) -> Run:
    """Search for every test query with the store's own search, one at a time, as an application would."""
    hits = np.empty((len(data.test_queries), K), np.int64)
    for row, query in enumerate(data.test_queries):
        hits[row] = store.search(query[None], K).ids[0]
        progress(what, row + 1, len(hits))
    return Run(hits)


def hub_table(before: Run, data: ExampleData) -> Table:
    """Return a table of the worst hubs: the functions that most queries find among their first K."""
    occurrence = k_occurrence(before.hits, len(data.names))
    table = Table(
        box=box.SIMPLE_HEAD,
        caption_justify="left",
        title="The worst hubs of the raw index",
        title_justify="left",
    )
    table.add_column(f"queries with it\nin their first {K}", justify="right")
    table.add_column("function")
    for row in np.argsort(-occurrence, kind="stable")[:5]:
        table.add_row(str(occurrence[row]), data.names[row])
    unfound = int((occurrence == 0).sum())
    table.caption = f"An even share would be {K} queries for each function. No query finds {unfound} of them."
    return table


def gain_table(runs: dict[str, tuple[Run, Run]]) -> Table:
    """Return a table of recall, median rank and hubness, raw and corrected, for every store."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title="Raw and corrected",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for column in (
        "R@1",
        "R@5",
        "R@10",
        "median\nrank",
        "skewness\nof N10",
        "largest\nN10",
    ):
        table.add_column(column, justify="right")
    table.caption = (
        "R@k: the percentage of queries whose own function is among the first k. N10: the number of queries that find "
        "a function among their first 10. Qdrant runs in its client's local mode: exact, in Python, without a server."
    )
    for name, pair in runs.items():
        for state, result in zip(("raw", "corrected"), pair, strict=True):
            ranks, occurrence = (
                result.ranks(),
                k_occurrence(result.hits, len(result.hits)),
            )
            median = float(np.median(ranks))
            table.add_row(
                f"{name}, {state}",
                *(f"{100 * (ranks <= k).mean():.1f}" for k in (1, 5, 10)),
                f"{median:g}" if np.isfinite(median) else f"> {K}",
                f"{skewness(occurrence):.2f}",
                str(occurrence.max()),
                end_section=state == "corrected",
            )
    return table


def captured_queries(before: Run, after: Run, count: int = 3) -> list[int]:
    """Return some queries whose own function came after a hub before and comes first now, worst hubs first."""
    occurrence = k_occurrence(before.hits, len(before.hits))
    freed = np.flatnonzero((before.ranks() > 1) & (after.ranks() == 1))
    return [
        int(row)
        for row in freed[np.argsort(-occurrence[before.hits[freed, 0]], kind="stable")][
            :count
        ]
    ]


def won_and_lost(before: Run, after: Run) -> str:
    """Say how many queries find their own function first, and how many won or lost it."""
    raw, corrected = before.ranks() == 1, after.ranks() == 1
    return (
        f"the right function comes first for {corrected.sum()} of {len(raw):,} queries (before: {raw.sum()}). "
        f"{(corrected & ~raw).sum()} queries won it, {(raw & ~corrected).sum()} lost it."
    )


def shortened(name: str, length: int = 30) -> str:
    """Return the end of a dotted name, which says more than its start. An ellipsis replaces the rest."""
    return name if len(name) <= length else "…" + name[1 - length :]


def answer_table(
    query: int, data: ExampleData, runs: dict[str, tuple[Run, Run]]
) -> Table:
    """Return a table of a query's first three results in every store. ✓ marks its own function."""
    text = (
        data.texts[query]
        if len(data.texts[query]) <= 90
        else data.texts[query][:87] + "..."
    )
    table = Table(box=box.SIMPLE_HEAD, title=f"“{text}”", title_justify="left")
    for column in ("", "raw", "corrected"):
        table.add_column(column, no_wrap=True)
    for name, pair in runs.items():
        columns = []
        for result in pair:
            shown = [
                (row, shortened(data.names[row])) for row in result.hits[query, :3]
            ]
            found = [
                f"[green]{name} ✓[/]" if row == query else name for row, name in shown
            ]
            columns.append("\n".join(found))
        table.add_row(name, *columns, end_section=True)
    return table


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(".demo"),
        help="where index and collection are built",
    )
    try:
        run(parser.parse_args(given).folder)
    except HubpluginError as error:
        raise SystemExit(f"demo: {error}") from None


if __name__ == "__main__":
    main()
