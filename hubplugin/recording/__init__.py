"""Queries recorded as they are asked, for a query bank: a sample that is bounded, uniform, and free of repetitions.

`sample` says what is kept (pure), `parts` how it lies in a folder, `recorder` who writes it while searches go on.
"""

from hubplugin.recording.parts import Recorded, clear, folder_within, read, thin
from hubplugin.recording.recorder import Recorder

__all__ = ["Recorded", "Recorder", "clear", "folder_within", "read", "thin"]
