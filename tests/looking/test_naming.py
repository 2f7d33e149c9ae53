"""What targets are called, by files."""

import json

import pytest

from hubplugin import InputError
from hubplugin.jobs.naming import read_names


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("names.txt", "sea\nhill\n"),
        ("names.json", '["sea", "hill"]'),
        ("ids.json", '{"0": "sea", "1": "hill"}'),
    ],
)
def test_targets_are_called_by_a_file(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    assert read_names(str(tmp_path / file))([1, 0, 2]) == ["hill", "sea", None]


def test_what_cannot_name_anything_is_told_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"--names: there is no file 'payload\.title'"):
        read_names("payload.title", "--names")
    (tmp_path / "number.json").write_text(json.dumps(3))
    with pytest.raises(InputError, match="holds int; expected a list, or texts by id"):
        read_names(str(tmp_path / "number.json"))
    assert read_names(None) is None
