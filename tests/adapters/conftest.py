import pytest


@pytest.fixture(autouse=True)
def few_calibration_queries():
    """All of them, as in use: these stores search quickly."""
