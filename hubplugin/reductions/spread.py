"""`Kernel` over a gallery that lies in shards: each worker holds those of its shards from one iteration to the next."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch

from hubplugin.reductions.answers import Answers, NearestOfShard, find_answers
from hubplugin.reductions.held import KERNELS, Place
from hubplugin.reductions.kernel import (
    SAFE_DRIFT,
    Columns,
    Kernel,
    can_seek,
    held_bytes,
    serves_first_iteration,
)
from hubplugin.reductions.products import as_tensor
from hubplugin.reductions.similarities import LeftOut, Similarities
from hubplugin.reductions.tasks import Found, Task, over
from hubplugin.reductions.terms import LogSum, MeanOfLargest, ReducedShard
from hubplugin.vectors import Vectors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Setting:
    """What a worker holds of a shard, so that whoever has lost it makes the same again. reference: log alpha of what is
    held [m]; None is 0."""

    tau: float
    k: int | None
    left_out: LeftOut | None = None
    reference: np.ndarray | None = None

    def place(self, similarities: Similarities, targets: Vectors, last: bool = False) -> AbstractContextManager[Place]:
        size, bound = held_bytes(similarities, targets.rows), similarities.compute.bytes()
        return KERNELS.place(targets.key, size, bound, last)

    def kernel(self, place: Place, similarities: Similarities, targets: Vectors) -> Kernel:
        of = (similarities, self.tau, self.k)
        if place.kernel is not None and place.of == of:
            return place.kernel
        kernel = Kernel(similarities, [Columns(targets)], self.tau, self.k, place.room)
        if place.room:
            place.kernel, place.of = kernel, of
        return kernel

    def hold(self, kernel: Kernel, similarities: Similarities) -> None:
        """Holds the exponentials at the reference, if they are not held already."""
        reference = torch.zeros(similarities.m, dtype=torch.float64)
        if self.reference is not None:
            reference = as_tensor(self.reference)
        elif self.left_out is not None and can_seek(similarities, self.tau, self.k):
            if not kernel.holds(reference, self.left_out):
                if not kernel.has_sought:
                    kernel.seek()
                kernel.leave_out(self.left_out)
            return
        if not kernel.holds(reference, self.left_out):
            kernel.left_out = self.left_out
            kernel.hold_at(reference, "exponentials of a shard")


class SpreadKernel:
    """As `Kernel`, where the first of the columns, the gallery, lies in shards."""

    def __init__(self, similarities: Similarities, columns: Sequence[Columns], tau: float, k: int | None):
        self._similarities, self._columns, self._setting = similarities, columns, _Setting(tau, k)
        self._beside = [(Kernel(similarities, [Columns(each.targets)], tau), each.mass) for each in columns[1:]]
        self.left_out: LeftOut | None = None
        self.k_means: np.ndarray | None = None

    def find_answers(self) -> Answers | None:
        return find_answers(self._similarities, [part.targets for part in self._columns], _SeekInShard(self._setting))

    def first_log_sums(self) -> torch.Tensor:
        self._setting = replace(self._setting, left_out=self.left_out)
        parts = self._sums(None, "Sinkhorn iteration 1")
        for kernel, mass in self._beside:
            if self.left_out is not None:
                kernel.left_out = replace(self.left_out, largest=False)
            parts.append(kernel.first_log_sums() + math.log(mass))
        return torch.stack(parts).logsumexp(dim=0)

    def shares(self, log_alpha: torch.Tensor, what: str) -> torch.Tensor:
        self._refer_to(log_alpha)
        parts = self._sums(log_alpha.numpy(), what)
        parts += [kernel.shares(log_alpha, what) * mass for kernel, mass in self._beside]
        return torch.stack(parts).sum(dim=0)

    def held_log_sums(self, log_alpha: torch.Tensor) -> np.ndarray:
        """LSE_u( s(b_u, t)/tau + log_alpha_u ) for the gallery; the workers give up what they hold."""
        task = _ValuesOfShard(self._setting, log_alpha.numpy())
        parts = [found for _, found in over(self._similarities, self._columns[0].targets, task)]
        if self._setting.k is not None:
            self.k_means = np.concatenate([found["k_means"] for found in parts])
        return np.concatenate([found["log_sums"] for found in parts])

    def _refer_to(self, log_alpha: torch.Tensor) -> None:
        """Lets the workers hold exponentials at `log_alpha` where those they hold do not serve it."""
        similarities, before = self._similarities, self._setting.reference
        if before is None and serves_first_iteration(similarities, self._setting.tau):
            before = np.zeros(similarities.m)
        if before is not None:
            change = log_alpha.numpy() - before
            if change.max() - change.min() <= min(SAFE_DRIFT[dtype] for dtype in similarities.compute.dtypes()):
                return
        self._setting = replace(self._setting, reference=log_alpha.numpy())

    def _sums(self, log_alpha: np.ndarray | None, what: str) -> list[torch.Tensor]:
        """Of each shard of the gallery."""
        task = _SumsOfShard(self._setting, log_alpha, what)
        parts = [found for _, found in over(self._similarities, self._columns[0].targets, task)]
        held = sum(bool(found["held"]) for found in parts)
        if log_alpha is None and held < len(parts):
            logger.warning(
                "workers have room to hold %d of %d shards between iterations (memory=%s in each); the others are "
                "multiplied anew in every one: allow more memory, or take more workers",
                held,
                len(parts),
                self._similarities.compute.memory,
            )
        return [as_tensor(found["sums"]) for found in parts]


@dataclass(frozen=True)
class _SeekInShard(Task):
    """The nearest targets of the bank, along with what the first iteration needs where there is room for it."""

    setting: _Setting
    what: str = "answers of the bank"

    def __call__(self, similarities: Similarities, targets: Vectors) -> Found:
        if not can_seek(similarities, self.setting.tau, self.setting.k):
            return NearestOfShard()(similarities, targets)
        with self.setting.place(similarities, targets) as place:
            if place.room:
                return self.setting.kernel(place, similarities, targets).seek().nearest
        # Which of two equal targets is the nearer must not depend on where there is room.
        return NearestOfShard(1 / self.setting.tau)(similarities, targets)


@dataclass(frozen=True)
class _SumsOfShard(Task):
    """What one iteration sums over the targets of a shard, from `log_alpha` [m] on; None: the first one."""

    setting: _Setting
    log_alpha: np.ndarray | None
    what: str

    def __call__(self, similarities: Similarities, targets: Vectors) -> Found:
        with self.setting.place(similarities, targets) as place:
            kernel = self.setting.kernel(place, similarities, targets)
            is_first = self.log_alpha is None
            if place.room and not (is_first and not serves_first_iteration(similarities, self.setting.tau)):
                self.setting.hold(kernel, similarities)
            kernel.left_out = self.setting.left_out
            if self.log_alpha is None:
                sums = kernel.first_log_sums()
            else:
                sums = kernel.shares(as_tensor(self.log_alpha), self.what)
            return {"sums": sums.numpy(), "held": np.array(place.room > 0)}


@dataclass(frozen=True)
class _ValuesOfShard(Task):
    """log_sums: LSE_u( s(b_u, t)/tau + log_alpha_u ) for each target of a shard. k_means: see `Scaling`."""

    setting: _Setting
    log_alpha: np.ndarray
    what: str = "offsets"

    def __call__(self, similarities: Similarities, targets: Vectors) -> Found:
        setting = self.setting
        with setting.place(similarities, targets, last=True) as place:
            if place.room:
                kernel = setting.kernel(place, similarities, targets)
                setting.hold(kernel, similarities)
                log_sums, means = kernel.held_log_sums(as_tensor(self.log_alpha)), kernel.k_means
                if log_sums is not None and (means is None or not np.isnan(means).any()):
                    return {"log_sums": log_sums} if means is None else {"log_sums": log_sums, "k_means": means}
        reductions: list[LogSum | MeanOfLargest] = [LogSum(setting.tau, self.log_alpha)]
        if setting.k is not None:
            reductions.append(MeanOfLargest(setting.k))
        found = ReducedShard(tuple(reductions), setting.left_out, self.what)(similarities, targets)
        return dict(zip(("log_sums", "k_means"), found.values(), strict=False))
