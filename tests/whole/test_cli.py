"""The command line as a user types it: what it prints, and one line for what goes wrong."""

import functools
import json
import logging
import shutil
import subprocess
import sys
import warnings
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import faiss
import numpy as np
import pytest
from typer.main import get_command

import hubplugin as package
from hubplugin import __version__
from hubplugin.cli import app, main
from hubplugin.cli.application import as_typed
from hubplugin.errors import Parameter
from tests.galleries import flat_index, unit
from tests.whole.commands import COMMAND, hubplugin, write_photos

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory, real):
    folder = tmp_path_factory.mktemp("cli")
    write_photos(folder, real)
    np.save(folder / "bank.npy", real["bank_queries"])
    return folder


@pytest.fixture
def photos(made, tmp_path):
    return Path(shutil.copy(made / "photos.faiss", tmp_path))


def test_apply_inspect_refresh_and_remove_tell_what_they_did_and_a_dry_run_what_it_would_write(
    made, photos
):
    store, content = f"faiss:{photos}", photos.read_bytes()
    before = faiss.read_index(str(photos)).reconstruct_n(0, 1200)
    applying = (
        "apply",
        store,
        "--bank",
        made / "bank.npy",
        "--method",
        "dbsn",
        "--set",
        "tau=0.06",
    )
    tried = " ".join(hubplugin(*applying, "--dry-run").stdout.split())
    for part in ("2,500 held-out", "dbsn(tau=0.06, iterations=10)", "Nothing was writ"):
        assert part in tried
    assert "of 1,200 targets 1,200 had no offset" in tried
    assert photos.read_bytes() == content
    assert [path.name for path in photos.parent.iterdir()] == [photos.name]
    applied = hubplugin(*applying)
    assert applied.returncode == 0, applied.stderr
    first = applied.stdout.splitlines()[0]
    assert "Applied; on held-out bank queries the worst hub falls from 97 to" in first
    inspected = hubplugin("inspect", store).stdout
    assert "0 targets without an offset" in " ".join(inspected.split())
    refreshed = hubplugin("refresh", store)
    assert "0 had no offset and 0 another one" in refreshed.stdout
    assert "Correction removed" in hubplugin("remove", store).stdout
    raw = hubplugin("inspect", store)
    assert raw.returncode == 4
    assert "No correction" in raw.stdout
    assert f"hubplugin apply {store}" in raw.stdout
    np.testing.assert_array_equal(
        faiss.read_index(str(photos)).reconstruct_n(0, 1200), before
    )


@pytest.mark.parametrize(
    ("command", "parameter", "typed"),
    [
        ("apply", Parameter("method", "blend"), "--method blend"),
        ("apply", Parameter("metric", "dot"), "?metric=dot"),
        ("evaluate", Parameter("metric", "dot"), "--metric dot"),
        ("inspect", Parameter("vector"), "?using=NAME"),
        ("inspect", Parameter("targets"), "targets="),
        ("refit", Parameter("learn", True), "--learn"),
        ("refit", Parameter("learn", False), "--no-learn"),
    ],
)
def test_an_error_names_a_parameter_as_it_is_typed(command, parameter, typed):
    assert as_typed(parameter, get_command(app).commands[command]) == typed


def test_a_warning_is_a_line_of_the_product_without_a_path(made, photos, monkeypatch):
    inspect = package.inspect

    def warns(*arguments, **options):
        warnings.warn("recall fell;\nsearch further", stacklevel=1)
        logging.getLogger("hubplugin.qdrant").warning("no index on %s", "the offsets")
        return inspect(*arguments, **options)

    monkeypatch.setattr(package, "inspect", warns)
    monkeypatch.setattr("sys.argv", ["hubplugin", "inspect", f"faiss:{photos}"])
    monkeypatch.setattr(logging.root, "handlers", [])
    said = StringIO()
    with redirect_stderr(said), pytest.raises(SystemExit):
        main()
    assert said.getvalue() == (
        "hubplugin: warning: recall fell; search further\nhubplugin: warning: no index on the offsets\n"
    )


@pytest.mark.parametrize(
    "command",
    [(COMMAND,), (sys.executable, "-m", "hubplugin")],
    ids=["installed", "python -m"],
)
def test_the_command_says_which_version_it_is(command):
    run = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"hubplugin {__version__}\n"


def filled(words, made, photos):
    paths = {"PHOTOS": str(photos), "BANK": str(made / "bank.npy"), "FOLDER": str(made)}
    return [
        functools.reduce(lambda text, path: text.replace(*path), paths.items(), word)
        for word in words
    ]


MISSING = [
    (("apply", "faiss:PHOTOS", "--bank", "nowhere.npy"), "nowhere.npy"),
    (("inspect", "faiss:nowhere.faiss"), "nowhere.faiss"),
    (
        ("diagnose", "faiss:PHOTOS", "--bank", "BANK", "--answers", "nowhere.npy"),
        "nowhere.npy",
    ),
    (
        ("evaluate", "BANK", "--queries", "BANK", "--truth", "nowhere.json"),
        "nowhere.json",
    ),
]

TYPED = """
import json, sys
from hubplugin.cli import main
for words in json.load(sys.stdin):
    sys.argv = ["hubplugin", *words]
    try:
        main()
    except SystemExit as end:
        print(json.dumps([end.code, "torch" in sys.modules]))
"""


def test_a_missing_file_is_told_before_torch_is_imported(made, photos):
    """All in one interpreter: once one of them imports torch, the rest have it."""
    given = [filled(words, made, photos) for words, _ in MISSING]
    run = subprocess.run(
        [sys.executable, "-c", TYPED],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
    )
    ends, said = run.stdout.splitlines(), run.stderr.splitlines()
    assert len(ends) == len(said) == len(MISSING)
    for (words, missing), end, line in zip(MISSING, ends, said, strict=True):
        assert json.loads(end) == [1, False], words
        assert missing in line


STOPPED = {
    "scan": "nothing was changed",
    "write": "offsets were being written; searches are as before",
    "activate": "searches use the old correction or the new one",
    "remove": "the correction was being taken out",
}
"""What is interrupted, and what is said of it."""


@pytest.mark.parametrize("step", STOPPED)
def test_ctrl_c_says_in_one_line_what_was_changed_and_the_same_command_goes_on(
    step, tmp_path, rng, monkeypatch, capsys
):
    url = flat_index(tmp_path / "photos.faiss", unit(rng.normal(size=(300, 8))))
    np.save(tmp_path / "bank.npy", unit(rng.normal(size=(100, 8))))
    applying = ["apply", url, "--bank", f"{tmp_path}/bank.npy", "--force"]
    typed = ["remove", url] if step == "remove" else applying

    def run(words: list[str]) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            app(words)
        return int(ended.value.code or 0), capsys.readouterr().err

    def stop(*_, **__):
        raise KeyboardInterrupt

    if step == "remove":
        assert run(applying)[0] == 0
    before = (tmp_path / "photos.faiss").read_bytes()
    kind = type(package.open_store(url))
    begin = kind.begin

    def begin_and_stop(*given, **named):
        writing = begin(*given, **named)
        setattr(writing, step, stop)
        return writing

    with monkeypatch.context() as patched:
        if step in ("scan", "remove"):
            patched.setattr(kind, step, stop)
        else:
            patched.setattr(kind, "begin", begin_and_stop)
        status, said = run(typed)
    assert status == 130
    last = said.splitlines()[-1]
    assert last.startswith("hubplugin: stopped; ")
    assert STOPPED[step] in last
    assert "Traceback" not in said
    assert (tmp_path / "photos.faiss").read_bytes() == before
    assert run(typed)[0] == 0
    assert (tmp_path / "photos.faiss").read_bytes() != before


def test_a_password_in_a_url_is_never_printed(made):
    for url in (
        "redis://user:secret@host/x",
        "qdrant://user:secret@127.0.0.1:9/x",
        "qdrant://127.0.0.1:9/x?k=secret",
    ):
        said = hubplugin("apply", url, "--bank", made / "bank.npy")
        assert said.returncode == 1
        assert "secret" not in said.stdout + said.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("apply", "faiss:PHOTOS", "--bank", "BANK", "--set", "tau"),
            "expected NAME=VALUE",
        ),
        (
            ("apply", "faiss:PHOTOS", "--bank", "BANK", "--method", "dualis"),
            "pass --answers",
        ),
        (
            ("apply", "faiss:PHOTOS", "--bank", "BANK", "--set", "method=is"),
            "no parameter of method 'blend'",
        ),
        (("refresh", "faiss:PHOTOS"), "no correction"),
        (("evaluate", "BANK", "--queries", "BANK", "--k", "0"), "--k 0 is not between"),
        (("evaluate", "BANK", "--queries", "BANK", "--method", "dbsn"), "pass --bank"),
        (("diagnose", "faiss:PHOTOS", "--bank", "FOLDER"), "is a folder; expected a"),
        (
            ("diagnose", "faiss:PHOTOS", "--bank", "BANK", "--report", "FOLDER"),
            "it is a folder; expected a file",
        ),
    ],
)
def test_what_goes_wrong_is_one_line_on_stderr_and_changes_nothing(
    arguments, says, made, photos
):
    before = photos.read_bytes()
    result = hubplugin(*filled(arguments, made, photos))
    assert result.returncode == 1
    assert says in result.stderr
    assert result.stderr.startswith("hubplugin: ")
    assert result.stderr.count("\n") == 1
    assert photos.read_bytes() == before
