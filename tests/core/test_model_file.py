"""A model comes back from its file as it was, or is refused with a reason."""

import json
import os
import struct
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load, save

import hubplugin
from hubplugin.model import FORMAT, QueryMap
from hubplugin.model.file import digest

METHODS = ["blend", "is", "sn", "dbsn", "dualis", "nnn", "csls", "dn"]


@pytest.fixture
def fitted(rng):
    def fit(method, **arguments):
        bank, targets, second = (
            rng.normal(size=(rows, 6)).astype(np.float32) for rows in (20, 30, 10)
        )
        return hubplugin.fit(
            targets, hubplugin.Bank(bank, second), method, **arguments
        ), targets

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
def test_save_and_load_give_the_same_model(method, metric, fitted, tmp_path, rng):
    model, targets = fitted(method, metric=metric)
    model.save(tmp_path / "m.hub")
    again = hubplugin.load(tmp_path / "m.hub")
    # The fit has them from its last pass, the file from a new one.
    np.testing.assert_allclose(
        again.offsets(targets), model.offsets(targets), rtol=0, atol=1e-5
    )
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
    content = fitted("dbsn")[0].to_bytes()
    seen = {}
    with_header(content, seen.update)
    assert seen["method"] == "dbsn"
    assert seen["parameters"] == {"tau": 0.05, "iterations": 10}
    assert (seen["metric"], seen["dim"], seen["format"]) == ("cosine", 6, FORMAT)
    assert seen["hubplugin"] == hubplugin.__version__
    assert seen["gallery"]["count"] == 30


def refusal(path):
    with pytest.raises(hubplugin.errors.ModelFileError) as caught:
        hubplugin.load(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("format", "mend"), [(99, "upgrade hubplugin"), (5, "fit it again")]
)
def test_a_model_file_of_another_format_is_refused_by_version(
    format, mend, fitted, tmp_path
):
    path = tmp_path / "m.hub"
    path.write_bytes(
        with_header(
            fitted("is")[0].to_bytes(),
            lambda h: h.update(format=format, hubplugin="9.9"),
        )
    )
    said = refusal(path)
    assert f"format {format}, written by hubplugin 9.9" in said
    assert mend in said


@pytest.mark.parametrize(
    "text", ["9.9\n\x1b[2J\x1b[31mall is well", "\x9b31m", "\u202egnp"]
)
@pytest.mark.parametrize(
    "put",
    [
        lambda text: {"format": 99, "hubplugin": text},
        lambda text: {"method": text},
        lambda text: {"parameters": {text: 1}},
        lambda text: {"parameters": {"tau": [text]}},
        lambda text: {"bank_fingerprint": text},
        lambda text: {"key": text, "values": []},
    ],
)
def test_no_text_of_a_file_reaches_the_terminal_with_control_characters(
    text, put, fitted, tmp_path
):
    path = tmp_path / "m.hub"
    header = {}
    content = with_header(
        fitted("is")[0].to_bytes(), lambda h: (h.update(put(text)), header.update(h))
    )
    tensors = load(content)
    del header["hubplugin"], header["sha256"]
    path.write_bytes(
        with_header(content, lambda h: h.update(sha256=digest(header, tensors)))
    )
    said = refusal(path)
    assert said.isprintable()
    assert "its header holds control characters" in said


def sealed(content: bytes, change) -> bytes:
    """The file with what `change` makes of its header and tensors, and the checksum of that."""
    header, tensors = (
        {},
        {name: tensor.copy() for name, tensor in load(content).items()},
    )
    with_header(content, header.update)
    made = {"hubplugin": header.pop("hubplugin")}
    del header["sha256"]
    change(header, tensors)
    return save(
        tensors,
        {"hubplugin": json.dumps(header | made | {"sha256": digest(header, tensors)})},
    )


def of_term(**changes):
    return lambda header, _: header["terms"][0].update(changes)


def of_tensor(name, change):
    return lambda _, tensors: tensors.update(
        {name: np.ascontiguousarray(change(tensors[name]))}
    )


HOSTILE = {
    "bank of 1 dimension": ("is", of_tensor("0.bank", np.ravel)),
    "bank of none": ("is", of_tensor("0.bank", lambda bank: bank[:0])),
    "bank of another size": ("is", of_tensor("0.bank", lambda bank: bank[:, :-1])),
    "bank of whole numbers": (
        "is",
        of_tensor("0.bank", lambda bank: bank.astype(np.int32)),
    ),
    "bank with NaN": ("nnn", of_tensor("0.bank", lambda bank: bank * np.nan)),
    "bank of zeros": ("csls", of_tensor("0.bank", np.zeros_like)),
    "mean of several rows": (
        "dn",
        of_tensor("0.bank", lambda bank: np.repeat(bank, 2, 0)),
    ),
    "weights of another size": (
        "dbsn",
        of_tensor("0.log_weights", lambda weights: weights[:-1]),
    ),
    "tau of 0": ("is", of_term(tau=0)),
    "tau below 0": ("is", of_term(tau=-0.1)),
    "tau of no number": ("is", of_term(tau=True)),
    "scale without end": ("is", of_term(scale=float("inf"))),
    "scale beyond float32": ("is", of_term(scale=10**400)),
    "k below 0": ("nnn", of_term(k=-3)),
    "k of parts": ("nnn", of_term(k=1.5)),
    "no terms": (
        "is",
        lambda header, tensors: (header.update(terms=[]), tensors.clear()),
    ),
    "another dim": ("is", lambda header, _: header.update(dim=7)),
    "centre of NaN": ("is", lambda header, _: header.update(centre=float("nan"))),
    "gallery of none": ("is", lambda header, _: header["gallery"].update(count=0)),
    "offsets the wrong way round": (
        "is",
        lambda header, _: header["gallery"].update(smallest=9.0),
    ),
    "parameter of a list": (
        "is",
        lambda header, _: header["parameters"].update(tau=[1]),
    ),
    "parameter of NaN": (
        "is",
        lambda header, _: header["parameters"].update(tau=float("nan")),
    ),
    "map of another size": (
        "map",
        of_tensor("query_map.step", lambda step: step[:-1, :-1]),
    ),
    "map that is not square": (
        "map",
        of_tensor("query_map.step", lambda step: step[:-1]),
    ),
    "map with NaN": ("map", of_tensor("query_map.step", lambda step: step * np.nan)),
    "map of no pairs": ("map", lambda header, _: header["query_map"].update(pairs=-1)),
    "activation of another size": (
        "activation",
        of_tensor("activation.0", lambda levels: levels[1:]),
    ),
}
"""What no fit writes, under a checksum that is right."""


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_no_fit_writes_is_refused_when_it_is_read_though_its_checksum_is_right(
    what, fitted, tmp_path
):
    kind, change = HOSTILE[what]
    model, targets = fitted(kind if kind in METHODS else "is")
    if kind == "map":
        model = replace(
            model, query_map=QueryMap(np.eye(6, dtype=np.float32) / 10, 0.5, 10)
        )
    if kind == "activation":
        model = model.with_activation(targets)
    path = tmp_path / "m.hub"
    path.write_bytes(sealed(model.to_bytes(), lambda *_: None))
    assert hubplugin.load(path).fingerprint == model.fingerprint
    path.write_bytes(sealed(model.to_bytes(), change))
    assert "is damaged" in refusal(path)


def test_texts_that_are_no_model_are_refused_in_one_line():
    for texts in (["%"], ["a"], [], [7]):
        with pytest.raises(
            hubplugin.errors.ModelFileError, match=r"^photos is damaged"
        ):
            hubplugin.OffsetModel.from_texts(texts, "photos")


def test_what_a_file_says_its_tensors_are_reaches_the_terminal_escaped(tmp_path):
    text = json.dumps(
        {"x": {"dtype": "\x1b[31m\n", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    (tmp_path / "m.hub").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    assert refusal(tmp_path / "m.hub").isprintable()


def test_a_truncated_file_and_a_header_without_its_fields_are_refused(fitted, tmp_path):
    path, whole = tmp_path / "m.hub", fitted("is")[0].to_bytes()
    for content in (
        *(whole[:cut] for cut in (0, 5, 40, -1)),
        with_header(whole, lambda header: header.pop("terms")),
    ):
        path.write_bytes(content)
        assert "damaged" in refusal(path)


def test_a_flipped_bit_is_noticed_wherever_it_is(fitted, tmp_path):
    model, _ = fitted("dbsn")
    whole = model.to_bytes()
    for place in np.random.default_rng(0).permutation(len(whole))[:400]:
        content = bytearray(whole)
        content[place] ^= 1
        (tmp_path / "m.hub").write_bytes(content)
        try:
            again = hubplugin.load(tmp_path / "m.hub")
        except hubplugin.errors.ModelFileError:
            continue
        assert (
            again.fingerprint == model.fingerprint
        )  # the bit was in what says who wrote the file


def test_other_files_are_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.ones(3)}, tmp_path / "other.safetensors")
    assert "not a hubplugin model" in refusal(tmp_path / "other.safetensors")
    (tmp_path / "text.hub").write_text("hello, this is no model")
    assert "damaged or not a hubplugin model" in refusal(tmp_path / "text.hub")
    assert "No such file" in refusal(tmp_path / "nowhere.hub")


def test_a_link_stays_a_link_and_a_folder_is_refused(fitted, tmp_path):
    model, _ = fitted("is")
    (tmp_path / "link.hub").symlink_to("there.hub")
    model.save(tmp_path / "link.hub")
    assert os.readlink(tmp_path / "link.hub") == "there.hub"
    assert hubplugin.load(tmp_path / "there.hub").fingerprint == model.fingerprint
    (tmp_path / "folder").mkdir()
    with pytest.raises(hubplugin.errors.ModelFileError, match="Is a directory"):
        model.save(tmp_path / "folder")
    assert "Is a directory" in refusal(tmp_path / "folder")
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(hubplugin.errors.ModelFileError, match="cannot write"):
            model.save(tmp_path / name)
        with pytest.raises(hubplugin.errors.ModelFileError, match="cannot read"):
            hubplugin.load(tmp_path / name)


def test_a_later_version_of_hubplugin_names_a_model_as_this_one_does(
    fitted, tmp_path, monkeypatch
):
    model, _ = fitted("dbsn")
    model.save(tmp_path / "m.hub")
    monkeypatch.setattr("hubplugin.__version__", "7.0")
    assert hubplugin.load(tmp_path / "m.hub").fingerprint == model.fingerprint
