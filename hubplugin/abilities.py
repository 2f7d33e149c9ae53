"""What a store may be able to do beside the core of `Store`: small protocols, and `able`, which asks for one.

An adapter has an ability if it has its methods; it inherits from nothing. Each method raises StoreError, one line.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import numpy as np

from hubplugin.errors import EmptyInput, StoreError
from hubplugin.executors import Shard
from hubplugin.executors import Sharded as Sharded
from hubplugin.store import Batch, Id, Store, Writing
from hubplugin.vectors import Vectors, spool

if TYPE_CHECKING:
    from hubplugin.model import OffsetModel


class StoreShard(Shard):
    """A part of a store, such as a range of ids, as other machines read it. No two parts share a target, and all parts
    together have every target, also one that comes later."""

    @abstractmethod
    def scan(self) -> Iterator[Batch]:
        """Its targets, as `Store.scan` has them."""

    def vectors(self) -> Vectors | None:
        try:
            return spool((batch.vectors for batch in self.scan()), self.name)
        except EmptyInput:
            return None


class Share(Protocol):
    """A `Writing` that its coordinator has begun, for other machines to take part in: a small value that travels."""

    def joined(self, shard: StoreShard) -> tuple[Store, Writing, OffsetModel]:
        """The store, the writing of `shard` alone, which is not to be activated, and its model."""


@runtime_checkable
class SharedWriting(Protocol):
    """The `Writing` of a `Sharded` store."""

    def share(self) -> Share:
        """What lets other machines write."""


@dataclass(frozen=True)
class Explanation:
    """How another client asks what `Store.search` asks: `text` for people, and the `request` as plain JSON."""

    text: str
    request: Mapping[str, object] = field(default_factory=dict)


@runtime_checkable
class Explaining(Protocol):
    """Says how clients that know nothing of hubplugin get the corrected ranking."""

    def explain(self, asked: np.ndarray | Id, k: int = 10) -> Explanation:
        """How such a client asks for the k nearest of `asked`, a vector [d] or the id of a target. Raises StoreError
        where no correction is active."""


@runtime_checkable
class Filtered(Protocol):
    """Its searches take a filter."""

    def filtered(self, condition: str) -> Store:
        """This store, whose searches return only targets that meet `condition`, in its own language. Raises InputError
        for a condition that it cannot read."""


LACKING = {
    Sharded: "cannot be read in parts by other machines",
    Explaining: "has an adapter that does not say how other clients ask for the corrected ranking",
    Filtered: "searches without filters",
}
"""What is said of a store that lacks an ability."""

Ability = TypeVar("Ability")


def able(store: Store, ability: type[Ability]) -> Ability:
    """`store`, which has `ability`; raises StoreError, one line, where it has not."""
    if isinstance(store, ability):
        return store
    raise StoreError(f"{store.url} {LACKING[ability]}")
