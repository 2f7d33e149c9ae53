import pytest


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from benchmarks import candidates  # it takes seconds to import

    with candidates.server(tmp_path_factory.mktemp("chroma")) as place:
        yield place


@pytest.fixture(autouse=True)
def few_calibration_queries():
    """All of them, as in use: this store searches quickly."""
