"""What is found by chance, against draws."""

import numpy as np
import pytest

from hubplugin.measures.hubness import (
    never_found_by_chance,
    share_of_most_found,
    share_of_most_found_by_chance,
)


@pytest.mark.parametrize(
    ("queries", "k", "targets"), [(300, 10, 200), (50, 5, 1_000), (40, 10, 10)]
)
def test_shares_by_chance_are_those_of_random_searches(queries, k, targets, rng):
    most, never = [], []
    for _ in range(60):
        found = np.argsort(rng.random((queries, targets)), axis=1)[:, :k]
        occurrence = np.bincount(found.ravel(), minlength=targets)
        most.append(share_of_most_found(occurrence))
        never.append((occurrence == 0).mean())
    assert share_of_most_found_by_chance(queries, k, targets) == pytest.approx(
        np.mean(most), rel=0.06
    )
    assert never_found_by_chance(queries, k, targets) == pytest.approx(
        np.mean(never), abs=0.01
    )


def test_the_most_found_are_one_in_a_hundred_and_at_least_one():
    occurrence = np.array([0] * 150 + [1] * 48 + [10, 30])
    assert share_of_most_found(occurrence) == 40 / 88
    assert share_of_most_found(np.array([3, 1])) == 3 / 4
