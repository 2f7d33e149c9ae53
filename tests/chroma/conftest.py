import pytest


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from benchmarks import candidates  # it takes seconds to import

    with candidates.server(tmp_path_factory.mktemp("chroma")) as place:
        yield place
