"""What holds for a correction wherever it lies: in a collection or in a shard."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import hubplugin_qdrant.transport
from hubplugin import Compute, apply, inspect, refresh
from hubplugin.measures.hubness import skewness
from hubplugin_qdrant import metadata
from integration_tests.galleries import (
    AGREED,
    APPLY,
    BANK,
    LATER,
    OTHER_BANK,
    QUERIES,
    Answer,
    K,
    exact_scores,
    point_id,
)


@pytest.mark.parametrize("using", ["", "code"], ids=["unnamed", "named"])
def test_an_exact_search_finds_what_brute_force_finds(fill, using):
    gallery = fill(using=using)
    store = gallery.store()
    applied = apply(store, BANK, **APPLY)
    assert gallery.agreement(store.search(QUERIES, K).ids, applied.model) >= AGREED
    assert gallery.agreement(store.search(QUERIES, K, raw=True).ids, None) == 1


@pytest.mark.needs("graph")
def test_a_search_by_graph_reaches_the_calibrated_recall(fill):
    gallery = fill(graph=True)
    store = gallery.store()
    applied = apply(store, BANK, **APPLY)
    raw = gallery.agreement(store.search(QUERIES, K, raw=True).ids, None)
    assert gallery.agreement(store.search(QUERIES, K).ids, applied.model) >= raw - 0.02


def test_what_another_program_adds_and_changes_is_refreshed(gallery):
    store = gallery.store()
    model = apply(store, BANK, **APPLY).model
    fresh = [point_id(len(gallery.ids) + row) for row in range(len(LATER))]
    gallery.insert(fresh, LATER)
    gallery.insert(gallery.ids[:20], gallery.vectors[20:40])
    gallery.vectors = np.concatenate([gallery.vectors[20:40], gallery.vectors[20:], LATER])
    gallery.ids = gallery.ids + fresh
    before = inspect(store, queries=0)
    assert (before.count, before.missing + before.stale) == (len(gallery.ids), len(fresh) + 20)
    applied = refresh(store)
    assert (applied.scanned, applied.missing + applied.stale) == (len(gallery.ids), len(fresh) + 20)
    assert gallery.agreement(store.search(QUERIES, K).ids, model) >= AGREED


def test_an_inspection_tells_hubness_as_it_is_now(gallery):
    store = gallery.store()
    model = apply(store, BANK, **APPLY).model
    gallery.insert(gallery.ids[:20], gallery.vectors[20:40])
    gallery.vectors = np.concatenate([gallery.vectors[20:40], gallery.vectors[20:]])
    refresh(store)
    probes = model.terms[0].bank[np.linspace(0, len(model.terms[0].bank) - 1, 50).astype(int)]
    expected = []
    for each in (None, model):
        found = np.argsort(-exact_scores(probes, gallery.vectors, each), axis=1)[:, :10]
        expected.append(skewness(np.bincount(found.ravel(), minlength=len(gallery.ids))))
    found = inspect(store, queries=50).hubness
    assert found is not None
    # Candidates are chosen for 0.99 of the exact corrected ranking, and it is hubs that they lack.
    assert (found.raw, found.corrected) == pytest.approx(expected, abs=0.15)
    assert found.corrected < found.raw
    assert "hubness now: skewness" in str(found)


def test_a_removal_leaves_every_point_as_it_was(gallery):
    store = gallery.store()
    store.search(QUERIES, K)  # the first search in local mode changes its vectors by a rounding
    before = gallery.content()
    apply(store, BANK, **APPLY)
    apply(store, OTHER_BANK, **APPLY)
    assert gallery.content() != before
    store.remove()
    assert gallery.content() == before
    assert gallery.store().correction() is None


def test_answers_are_entirely_old_or_entirely_new_while_the_bank_changes(backend, gallery, monkeypatch):
    monkeypatch.setattr(metadata, "MANIFEST_SECONDS", 2.0)  # so long a search may take that read the old manifest
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 25)
    apply(gallery.store(), BANK, **APPLY)
    answers: list[Answer] = []
    done = threading.Event()

    def search(what="writing offsets", *_):
        if what in ("writing offsets", "closing"):
            answers.append(gallery.store().search(QUERIES[:10], K).ids)

    def search_all_the_while():
        while not done.is_set():
            search()

    search()
    old = answers[0]
    beside = threading.Thread(target=search_all_the_while)
    if "threads" in backend.can:
        beside.start()
    try:
        apply(gallery.store(), OTHER_BANK, compute=Compute(progress=search), **APPLY)
    finally:
        done.set()
        if beside.ident is not None:
            beside.join()
    search()
    new = answers[-1]
    assert sum(a != b for a, b in zip(old, new, strict=True)) >= 5
    assert len(answers) >= 5
    for answer in answers:
        assert all(found in (a, b) for found, a, b in zip(answer, old, new, strict=True))


@pytest.mark.needs("disk")
def test_what_is_closed_and_opened_again_is_still_corrected(gallery):
    before = gallery.store()
    model = apply(before, BANK, **APPLY).model
    corrected = before.search(QUERIES, K).ids
    del before
    with gallery.let_go():
        pass
    after = gallery.store()
    assert after.search(QUERIES, K).ids == corrected
    report = inspect(after, queries=0)
    assert report.correction is not None
    assert (report.correction.model.fingerprint, report.missing, report.stale) == (model.fingerprint, 0, 0)
