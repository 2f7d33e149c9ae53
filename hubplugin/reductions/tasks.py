"""What is computed of some targets by themselves, so that a gallery in shards is reduced shard by shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np

from hubplugin.reductions.similarities import Similarities
from hubplugin.vectors import Spread, Vectors

Found: TypeAlias = dict[str, np.ndarray]
"""What a task found, by name: sums, or a row a target."""


class Task(ABC):
    """A pure function of a shard: done again, anywhere, it finds the same. A frozen dataclass of numbers, texts, arrays
    and others of its kind, which says all that the result depends on but the bank and the shard."""

    what: str
    """The work, for progress."""

    @abstractmethod
    def __call__(self, similarities: Similarities, targets: Vectors) -> Found:
        """Of all of `targets`."""


def over(similarities: Similarities, targets: Vectors, task: Task) -> list[tuple[int, Found]]:
    """What `task` finds in each shard of `targets`, behind the number of its first target. Targets that lie in one
    place are one shard."""
    if isinstance(targets, Spread):
        return targets.each(task, similarities)
    return [(0, task(similarities, targets))]
