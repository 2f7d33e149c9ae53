"""The first use that hubplugin exists for, as its users live it."""

import pytest

import hubplugin
from integration_tests.galleries import (
    AGREED,
    BANK,
    FIT,
    TARGETS,
    ids_of,
    payload,
)


def test_wrapping_an_existing_qdrant_collection_and_trusting_it(backend, gallery):
    # There is a collection, and an application that searches it.
    client, store = backend.client(), gallery.store()
    before = ids_of(gallery.search(client))
    content = gallery.content()
    assert gallery.agreement(before, None) == 1

    # Documents in the place of queries would do harm: they are refused, and nothing
    # has been written.
    with pytest.raises(hubplugin.CorrectionRefused, match="documents, not queries"):
        hubplugin.apply(store, TARGETS)
    assert gallery.content() == content

    # One call with real queries corrects it in place ...
    model = hubplugin.apply(store, BANK, **FIT).model

    # ... and the application swaps its client for ours, which knows the server's
    # address and nothing else.
    after = gallery.search(backend.wrapped())
    assert ids_of(after) != before
    assert gallery.agreement(ids_of(after), model) >= AGREED
    for points in after:
        assert all(point.payload == payload(point.payload["row"]) for point in points)

    # The plain client still gets the raw ranking, and what is taken out again leaves
    # nothing behind.
    assert ids_of(gallery.search(client)) == before
    hubplugin.remove(gallery.store())
    assert gallery.content() == content
    assert ids_of(gallery.search(backend.wrapped())) == before
