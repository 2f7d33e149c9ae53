"""The three uses that hubplugin exists for, one scenario each, as its user lives them."""

import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from hubplugin import apply
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

pytestmark = pytest.mark.slow


def test_wrapping_an_existing_qdrant_collection(backend, gallery):
    # There is a collection, and an application that searches it.
    client = backend.client()
    before = ids_of(gallery.search(client))
    assert gallery.agreement(before, None) == 1

    # One call corrects it in place ...
    model = apply(gallery.store(), BANK, **FIT).model

    # ... and the application swaps its client for ours. It knows the server's address and nothing else.
    after = gallery.search(backend.wrapped())
    assert gallery.agreement(ids_of(after), model) >= AGREED
    assert all(
        point.payload == payload(point.payload["row"])
        for points in after
        for point in points
    )

    # The plain client still gets the raw ranking, and what is taken out again leaves nothing behind.
    assert ids_of(gallery.search(client)) == before
    hubplugin.remove(gallery.store())
    assert ids_of(gallery.search(backend.wrapped())) == before


def test_upgrading_a_faiss_index_in_place(tmp_path):
    # There is an index in a file.
    file = tmp_path / "functions.faiss"
    index = faiss.IndexFlatIP(TARGETS.shape[1])
    index.add(TARGETS)
    faiss.write_index(index, str(file))

    # It is upgraded in place ...
    model = hubplugin.fit(TARGETS, BANK, **FIT)
    hubplugin.apply(hubplugin_faiss.open_store(file), model)

    # ... and searched by an interpreter that has Faiss, what Faiss depends on, and no hubplugin.
    program = (
        "import faiss, numpy, sys; index = faiss.read_index(sys.argv[1]);"
        f"numpy.save(sys.argv[3], index.search(numpy.load(sys.argv[2]), {K})[1])"
    )
    np.save(tmp_path / "queries.npy", QUERIES)
    found = tmp_path / "found.npy"
    packages = {
        "PYTHONPATH": str(
            _only("faiss", "numpy", "packaging", folder=tmp_path / "packages")
        )
    }
    python = [sys.executable, "-S", "-c"]
    subprocess.run(
        [*python, program, file, tmp_path / "queries.npy", found],
        env=packages,
        cwd=tmp_path,
        check=True,
    )
    absent = subprocess.run(
        [*python, "import hubplugin"],
        env=packages,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "No module named 'hubplugin'" in absent.stderr

    scores, rows = exact_scores(QUERIES, TARGETS, model), np.load(found)
    best = np.sort(scores, axis=1)[:, -K][:, None] - 1e-5
    assert (np.take_along_axis(scores, rows, axis=1) >= best).all()
    assert (
        rows != np.argsort(-exact_scores(QUERIES, TARGETS, None), axis=1)[:, :K]
    ).any()


def test_trusting_it(gallery):
    store = gallery.store()
    store.search(
        QUERIES, K
    )  # the first search in local mode changes its vectors by a rounding
    before, answers = gallery.content(), store.search(QUERIES, K)

    # Documents in the place of queries would do harm: they are refused, and nothing has been written.
    with pytest.raises(hubplugin.CorrectionRefused, match="documents, not queries"):
        apply(store, TARGETS)
    assert gallery.content() == before

    # A bank of real queries is accepted, and changes what is found.
    apply(store, BANK, **FIT)
    assert store.search(QUERIES, K).ids != answers.ids

    # Taken out again, everything is as it was: every point, its payload, and every answer.
    store.remove()
    assert gallery.content() == before
    assert gallery.store().search(QUERIES, K) == answers


def _only(*packages: str, folder: Path) -> Path:
    """A folder with links to `packages`, and to the libraries that their wheels bring, and to nothing else."""
    folder.mkdir()
    for package in packages:
        home = Path(sys.modules[package].__file__).parent
        for part in [home, *home.parent.glob(f"{package}*.libs")]:
            (folder / part.name).symlink_to(part)
    return folder
