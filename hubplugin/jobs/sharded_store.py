"""A store whose shards are read, fitted on and written by the workers of an executor."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from hubplugin.cluster import Order, Reading, ShardedGallery, Workspace
from hubplugin.jobs.comparison import Comparison, one_pass
from hubplugin.jobs.unjudged import Unjudged
from hubplugin.reductions import Compute, Found
from hubplugin.store import Share, Store, StoreShard
from hubplugin.vectors import shards_of


class ShardedStore:
    """The `vectors` of `store` in shards, in the place of a `SpooledGallery`, and their offsets written by shards."""

    def __init__(self, store: Store, count: int | None, executor: Executor, workspace: Workspace, compute: Compute):
        self.rows: Mapping[int | str, int] = {}
        self.vectors = ShardedGallery(store.url, shards_of(store, count), executor, workspace, compute)

    def written(self, share: Share, compute: Compute, closing: bool, is_new: bool) -> WrittenByShards:
        """What one pass over all shards wrote. closing: it looks at what came meanwhile, so none has done it before."""
        key = f"{share.key} {uuid.uuid4()}" if closing else share.key
        what = "closing" if closing else "writing offsets"
        task = _WriteShard(share, key, replace(compute, progress=None), what, is_new)
        found = self.vectors.each_once([task] * len(self.vectors.shards))
        return WrittenByShards.of([json.loads(bytes(part["told"])) for part in found])


@dataclass(frozen=True)
class WrittenByShards:
    """What all shards together tell as a `Comparison` does."""

    scanned: int
    missing: int
    stale: int
    unjudged: Unjudged

    @classmethod
    def of(cls, told: Sequence[Mapping[str, object]]) -> WrittenByShards:
        scanned, missing, stale, count = (
            sum(cast(int, each[name]) for each in told) for name in ("scanned", "missing", "stale", "unjudged")
        )
        named = [pair for each in told for pair in cast("list[tuple[int | str, str]]", each["named"])]
        return cls(scanned, missing, stale, Unjudged(count, dict(named)))


@dataclass(frozen=True)
class _WriteShard(Reading):
    """Writes the offsets that are missing or differ in a shard. key: names the writing, which a share does anew in each
    run."""

    share: Share = field(compare=False)
    key: str
    compute: Compute
    what: str
    is_new: bool

    def __call__(self, order: Order) -> Found:
        store, writing, model = self.share.joined(cast(StoreShard, order.shard))
        with writing:
            found = one_pass(
                Comparison(store, model, self.compute, self.what, first=self.is_new), writing, writing.scan()
            )
            writing.settle()
        named = list(found.unjudged.named.items())
        told = {
            "scanned": found.scanned,
            "missing": found.missing,
            "stale": found.stale,
            "unjudged": found.unjudged.count,
            "named": named,
        }
        return {"told": np.frombuffer(json.dumps(told).encode(), np.uint8)}
