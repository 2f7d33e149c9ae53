"""Search settings of the index that stands inside an upgraded one."""

from __future__ import annotations

from collections.abc import Iterator

import faiss

from hubplugin.errors import InputError
from hubplugin_faiss.faiss_objects import name_of


def tune(
    index: faiss.Index, *, nprobe: int | None = None, ef_search: int | None = None, k_factor: float | None = None
) -> None:
    """Sets how wide a search looks, wherever in `index`, upgraded or not, the setting lies.

    Args:
        index: a faiss.Index; an upgraded one is an IndexPreTransform, which has no `nprobe` or `hnsw` of its own.
        nprobe: inverted lists that a search visits.
        ef_search: candidates that a search of an HNSW graph keeps (`hnsw.efSearch`), of an NSG graph `nsg.search_L`.
        k_factor: candidates for each result that an IndexRefine ranks again.

    Raises:
        InputError: nothing in `index` has one of the settings that were given; none is set then.
    """
    given = {"nprobe": nprobe, "ef_search": ef_search, "k_factor": k_factor}
    wanted = {name: value for name, value in given.items() if value is not None}
    places = {name: part for part in parts(index) for name in settings(part)}
    for name in wanted:
        if name not in places:
            known = ", ".join(sorted(places)) or "none"
            raise InputError(f"nothing in this {name_of(index)} has the setting {name}; it has: {known}")
    for name, value in wanted.items():
        part = places[name]
        if name != "ef_search":
            setattr(part, name, value)
        elif isinstance(part, faiss.IndexHNSW):
            part.hnsw.efSearch = value
        else:
            part.nsg.search_L = value


def settings(part: faiss.Index) -> dict[str, float]:
    """The settings that `part` itself has, and their values."""
    if isinstance(part, faiss.IndexIVF):
        return {"nprobe": part.nprobe}
    if isinstance(part, faiss.IndexHNSW):
        return {"ef_search": part.hnsw.efSearch}
    if isinstance(part, faiss.IndexNSG):
        return {"ef_search": part.nsg.search_L}
    return {"k_factor": part.k_factor} if isinstance(part, faiss.IndexRefine) else {}


def parts(index: faiss.Index) -> Iterator[faiss.Index]:
    """`index` and those inside it that find its candidates."""
    index = faiss.downcast_index(index)
    yield index
    for inner in ("index", "base_index"):
        if hasattr(index, inner):
            yield from parts(getattr(index, inner))


def holds_graph(index: faiss.Index) -> bool:
    return any(isinstance(part, faiss.IndexHNSW | faiss.IndexNSG) for part in parts(index))


def wider(index: faiss.Index) -> str:
    """The call of `tune`, as text, that makes searches of `index` twice as wide; "" if it has no such setting."""
    now = {name: value for part in parts(index) for name, value in settings(part).items()}
    changed = ", ".join(f"{name}={2 * value:g}" for name, value in now.items())
    return f"hubplugin_faiss.tune(index, {changed})" if changed else ""
