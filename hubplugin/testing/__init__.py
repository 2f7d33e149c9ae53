"""What every adapter must do, as tests that its author runs on his own store.

    from hubplugin.testing import StoreConformance

    class TestMyStore(StoreConformance):
        def create(self, ids, vectors):
            ...fill a fresh store...
            return MyStore(...)

        def reopen(self, store):
            return MyStore(...)  # the same data, as another process would open it

Needs pytest. Every test runs against the real store; there is nothing to mock.
"""

from __future__ import annotations

from hubplugin.testing.conformance import StoreConformance
from hubplugin.testing.store_under_test import StoreUnderTest

__all__ = ["StoreConformance", "StoreUnderTest"]
