"""Transport plans between all queries and all targets: DBSN table 6.

They serve for comparison only, since a search does not know its queries beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np

from hubplugin.errors import InputError, install

LARGEST_PLAN = 25_000_000
"""The most pairs in a plan: each matrix takes 200 MB, and a solver holds several.

Each plan takes less than a minute on one core."""


def optimal_transport(similarities: np.ndarray) -> np.ndarray:
    """Return `otn`: argmax <S, P> over the plans P, DBSN eq. 4 under eq. 7: [q, n]."""
    import ot

    queries, targets = similarities.shape
    plan: np.ndarray = ot.emd(
        ot.unif(queries), ot.unif(targets), -similarities, numItermax=10_000_000
    )
    return plan


def l2_transport(similarities: np.ndarray) -> np.ndarray:
    """Return `l2n`: argmax <S, P> - c/2 |P|_F^2, DBSN eq. 5 under eq. 7: [q, n].

    The paper asks for "an appropriate coefficient" c. Here, c = std of S / max(1/q,
    1/n): relative to the entries of an even plan, so that the plan gives each query a
    few targets at any size.
    """
    import ot

    queries, targets = similarities.shape
    if np.ptp(similarities) <= 1e-6 * np.abs(similarities).max():
        # All similarities are equal, so every plan is optimal.
        return np.full_like(similarities, 1 / similarities.size)
    coefficient = float(similarities.std()) * min(queries, targets)
    plan: np.ndarray = ot.smooth.smooth_ot_dual(
        ot.unif(queries),
        ot.unif(targets),
        -similarities,
        coefficient,
        reg_type="l2",
        numItermax=2000,
    )
    return plan


def hungarian(similarities: np.ndarray) -> np.ndarray:
    """Return `hn`: 1 where the best assignment matches query and target, else 0: [q, n].

    The best assignment has the largest total similarity. Each target serves at most one
    query; if there are more queries than targets, some queries match nothing.
    """
    from scipy.optimize import linear_sum_assignment

    plan = np.zeros_like(similarities)
    plan[linear_sum_assignment(similarities, maximize=True)] = 1
    return plan


PLANS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "otn": optimal_transport,
    "l2n": l2_transport,
    "hn": hungarian,
}


def require_solvable(method: str, queries: int, targets: int) -> None:
    """Raise InputError if the plan called `method` cannot be solved.

    Either the solver is not installed, or there are too many pairs.
    """
    module, package = ("scipy", "scipy") if method == "hn" else ("ot", "POT")
    if find_spec(module) is None:
        raise InputError(f"method {method!r} needs {package}; {install('evaluation')}")
    if queries * targets > LARGEST_PLAN:
        raise InputError(
            f"method {method!r} solves one transport problem over all {queries} x "
            f"{targets} pairs; at most {LARGEST_PLAN:,} are accepted: leave it out, or "
            "evaluate on a sample"
        )
