"""The three uses that hubplugin exists for, as their users live them."""

import subprocess
import sys

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from integration_tests.galleries import (
    AGREED,
    BANK,
    FIT,
    QUERIES,
    TARGETS,
    K,
    exact_scores,
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


SEARCH = f"""
import sys
import faiss, numpy
index = faiss.read_index("functions.faiss")
numpy.save("found.npy", index.search(numpy.load("queries.npy"), {K})[1])
assert not any(name.startswith("hubplugin") for name in sys.modules)
"""


@pytest.mark.slow
def test_upgrading_a_faiss_index_in_place(tmp_path):
    # There is an index in a file.
    file = tmp_path / "functions.faiss"
    index = faiss.IndexFlatIP(TARGETS.shape[1])
    index.add(TARGETS)
    faiss.write_index(index, str(file))

    # It is upgraded in place ...
    model = hubplugin.fit(TARGETS, BANK, **FIT)
    hubplugin.apply(hubplugin_faiss.open_store(file), model)

    # ... and searched by a process that knows Faiss and no hubplugin.
    np.save(tmp_path / "queries.npy", QUERIES)
    subprocess.run([sys.executable, "-c", SEARCH], cwd=tmp_path, check=True)
    rows = np.load(tmp_path / "found.npy")
    scores = exact_scores(QUERIES, TARGETS, model)
    best = np.sort(scores, axis=1)[:, -K][:, None] - 1e-5
    assert (np.take_along_axis(scores, rows, axis=1) >= best).all()
    raw = np.argsort(-exact_scores(QUERIES, TARGETS, None), axis=1)[:, :K]
    assert (rows != raw).any()
