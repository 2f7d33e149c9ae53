"""The codec of an index, found by the quantiser that it has."""

from __future__ import annotations

import faiss
import numpy as np

from hubplugin_faiss.encoding.codec import Codec, Coder, E, Floats
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.layout import UpgradeSpec
from hubplugin_faiss.encoding.product_codec import ProductCodec
from hubplugin_faiss.encoding.scalar_codec import ScalarCodec


class FloatCodec(Codec):
    """float32: one extra dimension, exact."""

    @property
    def lossy(self) -> bool:
        return False

    def design(self, spec: UpgradeSpec, sample: np.ndarray, bases: np.ndarray | None) -> Coder:
        query = -np.sqrt(2 * spec.high) if self.euclidean else max(E, spec.size * 1e-30)
        return self.coder(self.index.d, self._extra(spec, [query], 1, b""))

    def coder(self, d: int, extra: ExtraDimensions) -> Coder:
        return Coder(extra, Floats(extra.width), range(extra.width), 32 * d, 32 * extra.width)

    def widen(self, new: faiss.Index, coder: Coder) -> None:
        pass

    def narrow(self, new: faiss.Index, d: int) -> None:
        pass


def codec_of(index: faiss.Index) -> Codec:
    """The codec for the codes of the base index `index`; raises StoreError for a scalar quantiser without room."""
    if hasattr(index, "sq"):
        return ScalarCodec(index)
    if hasattr(index, "pq"):
        return ProductCodec(index)
    return FloatCodec(index)
