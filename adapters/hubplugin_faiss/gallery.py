"""An index as a gallery: the vectors that it reconstructs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hubplugin.vectors import Vectors
from hubplugin_faiss.checks import require_about_unit, require_unit
from hubplugin_faiss.handlers import handler_for


class Gallery(Vectors):
    """The vectors in an index, as the index itself reconstructs them, upgraded or not: `rows` x `dim`."""

    def __init__(self, index: Any, name: str = "index", *, unit: bool = False):
        self._handler, self._unit, self._first = handler_for(index), unit, 0
        super().__init__(name, self._handler.count, int(index.d))

    def _raw_blocks(self, size: int) -> Iterator[np.ndarray]:
        row = 0
        for vectors, _ in self._handler.scan(0, size):
            if self._unit and not self._handler.lossy:
                require_unit(vectors, self.name, row)
            elif self._unit and row == 0 and not self._handler.two_stage:  # whose second stage is made of unit vectors
                require_about_unit(vectors, self.name)
            yield vectors
            row += len(vectors)
