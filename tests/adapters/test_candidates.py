"""Chroma and LanceDB, where candidates are ranked again: what others do to the vectors."""

import numpy as np
import pytest

from hubplugin import (
    Bank,
    HubpluginError,
    Recorder,
    StoreError,
    apply,
    fit,
    inspect,
    open_store,
    refresh,
    remove,
)
from hubplugin.metric import Metric
from tests.galleries import assert_near, clustered
from tests.keepers import DIM, InChroma, InLanceDB
from tests.refusals import refused

pytestmark = pytest.mark.slow

COUNT = 300


@pytest.fixture(params=[InChroma, InLanceDB])
def gallery(request, tmp_path, rng):
    """The user, a store that was opened before it was corrected, its model, and vectors by id."""
    user = request.param(str(tmp_path), Metric.COSINE)
    vectors = clustered(rng, COUNT, DIM)
    user.create()
    ids = [user.key(number) for number in range(COUNT)]
    user.put(ids, vectors)
    store = user.open()
    model = fit(vectors, clustered(rng, 100, DIM), "is")
    apply(user.open(), model, force=True)
    return user, store, model, dict(zip(ids, vectors, strict=True))


def assert_ranked(store, vectors, model, queries):
    """The scores are those of `vectors` in float64 and the best of them, but for the
    candidates that were not asked for."""
    rows = np.stack(list(vectors.values()))
    distances = 1 - queries.astype(np.float64) @ rows.T - model.offsets(rows)
    place = {key: number for number, key in enumerate(vectors)}
    found = store.search(queries, 10)
    ranked = np.array([[place[key] for key in line] for line in found.ids])
    named = np.take_along_axis(distances, ranked, axis=1)
    assert_near(found.scores, named, 2e-5)
    largest = np.sort(distances, axis=1)[:, 9:10] + 2e-5
    assert (named <= largest).mean() >= 0.97


def test_a_store_whose_targets_were_all_deleted_is_inspected_searched_and_filled_anew(
    gallery, rng
):
    user, store, model, vectors = gallery
    user.delete(list(vectors))
    assert store.search(clustered(rng, 2, DIM), 10).ids == [[], []]
    report = inspect(user.open())
    assert (report.count, report.missing, report.stale) == (0, 0, 0)
    assert refresh(user.open()).scanned == 0
    user.put(list(vectors), np.stack(list(vectors.values())))
    refresh(user.open())
    assert_ranked(store, vectors, model, clustered(rng, 10, DIM))
    user.delete(list(vectors))
    remove(user.open())
    assert user.open().correction() is None


def test_a_search_whose_correction_another_process_replaces_or_removes_answers(
    gallery, rng, monkeypatch
):
    user, store, model, vectors = gallery
    queries, rows = clustered(rng, 10, DIM), np.stack(list(vectors.values()))
    newer = fit(rows, clustered(rng, 80, DIM), "nnn")
    fetch, left = type(store).fetch, [newer]

    def replace_and_fetch(self, *args):
        if left:
            apply(user.open(), left.pop(), force=True)
        return fetch(self, *args)

    monkeypatch.setattr(type(store), "fetch", replace_and_fetch)
    assert_ranked(store, vectors, model, queries)  # the old, whole
    assert_ranked(store, vectors, newer, queries)
    remove(user.open())
    assert store.search(queries, 10) == store.search(queries, 10, raw=True)


def test_a_run_that_another_overtakes_stops_in_one_line_and_leaves_nothing(
    gallery, rng
):
    user, store, _, vectors = gallery
    rows, queries = np.stack(list(vectors.values())), clustered(rng, 80, DIM)
    older, newer = (fit(rows, queries, method) for method in ("nnn", "csls"))
    with store.begin(older) as writing:
        batch = next(iter(writing.scan()))
        apply(user.open(), newer, force=True)
        for step in (
            lambda: writing.write(batch, older.offsets(batch.vectors)),
            writing.activate,
        ):
            with refused(StoreError, "another run has begun since"):
                step()
    remove(user.open())
    assert user.left() == []


def test_what_a_search_has_looked_at_does_not_change_under_it(gallery, rng):
    user, store, _, vectors = gallery
    key = next(iter(vectors))
    before = store.get_snapshot()
    offset = before.offsets[key]
    user.put([key], clustered(rng, 1, DIM))
    refresh(user.open())
    assert store.get_snapshot(anew=True).offsets[key] != offset
    assert before.offsets[key] == offset


def test_queries_recorded_in_a_folder_behind_the_url_are_the_bank(
    gallery, rng, tmp_path
):
    _, store, _, _ = gallery
    folder = tmp_path / "queries"
    assert "append ?record=FOLDER to the URL" in store.how_to_record
    recorder = Recorder(folder)
    recorder.add(clustered(rng, 150, DIM))
    recorder.close()
    named = open_store(f"{store.url}?record={folder}")
    apply(named, Bank(), force=True)
    assert len(store.correction().model.terms[0].bank) == 150


def test_what_somebody_else_has_under_our_name_is_kept_and_told(tmp_path, rng):
    for kind, theirs in ((InChroma, "photos--hub"), (InLanceDB, "photos__hubplugin")):
        user = kind(str(tmp_path), Metric.COSINE)
        user.create()
        ids = [user.key(number) for number in range(40)]
        vectors = clustered(rng, 40, DIM)
        user.put(ids, vectors)
        user.create(theirs)
        store = user.open()
        with refused(StoreError, f"{theirs} holds data that are not hubplugin"):
            apply(store, vectors, "is", force=True)
        remove(store)
        assert [row[0] for row in store.search(vectors, 1).ids] == ids
        assert len(user.left()) == 1


def test_a_field_is_read_and_a_misspelt_one_lists_those_there_are(gallery, rng):
    user, store, _, vectors = gallery
    key = next(iter(vectors))
    user.entitle(key, "sea")
    pairs = Bank.from_field(store, "title", "module:embed")
    assert (*pairs.queries, *pairs.answers) == ("sea", key)
    with refused(HubpluginError, r"(has|are) .*title"):
        Bank.from_field(store, "heading", "module:embed")
