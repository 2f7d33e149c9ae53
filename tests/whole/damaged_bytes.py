"""Damages bytes of files that our own code reads: python -m tests.whole.damaged_bytes COUNT [SEED [PLACE ...]]

Each damaged file is read by one of the jobs that read it. A job may do its work, or end in one line
(`HubpluginError`). Whatever else it raises, a text of several lines, and a signal are counted as bad, and named. A
damaged index that plain Faiss does not survive either is counted apart. Prints the counts for each place as JSON.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import functools
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
from collections.abc import Callable, Iterator
from pathlib import Path

import faiss
import numpy as np
import torch

import hubplugin
import hubplugin_faiss
from hubplugin import apply, inspect, refresh, rollback  # once, and not in each process
from hubplugin.recording import read

KINDS = ("Flat", "IDMap2,Flat", "SQ8", "IVF4,SQ8", "IVF4,PQ4x4fs", "HNSW8", "PCA8,IVF4,Flat", "PQ4x4,RFlat")
SECONDS, MEMORY, AT_ONCE = 30, 4 << 30, 100
"""How long a job may take, by how much a process may grow, and how many damages it tries."""

RNG = np.random.default_rng(3)
BANK, GALLERY = (
    (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    for rows in (RNG.normal(size=(count, 16)) + 0.3 for count in (60, 300))
)


def built(folder: Path) -> dict[str, list[Path]]:
    """Makes an index of each kind with two versions and a run that was cut off, and queries that were recorded. Returns
    the files of each place, below `folder`."""
    models = [hubplugin.fit(GALLERY, BANK, method) for method in ("csls", "nnn", "is")]
    for number, kind in enumerate(KINDS):
        index = faiss.index_factory(16, kind, faiss.METRIC_INNER_PRODUCT)
        index.train(GALLERY)
        index.add_with_ids(GALLERY, np.arange(300)) if "IDMap" in kind else index.add(GALLERY)
        file = folder / str(number) / "x.faiss"
        file.parent.mkdir()
        faiss.write_index(index, str(file))
        for model in models[:2]:
            apply(hubplugin_faiss.open_store(file), model, force=True)
        with hubplugin_faiss.open_store(file).begin(models[2]) as writing:
            batch = next(iter(writing.scan())).some(np.arange(100))
            writing.write(batch, models[2].offsets(batch.vectors))
    recorder = hubplugin.Recorder(folder / "0/x.faiss.queries")
    for query in BANK:
        recorder.add(query[None], text="what is asked")
        recorder.click(query, len(query))
    recorder.close()
    beside = [path for path in (folder / "0/x.faiss.hub").rglob("*") if path.is_file() and path.name != "lock"]
    return {
        "model": [folder / "0/x.faiss.hub/model.hub"],
        "folder": beside,
        "recorded": sorted((folder / "0/x.faiss.queries").glob("*.safetensors")),
        "index": [folder / str(number) / "x.faiss" for number in range(len(KINDS))],
    }


def looked_at(file: Path) -> None:
    """What a user does with an index without changing it."""
    hubplugin_faiss.read_index(file)
    store = hubplugin_faiss.open_store(file)
    store.correction(), store.previous()
    collections.deque(store.scan(), maxlen=0)
    store.search(BANK[:3], 5), store.search(BANK[:3], 5, raw=True)


def loaded(file: Path) -> None:
    hubplugin.load(file.parent / "x.faiss.hub/model.hub").offsets(GALLERY[:5])


def heard(file: Path) -> None:
    """Damaged parts are left out, with a line in the log, and the recorder goes on."""
    read(f"{file}.queries")
    recorder = hubplugin.Recorder(f"{file}.queries")
    recorder.add(BANK[:2], text="again")
    recorder.close()
    assert read(f"{file}.queries").rows >= 2


JOBS: dict[str, list[Callable[[Path], object]]] = {
    "model": [loaded],
    "folder": [
        looked_at,
        lambda file: inspect(hubplugin_faiss.open_store(file)),
        lambda file: rollback(hubplugin_faiss.open_store(file)),
        lambda file: refresh(hubplugin_faiss.open_store(file)),
        lambda file: apply(hubplugin_faiss.open_store(file), BANK, "is", force=True),
        lambda file: hubplugin_faiss.open_store(file).remove(),
    ],
    "recorded": [heard],
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
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
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


def changed_json(content: bytes, rng: np.random.Generator) -> bytes:
    """JSON with one value replaced by another of any type."""
    values = [
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
    tokens = [found.span() for found in re.finditer(rb'"(?:[^"\\]|\\.)*"|-?[\d.]+|null|true|false', content)]
    start, end = tokens[rng.integers(len(tokens))] if tokens else (0, len(content))
    return content[:start] + str(rng.choice(values)).encode() + content[end:]


def run(before: Path, now: Path, path: Path, content: bytes, job: Callable[[Path], object]) -> tuple[str, str]:
    """How `job` ends where `path`, below `before`, has other `content`, and what it says: the folder is copied to
    `now` for it."""
    shutil.rmtree(now, ignore_errors=True)
    relative = path.relative_to(before)
    shutil.copytree(before / relative.parts[0], now)
    now.joinpath(*relative.parts[1:]).write_bytes(content)
    signal.alarm(SECONDS)
    try:
        job(now / "x.faiss")
    except hubplugin.HubpluginError as error:
        return ("refused" if "\n" not in str(error) else "several lines", str(error))
    except BaseException:
        return "raised", traceback.format_exc()
    finally:
        signal.alarm(0)
    return "done", ""


def try_all(before: Path, what: str, paths: list[Path], numbers: range, seed: int, log: Path) -> None:
    """Writes a line before each damage that is tried, and one behind."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    with log.open("w") as told:
        faulthandler.enable(told)
        for number in numbers:
            rng = np.random.default_rng((seed, number))
            path, job = paths[rng.integers(len(paths))], JOBS[what][rng.integers(len(JOBS[what]))]
            content = path.read_bytes()
            is_json = content[:1] == b"{" and rng.random() < 0.6
            content = changed_json(content, rng) if is_json else damaged(content, rng)
            print(json.dumps([number, str(path.relative_to(before))]), file=told, flush=True)
            print(json.dumps(run(before, before.with_name("now"), path, content, job)), file=told, flush=True)


def in_a_child(work: Callable[[], object]) -> int:
    """The signal that ended `work` in a process of its own; 0 for none."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def survived(file: Path) -> bool:
    """Whether plain Faiss survives the index `file`."""

    def read_it() -> None:
        signal.alarm(SECONDS)
        with contextlib.suppress(Exception):
            plain(file)

    return in_a_child(read_it) == 0


def outcomes(
    before: Path, what: str, paths: list[Path], count: int, seed: int, log: Path
) -> Iterator[tuple[int, str, str, str]]:
    """The number of each damage, its file, how it ended and what was said. Many are tried in one process; what ends
    that is tried once more alone, since an index that was damaged before it may have overwritten memory."""
    start, at_once = 0, AT_ONCE
    while start < count:
        numbers = range(start, min(start + at_once, count))
        signalled = in_a_child(functools.partial(try_all, before, what, paths, numbers, seed, log))
        told = log.read_text().splitlines()
        lines = [json.loads(line) for line in told if line.startswith("[")]
        if signalled and at_once > 1:
            lines.pop()
        elif signalled:
            own = what != "index" or survived(before.with_name("now") / "x.faiss")
            fault = "\n".join(line for line in told if not line.startswith("["))
            lines.append([f"signal {signalled}" if own else "neither does plain Faiss", fault])
        for (number, path), (how, said) in zip(lines[::2], lines[1::2], strict=True):
            yield number, path, how, said
        start, at_once = start + len(lines) // 2, 1 if signalled and at_once > 1 else AT_ONCE


def main(count: int, seed: int = 0, *wanted: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        before, log = Path(folder, "before"), Path(folder, "log")
        before.mkdir()
        places = {what: paths for what, paths in built(before).items() if what in wanted or not wanted}
        for what, paths in places.items():
            for number, path, how, said in outcomes(before, what, paths, count // len(places), seed, log):
                counts[what][how] += 1
                if how not in ("done", "refused", "neither does plain Faiss"):
                    bad.append(f"{number} {path}: {how}\n{said}")
    print("\n\n".join(bad), file=sys.stderr)
    print(json.dumps(counts))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(int, sys.argv[2:3]), *sys.argv[3:])
