"""Random lives of a gallery in each store: HUBPLUGIN_LIVES says how many."""

import os
import warnings

import pytest

from tests.keepers import KEEPERS
from tests.pgvector.conftest import database as database
from tests.pgvector.conftest import server as server
from tests.whole.lives import Life

LIVES = int(os.environ.get("HUBPLUGIN_LIVES", "2"))
FIRST = int(os.environ.get("HUBPLUGIN_FIRST_LIFE", "0"))
STEPS = 25
SLOW = ("InChroma", "InLanceDB", "InPostgres")


@pytest.fixture
def place(request, kind, tmp_path):
    if kind == "InPostgres":
        return request.getfixturevalue("database").address
    return str(tmp_path)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in KEEPERS
    ],
)
@pytest.mark.parametrize("number", range(FIRST, FIRST + LIVES))
def test_a_life_is_as_its_model_in_float64(kind, number, place):
    keeper = KEEPERS[kind]
    metric = keeper.metrics[number % len(keeper.metrics)]
    life = Life(keeper(place, metric, number), seed=number)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            life.run(STEPS)
    except BaseException:
        print(metric.value, life.told)
        raise
    finally:
        life.keeper.restart()
