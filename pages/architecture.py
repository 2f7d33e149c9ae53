"""docs/architecture.md: the map of the chapters, made from what each says of itself, and the six walks through them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

START = """# Architecture

hubplugin gives each target of a vector store one number, its offset, and makes the store's own search rank by
similarity plus offset. The core computes offsets and knows no store; an adapter knows one store and the core.

A file is a chapter: it ends where a reader would stop reading. An import never runs up the list below, and within a
package there is no circle; `make lint` checks both with import-linter. What each chapter says here is the first
sentence in it (`python -m pages` makes this page).

Three values go through the house. A `Bank` is example queries and what is known of their answers. An `OffsetModel` is
what a fit returns. A `Result` is what a job answers: its fields are its JSON, and `hubplugin/report` makes text and a
page of what it shows.
"""

WALKS = """## Six walks

1. **`fit(targets, bank, "dbsn")`.** `hubplugin/fitting.py` reads the method by its name (`methods/__init__.py`), and
   bank and targets as checked blocks at unit length (`vectors/base.py`). `methods/base.py` is what every method does,
   and `methods/sinkhorn.py` asks `compute/sinkhorn.py` for log alpha. It goes over `compute/similarities.py` tile by
   tile, once an iteration. `model/offset_model.py` keeps the weighted bank and is what `fit` returns.
2. **`client.query_points(...)`, corrected.** In `hubplugin_qdrant/client.py` the method hands its `query` to the
   operation of its name in `searches.py`, which `calls.py` drives for both clients. That asks `metadata.py` whether
   the collection is corrected, and `requests.py` makes the corrected request of the user's, with what `manifest.py`
   says. One request is sent.
3. **`client.upsert(...)` of one point.** `client.py` and `calls.py` again, then `writes.py`. `offsets.py` asks the
   model (`hubplugin/model/offset_model.py`, `compute/reductions.py`) for the point's offset, and says how a point
   holds it.
4. **`hubplugin_faiss.upgrade(index, model)`.** `index.py` finds the handler of the index type (`handlers/base.py`,
   `handlers/lists.py`) and asks the model for the offsets of the vectors that the index stores. `encoding/codecs.py`
   says how extra dimensions carry them, `encoding/layout.py` where codes lie. `calibration.py` searches the new index
   as a check.
5. **`hubplugin.apply(store, bank)` of a collection.** `hubplugin_qdrant.open_store(client, "photos")` gives the store
   (`store.py`, `schema.py`) that `hubplugin/jobs/correct.py` takes. There the bank is read (`bank/bank.py`),
   the vectors are spooled (`jobs/write.py`), and the correction is tried (`guard.py`,
   `validation.py`). Then it is fitted as in the first walk. `jobs/write.py` writes through `store.py`, and
   `calibration.py` and `hubplugin/corrections.py` end in one switch.
6. **`refit(store, bank)`.** The same eight steps in `hubplugin/jobs/correct.py`, with the old model beside the new
   one in `validation.py`. On a Faiss file `store.py` takes the folder's lock (`folder.py`), and `files.py` writes
   the new index beside the old one, which it replaces in one step.
"""


def page() -> str:
    return "\n".join([START, *_core(), *_adapters(), WALKS])


def layers() -> list[list[str]]:
    """The layers of the core as import-linter has them, the highest first: packages and modules in each."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^layers = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    return [line.split(" | ") for line in re.findall(r'"([^"]+)"', listed[1])]


def _core() -> Iterator[str]:
    yield "## hubplugin, from the top down\n"
    rows = [_package(ROOT / "hubplugin" / name) for layer in layers() for name in layer]
    yield from (f"{row}\n" for row in rows if row)


def _adapters() -> Iterator[str]:
    for folder in sorted(each.parent for each in (ROOT / "adapters").glob("*/__init__.py")):
        yield f"## {folder.name}\n"
        yield f"{_chapters(folder)}\n"
        for inner in sorted(each.parent for each in folder.glob("*/__init__.py")):
            yield f"{_package(inner)}\n"


def _package(path: Path) -> str:
    """A package with its chapters, or a module that stands alone."""
    if path.is_dir():
        said = said_by(path / "__init__.py")
        return f"**{path.name}/** {said}\n\n{_chapters(path)}".rstrip()
    module = path.with_suffix(".py")
    return f"**{module.name}** {said_by(module)}" if module.exists() and said_by(module) else ""


def _chapters(folder: Path) -> str:
    found = (each for each in sorted(folder.glob("*.py")) if each.name != "__init__.py")
    return "\n".join(f"- `{each.name}` {said_by(each)}" for each in found)


def said_by(module: Path) -> str:
    """The first sentence of its docstring."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return re.split(r"(?<=[.!?])\s", " ".join(text.split("\n\n")[0].split()))[0]
