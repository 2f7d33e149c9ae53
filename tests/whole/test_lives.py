"""Random lives of a gallery in each store: HUBPLUGIN_LIVES says how many."""

import os

import pytest

from tests.keepers import KEEPERS
from tests.pgvector.conftest import database as database
from tests.pgvector.conftest import server as server
from tests.whole.lives import STEPS, Life

LIVES = int(os.environ.get("HUBPLUGIN_LIVES", "2"))
FIRST = int(os.environ.get("HUBPLUGIN_FIRST_LIFE", "0"))
SLOW = ("InChroma", "InLanceDB", "InPostgres")


@pytest.fixture
def place(request, kind, tmp_path):
    if kind == "InPostgres":
        return request.getfixturevalue("database").address
    return str(tmp_path)


EACH_KIND = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in KEEPERS
    ],
)


@pytest.fixture
def begin(kind, place):
    """Return the life of a seed, whose steps are shown where it fails."""
    lives = []

    def begin(number):
        keeper = KEEPERS[kind]
        metric = keeper.metrics[number % len(keeper.metrics)]
        lives.append(Life(keeper(place, metric, number), seed=number))
        return lives[-1]

    yield begin
    for life in lives:
        print(life.metric.value, life.told)
        life.keeper.restart()


@EACH_KIND
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(FIRST, FIRST + LIVES))
def test_a_life_is_as_its_model_in_float64(number, begin):
    life = begin(number)
    life.run(life.rng.choice(STEPS, 25).tolist())


MIXED = (
    *("apply", "put_by_hubplugin", "put", "delete", "cut_off", "refresh"),
    *("come_back", "apply", "put_by_hubplugin", "rollback"),
)
"""Steps of which the first model maps queries; another is half-written at a refresh."""


@EACH_KIND
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_life_of_each_kind_of_write_is_as_its_model(number, begin):
    begin(number).run(MIXED)
