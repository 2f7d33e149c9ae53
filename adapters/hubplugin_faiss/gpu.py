"""Indexes on a GPU: taken to the CPU, changed there by the rule that they have there, and taken back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import faiss
import numpy as np

from hubplugin_faiss.codes import Coder
from hubplugin_faiss.leaves import in_memory
from hubplugin_faiss.plan import Fill, Plan
from hubplugin_faiss.rule import Leaf, leaf_for
from hubplugin_faiss.tail import Tail

SUB_QUANTISERS = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)
"""How many of 8 bits the usual layout of a GpuIndexIVFPQ takes; the interleaved one takes any number of them."""


class OnGpu(Leaf):
    """What Faiss keeps on a GPU. It comes back to the same device with the same resources, its other settings, which
    Faiss does not tell, as Faiss sets them; transforms stay on the CPU, where they always are."""

    names = (
        "GpuIndexFlat",
        "GpuIndexFlatIP",
        "GpuIndexFlatL2",
        "GpuIndexIVFFlat",
        "GpuIndexIVFScalarQuantizer",
        "GpuIndexIVFPQ",
    )

    @cached_property
    def _cpu(self) -> Leaf:
        return leaf_for(faiss.index_gpu_to_cpu(self.index))

    def _back(self, leaf: Any) -> Any:
        provider = faiss.GpuResourcesProviderFromInstance(self.index.getResources())
        if isinstance(leaf, faiss.IndexIVFPQ):
            config = faiss.GpuIndexIVFPQConfig()
            config.device, config.allowCpuCoarseQuantizer = self.index.getDevice(), True
            config.interleavedLayout = leaf.pq.nbits != 8 or leaf.pq.M not in SUB_QUANTISERS
            config.usePrecomputedTables = not config.interleavedLayout and self.index.getPrecomputedCodes()
            return faiss.GpuIndexIVFPQ(provider, leaf, config)
        options = faiss.GpuClonerOptions()
        options.allowCpuCoarseQuantizer = True  # a coarse quantizer that knows no GPU stays where it is
        return faiss.index_cpu_to_gpu(provider, self.index.getDevice(), leaf, options)

    @property
    def whole(self) -> bool:
        return self._cpu.whole

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        return self._cpu.lossy

    @property
    def exhaustive(self) -> bool:  # type: ignore[override]
        return self._cpu.exhaustive

    def widened(self, offsets: np.ndarray, plan: Plan) -> tuple[Tail, Any]:
        tail, leaf = self._cpu.widened(offsets, replace(plan, fill=in_memory))
        return tail, self._back(leaf)

    def narrowed(self, d: int, tail: Tail, fill: Fill) -> Any:
        return self._back(self._cpu.narrowed(d, tail, in_memory))

    def coder(self, d: int, tail: Tail) -> Coder:
        return self._cpu.coder(d, tail)

    def bases(self, d: int, count: int) -> np.ndarray | None:
        return self._cpu.bases(d, count)

    def decoded(self, start: int, size: int) -> Iterator[np.ndarray]:
        return self._cpu.decoded(start, size)

    def coded_tailed(self, tail: Tail, vectors: np.ndarray) -> np.ndarray:
        return self._cpu.coded_tailed(tail, vectors)

    def append_tailed(self, d: int, tail: Tail, vectors: np.ndarray, offsets: np.ndarray, ids: Any) -> None:
        self._cpu.append_tailed(d, tail, vectors, offsets, ids)
        self.index.copyFrom(self._cpu.index)

    def labels(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._cpu.labels(start, stop)

    def order(self) -> np.ndarray | slice:
        return self._cpu.order()

    def selecting(self, selector: Any) -> Any:
        return self._cpu.selecting(selector)
