"""A model comes back from its file as it was, or is refused with a reason."""

import json
import os
import struct

import numpy as np
import pytest

import hubplugin
from hubplugin import load
from hubplugin.errors import ModelFileError
from hubplugin.model import FORMAT
from tests.galleries import assert_near, each_metric
from tests.refusals import refused

METHODS = ["blend", "is", "sn", "dbsn", "dualis", "nnn", "csls", "dn"]


@pytest.fixture
def fitted(rng):
    bank, targets, second = (rng.normal(size=(rows, 6)) for rows in (20, 30, 10))

    def fit(method, **arguments):
        return hubplugin.fit(targets, hubplugin.Bank(bank, second), method, **arguments)

    fit.targets = targets
    return fit


def with_header(content, change):
    length = struct.unpack("<Q", content[:8])[0]
    outer = json.loads(content[8 : 8 + length])
    header = json.loads(outer["__metadata__"]["hubplugin"])
    change(header)
    outer["__metadata__"]["hubplugin"] = json.dumps(header)
    text = json.dumps(outer).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


@each_metric
@pytest.mark.parametrize("method", METHODS)
def test_save_and_load_give_the_same_model(method, metric, fitted, tmp_path, rng):
    model = fitted(method, metric=metric)
    model.save(tmp_path / "m.hub")
    again = load(tmp_path / "m.hub")
    # The fit has them from its last pass, the file from a new one.
    found, expected = (each.offsets(fitted.targets) for each in (again, model))
    assert_near(found, expected)
    later = 3 * rng.normal(size=(30, 6))
    np.testing.assert_array_equal(again.offsets(later), model.offsets(later))
    for field in (
        "method",
        "parameters",
        "metric",
        "bank_fingerprint",
        "centre",
        "gallery",
        "fingerprint",
    ):
        assert getattr(again, field) == getattr(model, field)
    assert [path.name for path in tmp_path.iterdir()] == ["m.hub"]


def test_the_header_names_what_the_file_holds(fitted):
    seen = {}
    with_header(fitted("dbsn").to_bytes(), seen.update)
    assert seen["method"] == "dbsn"
    assert seen["parameters"] == {"tau": 0.05, "iterations": 10}
    assert (seen["metric"], seen["dim"], seen["format"]) == ("cosine", 6, FORMAT)
    assert seen["hubplugin"] == hubplugin.__version__
    assert seen["gallery"]["count"] == 30


def refusal(path):
    with pytest.raises(ModelFileError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("format", [99, 5])
def test_a_model_file_of_another_format_is_refused_by_version(format, fitted, tmp_path):
    path = tmp_path / "m.hub"
    other = {"format": format, "hubplugin": "9.9\x1b[2J"}
    whole = fitted("is").to_bytes()
    path.write_bytes(with_header(whole, lambda header: header.update(other)))
    said = refusal(path)
    assert f"format {format}, written by hubplugin '9.9" in said
    assert said.isprintable()


def test_texts_that_are_no_model_are_refused_in_one_line():
    for texts in (["%"], ["a"], [], [7]):
        with refused(ModelFileError, r"^photos is damaged"):
            hubplugin.OffsetModel.from_texts(texts, "photos")


def test_a_truncated_file_and_a_header_without_its_fields_are_refused(fitted, tmp_path):
    path = tmp_path / "m.hub"
    whole = fitted("is").to_bytes()
    cut = [whole[:stop] for stop in (0, 5, 40, -1)]
    for content in (*cut, with_header(whole, lambda header: header.pop("terms"))):
        path.write_bytes(content)
        assert "damaged" in refusal(path)


def test_a_flipped_bit_is_noticed_wherever_it_is(fitted, tmp_path):
    model = fitted("dbsn")
    whole = model.to_bytes()
    for place in np.random.default_rng(0).permutation(len(whole))[:400]:
        content = bytearray(whole)
        content[place] ^= 1
        (tmp_path / "m.hub").write_bytes(content)
        try:
            again = load(tmp_path / "m.hub")
        except ModelFileError:
            continue
        # The bit was in what says who wrote the file.
        assert again.fingerprint == model.fingerprint


def test_other_files_are_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.ones(3)}, tmp_path / "other.safetensors")
    assert "not a hubplugin model" in refusal(tmp_path / "other.safetensors")
    (tmp_path / "text.hub").write_text("hello, this is no model")
    assert "damaged or not a hubplugin model" in refusal(tmp_path / "text.hub")
    assert "No such file" in refusal(tmp_path / "nowhere.hub")


def test_a_link_stays_a_link_and_a_folder_is_refused(fitted, tmp_path):
    model = fitted("is")
    (tmp_path / "link.hub").symlink_to("there.hub")
    model.save(tmp_path / "link.hub")
    assert os.readlink(tmp_path / "link.hub") == "there.hub"
    assert load(tmp_path / "there.hub").fingerprint == model.fingerprint
    (tmp_path / "folder").mkdir()
    with refused(ModelFileError, "not a regular file"):
        model.save(tmp_path / "folder")
    assert "Is a directory" in refusal(tmp_path / "folder")
    for name in ("x" * 300, "a\0b"):
        with refused(ModelFileError, "cannot write"):
            model.save(tmp_path / name)
        with refused(ModelFileError, "cannot read"):
            load(tmp_path / name)


def test_a_later_version_of_hubplugin_names_a_model_as_this_one_does(
    fitted, tmp_path, monkeypatch
):
    model = fitted("dbsn")
    model.save(tmp_path / "m.hub")
    monkeypatch.setattr("hubplugin.__version__", "7.0")
    assert load(tmp_path / "m.hub").fingerprint == model.fingerprint
