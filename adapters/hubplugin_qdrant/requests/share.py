"""Which requests fall into a share of the traffic: the same query always does, or never."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b

from hubplugin_qdrant.requests.nodes import Node, nearest, prefetches_of


def falls_within(request: Node, share: float) -> bool:
    """Whether `request` is among the `share` of queries that a hash picks. It reads the vectors that are asked for
    alone, as float32, so that a query keeps its side on another page, under another filter, and in a batch."""
    if share <= 0.0 or share >= 1.0:
        return share > 0.0
    digest = blake2b(digest_size=8)
    for asked in _asked(request):
        digest.update(asked)
    return int.from_bytes(digest.digest(), "big") < share * 2.0**64


def _asked(node: Node) -> Iterator[bytes]:
    """What a request and its prefetches ask for the nearest of, as bytes."""
    query = nearest(node.query)
    try:
        yield array("f", query).tobytes()
    except TypeError:  # an id, a document, or no nearest query at all
        yield str(query).encode()
    for child in prefetches_of(node.prefetch):
        yield from _asked(child)
