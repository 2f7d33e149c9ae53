"""The codec of an index, found by the quantiser that it has."""

from __future__ import annotations

from typing import Any

import numpy as np

from hubplugin_faiss.encoding.codec import Codec, Coder, E, Floats
from hubplugin_faiss.encoding.extra_dimensions import Tail
from hubplugin_faiss.encoding.layout import Plan
from hubplugin_faiss.encoding.product_codec import ProductCodec
from hubplugin_faiss.encoding.scalar_codec import ScalarCodec


class FloatCodec(Codec):
    """float32: one component more, exact."""

    def plan(self, plan: Plan, sample: np.ndarray, bases: np.ndarray | None) -> Coder:
        query = -np.sqrt(2 * plan.high) if self.euclidean else max(E, plan.size * 1e-30)
        return self.coder(self.index.d, self._tail(plan, [query], 1, b""))

    def coder(self, d: int, tail: Tail) -> Coder:
        return Coder(tail, Floats(tail.width), range(tail.width), 32 * d, 32 * tail.width)

    def widen(self, new: Any, coder: Coder) -> None:
        pass

    def narrow(self, new: Any, d: int) -> None:
        pass


def codec_of(index: Any) -> Codec:
    if hasattr(index, "sq"):
        return ScalarCodec(index)
    if hasattr(index, "pq"):
        return ProductCodec(index)
    return FloatCodec(index)
