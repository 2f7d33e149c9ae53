"""A file is replaced whole or not at all, wherever one is replaced."""

import os

import numpy as np
import pytest

import hubplugin
from hubplugin import HubpluginError, atomic
from hubplugin.results import write_file
from tests.galleries import normal
from tests.refusals import refused


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def save_model(path, size):
    gallery = normal(np.random.default_rng(0), size // 100, 64)
    hubplugin.fit(gallery, gallery, "is").save(path)


def write_report(path, size):
    write_file(path, b"x" * size)


@pytest.mark.parametrize("write", [save_model, write_report])
@pytest.mark.parametrize("name", ["file", "link"])
def test_a_disk_that_is_full_leaves_the_file_before_and_no_other(
    write, name, tmp_path, full_disk
):
    (tmp_path / "file").write_bytes(b"before")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    full = f"cannot write [a-z ]*'.*/{name}': File too large$"
    with full_disk(), refused(HubpluginError, full):
        write(tmp_path / name, 100_000)
    assert files(tmp_path) == {"file": b"before", "link": b"before"}
    write(tmp_path / name, 1_000)
    after = files(tmp_path)
    assert after.keys() == {"file", "link"}
    assert after["file"] == after["link"] != b"before"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_is_raised_while_it_is_written_is_raised_and_leaves_nothing(
    error, tmp_path
):
    (tmp_path / "file").write_bytes(b"before")

    def fails():
        with atomic.replacing(tmp_path / "file") as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fails()
    assert files(tmp_path) == {"file": b"before"}


def test_nothing_that_lies_at_the_temporary_name_is_written_to(tmp_path, monkeypatch):
    (tmp_path / "victim").write_bytes(b"precious")
    monkeypatch.setattr("uuid.uuid4", lambda: type("", (), {"hex": "0" * 32}))
    (tmp_path / "file.00000000.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        atomic.write(tmp_path / "file", b"content")
    assert files(tmp_path) == {"victim": b"precious", "file.00000000.tmp": b"precious"}


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    atomic.write(tmp_path / "file", b"content")
    assert files(tmp_path) == {"victim": b"precious", "file": b"content"}


@pytest.mark.parametrize(
    "use", [atomic.open_own, hubplugin.load, lambda path: atomic.write(path, b"")]
)
def test_a_pipe_is_neither_waited_for_nor_replaced(tmp_path, use):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((OSError, HubpluginError), match="it is not a regular file"):
        use(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("flags", [0, os.O_RDWR | os.O_CREAT])
def test_no_link_is_opened_as_a_file_of_our_own(tmp_path, flags):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="it is a link"):
        atomic.open_own(tmp_path / "link", flags)
    assert not (tmp_path / "nowhere").exists()


def test_the_mode_is_the_one_that_was_asked_for_less_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        atomic.write(tmp_path / "file", b"")
        with atomic.replacing(tmp_path / "secret", mode=0o600):
            pass
    finally:
        os.umask(before)
    for name, mode in (("file", 0o640), ("secret", 0o600)):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode
