"""An index as a gallery: the vectors that it reconstructs."""

from __future__ import annotations

from collections.abc import Iterator

import faiss
import numpy as np

from hubplugin.vectors import Vectors
from hubplugin_faiss.checks import require_about_unit, require_unit
from hubplugin_faiss.handlers import handler_for


class Gallery(Vectors):
    """The vectors [rows, dim] in an index, as the index itself reconstructs them, upgraded or not.

    Args:
        index: a faiss.Index of a type that can be upgraded.
        name: what errors call it.
        unit: refuse vectors that cannot be of unit length, as a model for cosine needs them.

    Raises:
        StoreError: the type of the index cannot carry offsets.
        InputError: while it is read, at the first vector that is not of unit length.
    """

    def __init__(self, index: faiss.Index, name: str = "index", *, unit: bool = False):
        self.handler, self._unit = handler_for(index), unit
        super().__init__(name, self.handler.count, int(index.d))

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        row = 0
        for vectors, _ in self.handler.scan(0, size):
            if self._unit and not self.handler.lossy:
                require_unit(vectors, self.name, row)
            elif self._unit and row == 0 and not self.handler.two_stage:  # a second stage gets unit vectors anyway
                require_about_unit(vectors, self.name)
            yield vectors
            row += len(vectors)
