"""The handler of an index that holds codes itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import faiss
import numpy as np

from hubplugin.errors import StoreError
from hubplugin_faiss.encoding.codec import Coder
from hubplugin_faiss.encoding.codecs import codec_of
from hubplugin_faiss.encoding.extra_dimensions import ExtraDimensions
from hubplugin_faiss.encoding.layout import Assemble, UpgradeSpec
from hubplugin_faiss.faiss_objects import appending, name_of, pretransform
from hubplugin_faiss.handlers.base import IndexHandler, handler_for


class BaseIndexHandler(IndexHandler):
    """An index that holds codes. Upgraded, it has w more components, which transforms before it append."""

    @property
    def two_stage(self) -> bool:
        return False

    @property
    def exhaustive(self) -> bool:
        return False

    @property
    def lossy(self) -> bool:
        return codec_of(self.index).lossy

    def upgraded(self, offsets: np.ndarray, spec: UpgradeSpec) -> faiss.Index:
        return self.upgraded_behind([], offsets, spec)

    def upgraded_behind(
        self, chain: list[faiss.VectorTransform], offsets: np.ndarray, spec: UpgradeSpec
    ) -> faiss.Index:
        """The upgraded index behind the transforms of `chain` and those that append its extra dimensions."""
        extra, base_index = self.widened(offsets, spec)
        return pretransform([*chain, *appending(int(self.index.d), extra)], base_index)

    def downgraded(self, assemble: Assemble) -> faiss.Index:
        raise StoreError(f"{name_of(self.index)} is not upgraded")

    def append(self, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None, unit: bool = False) -> None:
        raise StoreError(f"{name_of(self.index)} is not upgraded")

    def scan(self, start: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        for vectors in self.decoded(start, size):
            yield vectors, None

    def rounding(self, offsets: np.ndarray) -> float:
        return 0.0

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.arange(start, self.count if stop is None else stop)

    def order(self) -> np.ndarray | slice:
        return slice(None)

    def extra_dimensions(self) -> list[ExtraDimensions]:
        return []

    @abstractmethod
    def widened(self, offsets: np.ndarray, spec: UpgradeSpec) -> tuple[ExtraDimensions, faiss.Index]:
        """Extra dimensions that suit this index, and a new one of d + w components that holds `offsets` [n] in them."""

    @abstractmethod
    def narrowed(self, d: int, extra: ExtraDimensions, assemble: Assemble) -> faiss.Index:
        """A new index of d components without the `extra` ones that this one has."""

    @abstractmethod
    def coder(self, d: int, extra: ExtraDimensions) -> Coder:
        """The coder that wrote the extra dimensions `extra` into this index."""

    @abstractmethod
    def bases(self, d: int, count: int) -> np.ndarray | None:
        """Extra components [count, w] of some centroids, where codes hold differences from them, else None."""

    @abstractmethod
    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        """All components of the entries from `start` on, b <= size: float32 [b, d], or [b, d + w] if it is upgraded."""

    @abstractmethod
    def coded_extended(self, extra: ExtraDimensions, vectors: np.ndarray) -> np.ndarray:
        """What the codes of this index, which has extra dimensions, make of `vectors` [n, d]: float32 [n, d]."""

    @abstractmethod
    def append_extended(
        self, d: int, extra: ExtraDimensions, vectors: np.ndarray, offsets: np.ndarray, ids: np.ndarray | None
    ) -> None:
        """Adds `vectors` [n, d] with `offsets` [n] to this index of d + w components."""


def base_index_handler(index: faiss.Index) -> BaseIndexHandler:
    """The handler for `index`; raises StoreError if it is no base index."""
    handler = handler_for(index)
    if not isinstance(handler, BaseIndexHandler):
        raise StoreError(f"{name_of(index)} cannot carry offsets where it stands")
    return handler


def with_query(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """`vectors` [n, d] with the extra components `query` [w] behind each: float32 [n, d + w]."""
    components = np.broadcast_to(query, (len(vectors), len(query)))
    return np.ascontiguousarray(np.concatenate([vectors, components], axis=1), np.float32)
