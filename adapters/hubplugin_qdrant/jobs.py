"""The jobs on a collection: apply, refresh, inspect, remove. What they do is in `hubplugin.jobs`."""

from __future__ import annotations

from typing import Literal

from qdrant_client import QdrantClient

from hubplugin.bank import BankLike
from hubplugin.jobs import correct, health, write
from hubplugin.methods import asked_for
from hubplugin.methods.robust import BANK_QUERIES
from hubplugin.model import Setting
from hubplugin.resources import Compute
from hubplugin.store import KEEP
from hubplugin.vectors import Progress
from hubplugin_qdrant.schema import Storage
from hubplugin_qdrant.store import QdrantStore


def apply(
    client: QdrantClient,
    collection: str,
    bank: BankLike,
    *,
    using: str = "",
    storage: Storage | Literal["auto"] = "auto",
    agreement: float | None = None,
    offset_key: str | None = None,
    method: str = "blend",
    group_by: str | None = None,
    robust: bool = False,
    force: bool = False,
    dry_run: bool = False,
    keep: int = KEEP,
    compute: Compute = Compute(),
    **parameters: Setting,
) -> write.Applied:
    """Corrects the vector `using` of `collection` in place; a `HubQdrantClient` then searches it corrected.

    bank: example queries, as for `hubplugin.fit`, which also has `method`, its `parameters`, `device`, `memory` and
    `progress`. force: apply it even if it does not help on held-out
    bank queries. dry_run: write nothing. keep: how many versions stay to return to, see `hubplugin.apply`.
    group_by: a payload key that searches are filtered by, such as "tenant": offsets are fitted within
    each of its values; see `hubplugin.apply`, which also has `robust`. using: "" is the unnamed vector, or the only
    one there is.
    storage: "vector" is a second vector with one more dimension, which ranks at the speed of the index for the price
    of its space; it needs server 1.18. "payload" is one number a point, added to the scores of the candidates that a
    search fetches, which works everywhere. "auto" is that of the correction in place; without one it is "vector" where
    the server can add one beside a named vector that is not quantised, and "payload" elsewhere. Beside an unnamed
    vector a second one leaves a trace when it is removed: `get_collection` then shows {"": VectorParams(...)} for
    VectorParams(...). agreement: the recall that searches must reach, as a share of the raw index's own; by default
    that of the correction in place, or 0.99. Candidates, or hnsw_ef, are chosen by it. offset_key: the payload key that
    holds the numbers of storage="payload", where "hub_offset" is a key of yours; it is kept in the manifest, and every
    client and job takes it from there.
    Searches change in one step at the end; a run that was cut off goes on when it is started again.
    Raises InputError for the bank or a parameter, StoreError for the collection or the server, CorrectionRefused if
    the correction would not help.
    """
    asked_for(method, parameters, apply)  # a misspelt argument of this function lies among them
    store = QdrantStore(client, collection, using, storage, agreement=agreement, offset_key=offset_key)
    return correct.apply(
        store, bank, method, group_by=group_by, robust=robust, force=force, dry_run=dry_run, keep=keep,
        compute=compute, executor=None, shards=None, workspace=None, **parameters,
    )  # fmt: skip


def refresh(
    client: QdrantClient,
    collection: str,
    *,
    using: str = "",
    compute: Compute = Compute(),
) -> write.Applied:
    """Writes the offsets of points that came or changed without the wrapper, and no others; says how many."""
    store = QdrantStore(client, collection, using)
    return write.refresh(store, compute=compute)


def inspect(
    client: QdrantClient,
    collection: str,
    *,
    using: str = "",
    queries: int = BANK_QUERIES,
    compute: Compute = Compute(),
) -> health.Inspection:
    """What correction lies in the collection, whether every point has the offset that its vector gives, and what the
    correction does to hubness now, seen by searching for `queries` queries of the bank; 0 searches for none."""
    store = QdrantStore(client, collection, using)
    return health.inspect(store, queries=queries, compute=compute)


def remove(client: QdrantClient, collection: str, *, using: str = "", progress: Progress | None = None) -> None:
    """Takes the correction out: points, payloads and vectors are as if it had never been there. What others have
    written beside the offsets under our payload key stays."""
    QdrantStore(client, collection, using).remove(progress)


def switch(client: QdrantClient, collection: str, on: bool, *, using: str = "") -> None:
    """Switches the correction of all vectors of `collection` off, or on again: every wrapped client, wherever it runs,
    sees it within the 10 seconds after which it reads the manifest again. Nothing that is stored changes, and writes go
    on bringing offsets along. using: needed where several vectors could be meant, as for `apply`.

    Raises StoreError if the collection has no correction.
    """
    QdrantStore(client, collection, using).switch(on)
