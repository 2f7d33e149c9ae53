"""A model comes back from its file as it was, or is refused with a reason."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

import hubplugin

METHODS = ["is", "sn", "dbsn", "dualis", "nnn", "csls", "dn"]


@pytest.fixture
def fitted(rng):
    def fit(method, **arguments):
        bank, targets, second = (rng.normal(size=(rows, 6)).astype(np.float32) for rows in (20, 30, 10))
        return hubplugin.fit(bank, method, targets=targets, target_bank=second, **arguments), targets

    return fit


def with_header(content: bytes, change) -> bytes:
    length = struct.unpack("<Q", content[:8])[0]
    outer = json.loads(content[8 : 8 + length])
    header = json.loads(outer["__metadata__"]["hubplugin"])
    change(header)
    outer["__metadata__"]["hubplugin"] = json.dumps(header)
    text = json.dumps(outer).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("method", METHODS)
def test_save_and_load_give_the_same_model(method, metric, fitted, tmp_path):
    model, targets = fitted(method, metric=metric)
    model.save(tmp_path / "m.hub")
    again = hubplugin.load(tmp_path / "m.hub")
    np.testing.assert_array_equal(again.offsets(targets), model.offsets(targets))
    for field in ("method", "parameters", "metric", "bank_fingerprint", "centre", "gallery", "fingerprint"):
        assert getattr(again, field) == getattr(model, field)
    assert [path.name for path in tmp_path.iterdir()] == ["m.hub"]


def test_the_header_names_what_the_file_holds(fitted):
    content = fitted("dbsn")[0].to_bytes()
    seen = {}
    with_header(content, seen.update)
    assert seen["method"] == "dbsn"
    assert seen["parameters"] == {"tau": 0.05, "iterations": 10}
    assert (seen["metric"], seen["dim"], seen["format"]) == ("cosine", 6, 1)
    assert seen["hubplugin"] == hubplugin.__version__
    assert seen["gallery"]["count"] == 30


def refusal(path):
    with pytest.raises(hubplugin.ModelFileError) as caught:
        hubplugin.load(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


def test_a_model_file_of_a_newer_format_is_refused_by_version(fitted, tmp_path):
    path = tmp_path / "m.hub"
    newer = with_header(fitted("is")[0].to_bytes(), lambda h: h.update(format=99, hubplugin="9.9"))
    path.write_bytes(newer)
    assert "format 99, written by hubplugin 9.9" in refusal(path)


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_a_truncated_file_is_refused(cut, fitted, tmp_path):
    path = tmp_path / "m.hub"
    path.write_bytes(fitted("is")[0].to_bytes()[:cut])
    assert "damaged" in refusal(path)


def test_a_flipped_bit_in_the_tensors_is_noticed(fitted, tmp_path):
    content = bytearray(fitted("is")[0].to_bytes())
    content[-3] ^= 4
    (tmp_path / "m.hub").write_bytes(content)
    assert "checksum" in refusal(tmp_path / "m.hub")


def test_a_header_without_its_fields_is_refused(fitted, tmp_path):
    path = tmp_path / "m.hub"
    path.write_bytes(with_header(fitted("is")[0].to_bytes(), lambda h: h.pop("terms")))
    assert "damaged" in refusal(path)


def test_other_files_are_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.ones(3)}, tmp_path / "other.safetensors")
    assert "not a hubplugin model" in refusal(tmp_path / "other.safetensors")
    (tmp_path / "text.hub").write_text("hello, this is no model")
    assert "damaged or not a hubplugin model" in refusal(tmp_path / "text.hub")
    assert "No such file" in refusal(tmp_path / "nowhere.hub")


def test_a_save_that_fails_leaves_the_old_file_whole(fitted, tmp_path, monkeypatch):
    model, _ = fitted("is")
    model.save(tmp_path / "m.hub")
    before = (tmp_path / "m.hub").read_bytes()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(hubplugin.ModelFileError, match="No space left"):
        fitted("nnn")[0].save(tmp_path / "m.hub")
    assert (tmp_path / "m.hub").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.hub"]
