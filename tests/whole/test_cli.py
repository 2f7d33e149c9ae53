"""The command line as a user types it: what it prints, and one line for what goes wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest
from typer.main import get_command

from hubplugin import __version__
from hubplugin.cli import app, as_typed

COMMAND = Path(sys.executable).with_name("hubplugin")


def hubplugin(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory, real):
    folder = tmp_path_factory.mktemp("cli")
    targets = real["test_targets"].astype(np.float32)
    faiss.normalize_L2(targets)
    index = faiss.IndexFlatIP(384)
    index.add(targets)
    faiss.write_index(index, str(folder / "photos.faiss"))
    np.save(folder / "bank.npy", real["bank_queries"])
    return folder


@pytest.fixture
def photos(made, tmp_path):
    return Path(shutil.copy(made / "photos.faiss", tmp_path))


def test_apply_inspect_refresh_and_remove_tell_what_they_did(made, photos):
    store = f"faiss:{photos}"
    before = faiss.read_index(str(photos)).reconstruct_n(0, 1200)
    applied = hubplugin("apply", store, "--queries", made / "bank.npy", "--method", "dbsn", "--set", "tau=0.06")
    assert applied.returncode == 0, applied.stderr
    assert "1200 targets" in applied.stdout
    assert "dbsn(tau=0.06, iterations=10)" in applied.stdout
    assert "active" in hubplugin("inspect", store).stdout
    refreshed = hubplugin("refresh", store)
    assert "0 had no offset and 0 another one" in refreshed.stdout
    assert "correction removed" in hubplugin("remove", store).stdout
    assert "no correction" in hubplugin("inspect", store).stdout
    np.testing.assert_array_equal(faiss.read_index(str(photos)).reconstruct_n(0, 1200), before)


def test_a_dry_run_says_what_it_would_write_and_writes_nothing(made, photos):
    before = photos.read_bytes()
    tried = hubplugin(
        "apply", f"faiss:{photos}", "--queries", made / "bank.npy", "--method", "dbsn", "--dry-run", "--force"
    )
    assert "1200 targets, of which 1200 had no offset" in tried.stdout
    assert "nothing was written" in tried.stdout
    assert photos.read_bytes() == before
    assert [path.name for path in photos.parent.iterdir()] == [photos.name]


@pytest.mark.parametrize(
    ("command", "error", "typed"),
    [
        (
            "apply",
            "or force=True (--force) applies it; method='auto' may help",
            "or --force applies it; --method auto may help",
        ),
        ("apply", "remove it or use metric='dot'", "remove it or use ?metric=dot"),
        ("evaluate", "remove it or use metric='dot'", "remove it or use --metric dot"),
        ("evaluate", "do not pair up: pass truth=", "do not pair up: pass --truth"),
        ("evaluate", "pass query_names=, what it calls them", "pass --query-names, what it calls them"),
        ("evaluate", "seed=-1: expected 0 or more", "seed=-1: expected 0 or more"),
        (
            "inspect",
            "name one of its vectors with using=; there are",
            "name one of its vectors with ?using=NAME; there are",
        ),
        ("inspect", "give it an alias=... to go by", "give it an ?alias=NAME to go by"),
    ],
)
def test_an_error_names_a_parameter_as_it_is_typed(command, error, typed):
    assert as_typed(error, get_command(app).commands[command]) == typed


def test_it_says_which_version_it_is():
    assert hubplugin("--version").stdout == f"hubplugin {__version__}\n"


def test_a_password_in_a_url_is_never_printed(made):
    for url in ("redis://user:secret@host/x", "qdrant://user:secret@127.0.0.1:9/x", "qdrant://127.0.0.1:9/x?k=secret"):
        said = hubplugin("apply", url, "--queries", made / "bank.npy")
        assert said.returncode == 1
        assert "secret" not in said.stdout + said.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("inspect", "qdrant://127.0.0.1:9/photos"), "no answer"),
        (("inspect", "redis:photos"), "no store URL that an installed adapter knows; known: faiss:..., "),
        (("inspect", "faiss:nowhere.faiss"), "nowhere.faiss"),
        (("apply", "faiss:PHOTOS", "--queries", "nowhere.npy"), "there is no file 'nowhere.npy'"),
        (("apply", "faiss:PHOTOS", "--queries", "BANK", "--method", "magic"), "unknown method 'magic'"),
        (("apply", "faiss:PHOTOS", "--queries", "BANK", "--set", "tau"), "expected NAME=VALUE"),
        (("apply", "faiss:PHOTOS", "--queries", "BANK", "--method", "is", "--set", "tau=-1"), "greater than 0"),
        (("apply", "PHOTOS", "--queries", "BANK"), "a store is named by a URL: faiss:"),
        (("apply", "faiss:PHOTOS", "--queries", "BANK", "--method", "dualis"), "pass --target-bank"),
        (("refresh", "faiss:PHOTOS"), "no correction"),
        (("apply", "faiss:PHOTOS", "--queries", "BANK", "--method", "is", "--set", "store=x"), "no parameter 'store'"),
        (("apply", "faiss:PHOTOS", "--queries", "BANK", "--set", "method=is"), "method 'auto' takes no parameters"),
        (("evaluate", "--queries", "BANK", "--targets", "BANK", "--seed", "-1"), "seed=-1: expected 0 or more"),
        (("evaluate", "--queries", "BANK", "--targets", "BANK", "--method", ""), "unknown method ''"),
        (("evaluate", "--queries", "BANK", "--targets", "BANK", "--method", "auto"), "pass --query-bank"),
        (("evaluate", "--queries", "BANK", "--targets", "BANK", "--report", "no/where.html"), "cannot write"),
        (("demo", "--folder", "PHOTOS"), "cannot be made"),
    ],
)
def test_what_goes_wrong_is_one_line_on_stderr_and_changes_nothing(arguments, says, made, photos):
    before = photos.read_bytes()
    given = [str(part).replace("PHOTOS", str(photos)).replace("BANK", str(made / "bank.npy")) for part in arguments]
    result = hubplugin(*given)
    assert result.returncode == 1
    assert says in result.stderr
    assert result.stderr.startswith("hubplugin: ")
    assert result.stderr.count("\n") == 1
    assert photos.read_bytes() == before
