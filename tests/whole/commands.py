"""The command as a user types it, and an index to type it at."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import faiss
import numpy as np

COMMAND = Path(sys.executable).with_name("hubplugin")


def hubplugin(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True)


def write_photos(folder: Path, real: Mapping[str, np.ndarray]) -> np.ndarray:
    """Writes real vectors of length 1 as the flat index photos.faiss; returns them: [1200, 384]."""
    targets = real["test_targets"].astype(np.float32)
    faiss.normalize_L2(targets)
    index = faiss.IndexFlatIP(384)
    index.add(targets)
    faiss.write_index(index, str(folder / "photos.faiss"))
    return targets
