from importlib import import_module

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:Payload indexes have no effect in the local Qdrant"
    ),
]


@pytest.mark.parametrize("framework", ["haystack", "langchain", "llamaindex"])
def test_the_example_finds_more_when_corrected(framework, functions, capsys):
    import_module(f"with_{framework}").main([])
    printed = capsys.readouterr().out.splitlines()
    raw, corrected, *_ = (
        int(line.split()[1])
        for line in printed
        if line.endswith("first answers are right")
    )
    assert corrected > raw
