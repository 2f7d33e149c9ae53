"""Recorders that have recorded something."""

from hubplugin import Recorder


def recorded(folder, queries, size=10_000, clicks=()):
    """A recorder that has written `queries` and, of each of the first of them, a click of one of `clicks`."""
    recorder = Recorder(folder, size, seconds=1000)
    recorder.add(queries)
    for query, target in zip(queries, clicks, strict=False):
        recorder.click(query, target)
    recorder.flush()
    return recorder
