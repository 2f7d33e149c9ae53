"""Offsets lowered until a target counts for no more than it may among the nearest of a bank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from hubplugin.reductions.similarities import LeftOut, Similarities
from hubplugin.vectors import Vectors

STEPS, CLOSE = 40, 1e-5
"""Newton steps at most, some 6 in practice, and how near to the count they come, as a share of it."""


@dataclass(frozen=True)
class Limit:
    """On the offset o of a target t, over the bank rows u that are not left out; levels [m], count above 0:

    sum_u sigmoid( (s(b_u, t) + o - levels_u) / tau ) <= count
    """

    levels: np.ndarray
    tau: float
    count: float
    left_out: LeftOut | None = None

    def lowered(self, similarities: Similarities, targets: Vectors, offsets: np.ndarray) -> np.ndarray:
        """`offsets` [n] of `targets`, each lowered as far as it takes: float64 [n]."""
        scale, result, what = 1 / self.tau, offsets.astype(np.float64), "bounding offsets"
        weights = torch.from_numpy(-scale * self.levels.astype(np.float64))
        for tile in similarities.tiles(targets, what, scale=scale, weights=weights, left_out=self.left_out):
            part = result[tile.start : tile.stop]
            given = (torch.from_numpy(part / self.tau) + tile.own).to(tile.s)
            rows = (torch.add(tile.s, given[:, None]).sigmoid_().sum(dim=1) > self.count).nonzero()[:, 0]
            if len(rows):
                found = self._solved(tile.s[rows], given[rows]).cpu().double() - tile.own[rows.cpu()]
                part[rows.cpu().numpy()] = self.tau * found.numpy()
        return result

    def _solved(self, x: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """The o with sum_u sigmoid(x_u + o) = count for each row of x [b, m], which is below `high` [b]."""
        low = math.log(self.count) - x.logsumexp(dim=1)  # a sigmoid is below its exponential
        o, values = low.clone(), torch.empty_like(x)
        for _ in range(STEPS):
            torch.add(x, o[:, None], out=values).sigmoid_()
            total = values.sum(dim=1)
            if bool(((total / self.count - 1).abs() < CLOSE).all()):
                break
            over = total > self.count
            low, high = o.where(~over, low), o.where(over, high)
            slope = total - values.square_().sum(dim=1)
            o = o + (math.log(self.count) - total.log()) * total / slope  # Newton's step; the logarithm bends little
            o = o.where((o > low) & (o < high), (low + high) / 2)
        return o
