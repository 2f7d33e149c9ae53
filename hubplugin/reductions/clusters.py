"""Clusters of a bank, so that what happens to one topic is seen beside the whole."""

from __future__ import annotations

import numpy as np
import torch

ROUNDS = 20
"""Lloyd's iterations at most; banks of text and of images settle within ten or so."""


def clusters(vectors: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """The number of the cluster that each of `vectors` [m, d] is in: int64 [m], 0 to at most `count` - 1.

    k-means by Lloyd's algorithm from `count` rows drawn with a fixed seed; a cluster that runs empty stays empty.
    """
    rows = torch.from_numpy(np.ascontiguousarray(vectors, np.float32))
    drawn = np.random.default_rng(seed).permutation(len(rows))[:count]
    centres, labels = rows[torch.from_numpy(drawn)], torch.full((len(rows),), -1)
    for _ in range(ROUNDS):
        nearest = (rows @ centres.T - centres.square().sum(dim=1) / 2).argmax(dim=1)
        if torch.equal(nearest, labels):
            break
        labels = nearest
        sums = torch.zeros_like(centres).index_add_(0, labels, rows)
        sizes = torch.bincount(labels, minlength=len(centres))[:, None]
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    return labels.numpy()
