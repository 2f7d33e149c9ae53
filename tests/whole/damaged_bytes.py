"""Damages bytes of the files of an index: python -m tests.whole.damaged_bytes COUNT [SEED]

Each damaged file is read by one of the jobs that read it, in a process of its own. A job may do its work, or end in one
line (`HubpluginError`). Whatever else it raises, a text of several lines, and a signal are counted as bad, and named. A
damaged index that plain Faiss does not survive either is counted apart. Prints the counts for each place as JSON.
"""

import collections
import contextlib
import faulthandler
import json
import logging
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import torch

import hubplugin
import hubplugin_faiss
from hubplugin import apply, inspect, refresh, rollback  # once, and not in each process
from tests.galleries import unit

KINDS = (
    "Flat",
    "IDMap2,Flat",
    "SQ8",
    "IVF4,SQ8",
    "IVF4,PQ4x4fs",
    "HNSW8",
    "PCA8,IVF4,Flat",
    "PQ4x4,RFlat",
)
SECONDS, MEMORY = 30, 4 << 30
"""How long a job may take, and by how much a process may grow."""

RNG = np.random.default_rng(3)
BANK, GALLERY = (unit(RNG.normal(size=(count, 16)) + 0.3) for count in (60, 300))


def built(folder: Path) -> dict[str, list[Path]]:
    """Makes an index of each kind with a model before the active one and a run that was cut off. Returns the files of
    each place, below `folder`."""
    models = [hubplugin.fit(GALLERY, BANK, method) for method in ("csls", "nnn", "is")]
    for number, kind in enumerate(KINDS):
        index = faiss.index_factory(16, kind, faiss.METRIC_INNER_PRODUCT)
        index.train(GALLERY)
        index.add_with_ids(GALLERY, np.arange(300)) if "IDMap" in kind else index.add(
            GALLERY
        )
        file = folder / str(number) / "x.faiss"
        file.parent.mkdir()
        faiss.write_index(index, str(file))
        for model in models[:2]:
            apply(hubplugin_faiss.open_store(file), model, force=True)
        with hubplugin_faiss.open_store(file).begin(models[2]) as writing:
            batch = next(iter(writing.scan())).take(np.arange(100))
            writing.write(batch, models[2].offsets(batch.vectors))
    return {
        "folder": [
            path
            for path in (folder / "0/x.faiss.hub").rglob("*")
            if path.is_file() and path.name != "lock"
        ],
        "index": [folder / str(number) / "x.faiss" for number in range(len(KINDS))],
    }


def looked_at(file: Path) -> None:
    """What a user does with an index without changing it."""
    hubplugin_faiss.read_index(file)
    store = hubplugin_faiss.open_store(file)
    store.correction(), store.previous()
    collections.deque(store.scan(), maxlen=0)
    store.search(BANK[:3], 5), store.search(BANK[:3], 5, raw=True)


JOBS: dict[str, list[Callable[[Path], object]]] = {
    "folder": [
        looked_at,
        lambda file: inspect(hubplugin_faiss.open_store(file)),
        lambda file: rollback(hubplugin_faiss.open_store(file)),
        lambda file: refresh(hubplugin_faiss.open_store(file)),
        lambda file: apply(hubplugin_faiss.open_store(file), BANK, "is", force=True),
        lambda file: hubplugin_faiss.open_store(file).remove(),
    ],
    "index": [
        looked_at,
        lambda file: hubplugin_faiss.downgrade(hubplugin_faiss.read_index(file)[0]),
        lambda file: refresh(hubplugin_faiss.open_store(file)),
    ],
}


def plain(file: Path) -> None:
    """The same in plain Faiss: what this does not survive, no code around it can."""
    index = faiss.read_index(str(file))
    index.search(BANK[:3], 5)
    inner = (
        faiss.downcast_index(index.index)
        if isinstance(index, faiss.IndexPreTransform)
        else index
    )
    if isinstance(inner, faiss.IndexIVF):
        inner.make_direct_map()
    index.reconstruct_n(0, index.ntotal)


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """`content` with bits or bytes changed, a stretch lost, doubled or zeroed, or its end cut off."""
    data, place = bytearray(content), int(rng.integers(len(content)))
    # Half of the changes hit the head, where sizes and types stand.
    place = int(rng.integers(min(len(content), 200))) if rng.random() < 0.5 else place
    length = int(rng.integers(1, 17))
    match rng.integers(7):
        case 0:
            data[place] ^= 1 << int(rng.integers(8))
        case 1:
            data[place] = int(rng.integers(256))
        case 2:
            data[place : place + length] = rng.bytes(length)
        case 3:
            del data[place : place + length]
        case 4:
            data[place:place] = data[place : place + length]
        case 5:
            data[place : place + length] = bytes(min(length, len(data) - place))
        case 6:
            del data[place:]
    return bytes(data)


VALUES = [
    "null",
    "[]",
    "{}",
    "-1",
    "0",
    "1e308",
    "99999999999999999999",
    "true",
    '"x"',
    '"\\u0000"',
    "NaN",
    "[[[]]]",
]


def changed_json(content: bytes, rng: np.random.Generator) -> bytes:
    """JSON with one value replaced by another of any type."""
    tokens = [
        found.span()
        for found in re.finditer(
            rb'"(?:[^"\\]|\\.)*"|-?[\d.]+|null|true|false', content
        )
    ]
    start, end = tokens[rng.integers(len(tokens))] if tokens else (0, len(content))
    return content[:start] + str(rng.choice(VALUES)).encode() + content[end:]


def in_a_child(work: Callable[[], object]) -> int:
    """The signal that ended `work` in a process of its own; 0 for none."""
    child = os.fork()
    if child == 0:
        size = (
            int(Path("/proc/self/statm").read_text().split()[0])
            * resource.getpagesize()
        )
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
        signal.alarm(SECONDS)
        with contextlib.suppress(Exception):
            work()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def outcome(job: Callable[[Path], object], file: Path, log: Path) -> tuple[str, str]:
    """How `job` ends with the index `file`, and what is said."""

    def tried() -> None:
        with log.open("w") as told:
            faulthandler.enable(told)
            how, said = "done", ""
            try:
                job(file)
            except hubplugin.HubpluginError as error:
                how, said = (
                    "refused" if "\n" not in str(error) else "several lines",
                    str(error),
                )
            except BaseException:
                how, said = "raised", traceback.format_exc()
            json.dump([how, said], told)

    signalled = in_a_child(tried)
    return (
        (f"signal {signalled}", log.read_text())
        if signalled
        else tuple(json.loads(log.read_text()))
    )


def main(count: int, seed: int = 0) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        before, now = Path(folder, "before"), Path(folder, "now")
        before.mkdir()
        places = built(before)
        for number in range(count):
            rng = np.random.default_rng((seed, number))
            what = ("folder", "index")[number % 2]
            path, job = (
                places[what][rng.integers(len(places[what]))],
                JOBS[what][rng.integers(len(JOBS[what]))],
            )
            content = path.read_bytes()
            is_json = content[:1] == b"{" and rng.random() < 0.6
            relative = path.relative_to(before)
            shutil.rmtree(now, ignore_errors=True)
            shutil.copytree(before / relative.parts[0], now)
            now.joinpath(*relative.parts[1:]).write_bytes(
                (changed_json if is_json else damaged)(content, rng)
            )
            how, said = outcome(job, now / "x.faiss", Path(folder, "log"))
            if (
                how.startswith("signal")
                and what == "index"
                and in_a_child(lambda: plain(now / "x.faiss"))
            ):
                how = "neither does plain Faiss"
            counts[what][how] += 1
            if how not in ("done", "refused", "neither does plain Faiss"):
                bad.append(f"{number} {relative}: {how}\n{said}")
    print("\n\n".join(bad), file=sys.stderr)
    print(json.dumps(counts))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
