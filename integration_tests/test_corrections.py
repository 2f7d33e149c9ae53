"""What others find while a correction is replaced."""

import threading

import pytest

import hubplugin_qdrant.transport
from hubplugin import Compute
from hubplugin_qdrant import metadata
from integration_tests.galleries import OTHER_BANK, QUERIES, Answer, K

pytestmark = pytest.mark.needs("server")


def test_answers_are_entirely_old_or_entirely_new_while_the_bank_changes(
    gallery, monkeypatch
):
    monkeypatch.setattr(
        metadata, "MANIFEST_SECONDS", 2.0
    )  # so long a search may take that read the old manifest
    monkeypatch.setattr(hubplugin_qdrant.transport, "BATCH", 25)
    gallery.correct()
    answers: list[Answer] = []
    done = threading.Event()

    def search(task="writing offsets", *_):
        if task in ("writing offsets", "closing"):
            answers.append(gallery.store().search(QUERIES[:10], K).ids)

    def search_all_the_while():
        while not done.is_set():
            search()

    search()
    beside = threading.Thread(target=search_all_the_while)
    beside.start()
    try:
        gallery.correct(bank=OTHER_BANK, compute=Compute(progress=search))
    finally:
        done.set()
        beside.join()
    search()
    old, new = answers[0], answers[-1]
    assert sum(a != b for a, b in zip(old, new, strict=True)) >= 5
    assert len(answers) >= 5
    for answer in answers:
        assert all(ids in (a, b) for ids, a, b in zip(answer, old, new, strict=True))
