"""What others find while a correction is replaced."""

import threading

import hubplugin_qdrant.transport
from hubplugin import Compute, apply
from hubplugin_qdrant import metadata
from integration_tests.galleries import APPLY, BANK, OTHER_BANK, QUERIES, Answer, K


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
