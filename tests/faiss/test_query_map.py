"""A query map lies before an upgraded index, in plain Faiss: searches map their queries, and what is added stays."""

import faiss
import numpy as np
import pytest

import hubplugin
import hubplugin_faiss
from hubplugin import InputError, StoreError
from hubplugin_faiss import downgrade, upgrade
from tests.faiss.cases import (
    ALL,
    FEW,
    IP,
    both,
    bytes_of,
    draw,
    grow,
    made,
    reread,
    slow_but,
    written,
)
from tests.galleries import assert_near, with_map
from tests.refusals import refused

D, K = 24, 10
pytestmark = pytest.mark.filterwarnings("ignore:recall@10")  # of random banks


def model_of(vectors, rng):
    """A model with a map that is far from a rotation."""
    (bank,) = draw(rng, 200, d=D)
    step = (0.4 * rng.normal(size=(D, D))).astype(np.float32)
    model = hubplugin.fit(vectors, bank, "csls", answers="kept")
    return with_map(model, step).centre_on(vectors)


def test_what_a_plain_add_puts_through_the_map_is_named_by_inspect_and_comes_last(
    rng, tmp_path
):
    case = made("Flat", IP, n=300)
    file = written(tmp_path / "x.faiss", case.index)
    store = hubplugin.open_store(f"faiss:{file}")
    applied = hubplugin.apply(store, model_of(case.vectors, rng))
    assert any("a query map comes before the index" in note for note in applied.notes)
    grow(file, case.queries[:5])
    store = hubplugin.open_store(f"faiss:{file}")
    seen = hubplugin.inspect(store, queries=0).invalid_vectors
    assert sorted(seen.named) == [300, 301, 302, 303, 304]
    hubplugin.refresh(store)
    (batch,) = store.scan()
    smallest = applied.model.gallery.smallest
    assert_near(batch.offsets[300:], smallest)


def test_a_map_within_another_index_is_refused(rng):
    case = made("Flat", IP, n=300)
    upgraded = upgrade(case.index, model_of(case.vectors, rng))
    says = "a query map inside this IndexPreTransform would be lost"
    with refused(StoreError, says):
        downgrade(faiss.IndexPreTransform(upgraded))


@pytest.mark.parametrize("way", ["upgrade", "CorrectedSearch"])
def test_an_index_that_normalises_queries_refuses_a_map(way, rng):
    case = made("L2norm,Flat", IP, n=300)
    given = {"targets": case.vectors} if way == "CorrectedSearch" else {}
    says = "has a query map .*, which an index that normalises queries"
    with refused(InputError, says):
        getattr(hubplugin_faiss, way)(case.index, model_of(case.vectors, rng), **given)


@both
@pytest.mark.parametrize(
    "kind", slow_but(FEW, [kind for kind in ALL if "L2norm" not in kind])
)
def test_the_map_stands_before_an_index_of_any_type(kind, metric, rng):
    """What lies behind is an upgraded index like any other, which is tested by itself."""
    case = made(kind, metric)
    model = model_of(case.vectors, rng)
    upgraded = upgrade(case.index, model, force=True)
    upgraded = reread(upgraded)
    scores, found = upgraded.search(case.queries, K)
    behind = faiss.downcast_index(upgraded.index)
    wanted, as_found = behind.search(model.queries(case.queries), K)
    assert_near(scores, wanted, 0.1 if "fs" in kind else 1e-4)
    assert (found == as_found).mean() > (0.9 if "fs" in kind else 0.99)
    assert bytes_of(downgrade(upgraded)) == bytes_of(case.index)
