"""The transport plans of DBSN table 6 against what defines them."""

from itertools import permutations

import numpy as np
import pytest
from scipy.optimize import linprog

from hubplugin import InputError
from hubplugin.evaluation.plans import (
    hungarian,
    l2_transport,
    optimal_transport,
    require_solvable,
)


def test_optimal_transport_is_the_linear_programme_over_plans(rng):
    s = rng.normal(size=(4, 6))
    rows = np.kron(np.eye(4), np.ones(6))
    columns = np.kron(np.ones(4), np.eye(6))
    marginals = np.concatenate([np.full(4, 1 / 4), np.full(6, 1 / 6)])
    best = linprog(-s.ravel(), A_eq=np.concatenate([rows, columns]), b_eq=marginals)
    plan = optimal_transport(s)
    assert (plan * s).sum() == pytest.approx(-best.fun)
    np.testing.assert_allclose(plan.sum(axis=1), 1 / 4)
    np.testing.assert_allclose(plan.sum(axis=0), 1 / 6)


def test_l2_transport_keeps_its_marginals_and_is_denser_than_optimal_transport(rng):
    s = rng.normal(size=(40, 40))
    plan = l2_transport(s)
    np.testing.assert_allclose(plan.sum(axis=1), 1 / 40, rtol=0.02)
    np.testing.assert_allclose(plan.sum(axis=0), 1 / 40, rtol=0.02)
    assert (plan > 1e-9).sum() > (optimal_transport(s) > 1e-9).sum()
    assert (plan > 1e-9).mean() < 0.5


def test_where_all_similarities_are_equal_the_plan_is_even():
    np.testing.assert_allclose(l2_transport(np.full((4, 5), 0.3)), 1 / 20)


def test_the_hungarian_plan_is_the_best_of_all_assignments(rng):
    s = rng.normal(size=(5, 5))
    best = max(permutations(range(5)), key=lambda columns: s[range(5), columns].sum())
    assert hungarian(s).argmax(axis=1).tolist() == list(best)
    surplus = hungarian(rng.normal(size=(7, 3)))
    assert sorted(surplus.sum(axis=1)) == [0] * 4 + [1] * 3


def test_a_plan_out_of_reach_is_refused_before_it_is_begun():
    with pytest.raises(InputError, match=r"otn.*100000 x 1000000"):
        require_solvable("otn", 100_000, 1_000_000)
