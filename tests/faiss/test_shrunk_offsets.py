"""The first stage of a refined index: its share of the offsets."""

import faiss
import numpy as np
import pytest

import hubplugin
from hubplugin_faiss import add, upgrade
from tests.faiss import cases
from tests.faiss.cases import L2, best, both, decoded, draw, filled, stored


def first_stage(index):
    """What `index` owns, which must live as long."""
    return faiss.downcast_index(faiss.downcast_index(index).base_index)


def slope_of(raw, vectors):
    """That of what the codes of the first stage decode to on `vectors`, in float64."""
    coded = first_stage(raw).reconstruct_n(0, len(vectors)).astype(np.float64)
    true, coded = (
        vectors - vectors.mean(axis=0, dtype=np.float64),
        coded - coded.mean(axis=0),
    )
    return (true * coded).sum() / (true * true).sum()


def lengths(vectors):
    return np.linalg.norm(vectors.astype(np.float64), axis=1)


@both
def test_newcomers_have_the_share_of_offsets_of_those_that_were_there(metric):
    rng = np.random.default_rng(0)
    vectors, bank = draw(rng, 600, 80, d=32, at=1.5)
    raw = faiss.index_factory(32, "PQ4np,RFlat", metric)
    raw.train(vectors)
    raw.add(vectors[:500])
    model = hubplugin.fit(vectors[:500], bank)
    share = slope_of(raw, vectors[:500]) ** 2
    assert 0.1 < share < 0.8

    index = upgrade(raw, model, force=True)
    add(index, vectors[500:], model)
    coded, found = decoded(first_stage(index)), stored(first_stage(index))
    found -= lengths(coded) ** 2 / 2 if metric == L2 else 0
    for part in (slice(0, 500), slice(500, 600)):
        columns = [
            model.offsets(vectors[part]),
            lengths(coded[part]),
            np.ones(len(found[part])),
        ]
        (slope, nearness, _), *_ = np.linalg.lstsq(
            np.stack(columns, axis=1), found[part], rcond=None
        )
        assert slope == pytest.approx(share, rel=0.1)
        assert (
            -1 < nearness < -0.3
        )  # of two targets in one direction the longer one would score higher by that


@pytest.mark.parametrize("kind", ["PQ48x4fs,RFlat", "IVF8,PQ48x4fs,RFlat"])
def test_a_first_stage_by_l2_finds_vectors_of_unlike_lengths_as_before(kind, real):
    """What codes shrink they shrink of squares, too: else long vectors sink by what is lost of theirs."""
    rng, vectors = np.random.default_rng(0), real["bank_targets"].astype(np.float32)
    vectors *= rng.uniform(0.7, 1.3, (len(vectors), 1)).astype(np.float32)
    queries = real["test_queries"][:300].astype(np.float32)
    offsets = 0.02 * rng.normal(size=len(vectors))
    index = filled(kind, vectors, L2)
    scores = queries @ vectors.T - (vectors**2).sum(axis=1) / 2

    def recall(index, scores):
        faiss.ParameterSpace().set_index_parameter(index, "k_factor_rf", 2)
        return cases.recall(index.search(queries, 10)[1], best(scores))

    raw = recall(index, scores)
    upgraded = upgrade(index, offsets.astype(np.float32))
    assert recall(upgraded, scores + offsets) > raw - 0.02
