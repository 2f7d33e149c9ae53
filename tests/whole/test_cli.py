"""The command line as a user types it: what it prints, and one line for what goes wrong."""

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from qdrant_client import QdrantClient
from typer.main import get_command

import hubplugin
import hubplugin_qdrant
from hubplugin import __version__
from hubplugin.cli import app
from hubplugin.cli.application import as_typed
from hubplugin.errors import Parameter
from pages.json_output import FIGURES, schema_of
from tests.commands import STORE, asked, complains, run, typed, unwrapped
from tests.galleries import collection, flat_index

pytestmark = pytest.mark.slow

APPLY = ("apply", STORE, "--bank", "bank.npy")


def test_apply_inspect_refresh_and_remove_tell_what_they_did_and_a_dry_run_what_it_would_write(
    here,
):
    before = Path("photos.faiss").read_bytes()
    applying = (*APPLY, "--method", "dbsn", "--set", "tau=0.06")
    tried = unwrapped(typed(*applying, "--dry-run"))
    for part in ("2,500 held-out", "dbsn(tau=0.06, iterations=10)", "Nothing was writ"):
        assert part in tried
    assert "1,200 of 1,200 targets had no offset" in tried
    assert Path("photos.faiss").read_bytes() == before
    assert sorted(os.listdir()) == ["bank.npy", "photos.faiss"]
    applied = typed(*applying).splitlines()[0]
    assert "Applied; on held-out bank queries the worst hub goes from 97 to" in applied
    inspected = unwrapped(typed("inspect", STORE))
    assert "0 targets without an offset" in inspected
    assert "0 of 1,200 targets had no offset, and 0 had another one" in typed(
        "refresh", STORE
    )
    assert "Correction removed" in typed("remove", STORE)
    raw = typed("inspect", STORE, status=4)
    assert "No correction" in raw
    assert f"hubplugin apply {STORE} --bank FILE" in raw
    assert Path("photos.faiss").read_bytes() == before


def figures(command, *arguments):
    """Return what a command prints, which docs/reference/json.md lists under its name."""
    found = asked(command, *arguments)
    assert (found.pop("command"), found.pop("version")) == (command, 1)
    schema = schema_of(FIGURES[command])
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part["additionalProperties"] = False
    jsonschema.validate(found, schema)
    return found


def test_every_command_prints_the_figures_that_its_page_lists(here, real):
    store = hubplugin.open_store(STORE)
    for method in ("nnn", "dbsn"):
        model = hubplugin.fit(real["test_targets"], real["bank_queries"], method)
        hubplugin.apply(store, model, force=True)
    before = Path("photos.faiss").read_bytes()
    bank = ("--bank", "bank.npy")
    refitted = figures("refit", STORE, *bank, "--dry-run")
    assert refitted["versus"]["change"] is None
    assert figures("inspect", STORE, "--live", "bank.npy")["attention"] == []
    assert figures("refresh", STORE, "--dry-run")["written"] is False
    applied = figures("apply", STORE, *bank, "--method", "nnn", "--dry-run")
    assert applied["trial"]["skewness"] < applied["trial"]["raw"]["skewness"]
    assert figures("diagnose", STORE, *bank)["hubs"]
    assert figures("inspect", STORE)["correction"]["model"]["method"] == "dbsn"
    np.save("truth.npy", np.arange(2_500) % 10)
    queries = ("--queries", "bank.npy", "--truth", "truth.npy")
    found = figures("evaluate", STORE, *queries)
    assert [method["label"] for method in found["methods"]] == ["raw", "corrected"]
    told = figures("rollback", STORE, "--dry-run")
    assert (told["written"], told["model"]["method"]) == (False, "nnn")
    told = figures("remove", STORE, "--dry-run")
    assert told["correction"]["model"]["method"] == "dbsn"
    assert Path("photos.faiss").read_bytes() == before
    assert figures("remove", STORE)["written"] is True


@pytest.mark.parametrize(
    ("command", "parameter", "expected"),
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
def test_an_error_names_a_parameter_as_it_is_typed(command, parameter, expected):
    assert as_typed(parameter, get_command(app).commands[command]) == expected


def test_a_warning_is_a_line_of_the_product_without_a_path(here, monkeypatch):
    inspect = hubplugin.inspect

    def warns(*arguments, **options):
        warnings.warn("recall fell;\nsearch further", stacklevel=1)
        logging.getLogger("hubplugin.qdrant").warning("no index on %s", "the offsets")
        return inspect(*arguments, **options)

    monkeypatch.setattr(hubplugin, "inspect", warns)
    assert run("inspect", STORE).stderr == (
        "hubplugin: warning: recall fell; search further\nhubplugin: warning: no index on the offsets\n"
    )


@pytest.mark.parametrize(
    "command",
    [
        (Path(sys.executable).with_name("hubplugin"),),
        (sys.executable, "-m", "hubplugin"),
    ],
    ids=["installed", "python -m"],
)
def test_the_command_says_which_version_it_is(command):
    said = subprocess.check_output([*command, "--version"], text=True)
    assert said == f"hubplugin {__version__}\n"


MISSING = [
    (("apply", STORE, "--bank", "nowhere.npy"), "nowhere.npy"),
    (("inspect", "faiss:nowhere.faiss"), "nowhere.faiss"),
    (
        ("diagnose", STORE, "--bank", "bank.npy", "--answers", "nowhere.npy"),
        "nowhere.npy",
    ),
    (
        ("evaluate", "bank.npy", "--queries", "bank.npy", "--truth", "nowhere.json"),
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


def test_a_missing_file_is_told_before_torch_is_imported(here):
    """All in one interpreter: once one of them imports torch, the rest have it."""
    done = subprocess.run(
        [sys.executable, "-c", TYPED],
        input=json.dumps([words for words, _ in MISSING]),
        capture_output=True,
        text=True,
        check=True,
    )
    ends, said = done.stdout.splitlines(), done.stderr.splitlines()
    assert len(said) == len(MISSING)
    for (words, missing), end, line in zip(MISSING, ends, said, strict=True):
        assert json.loads(end) == [1, False], words
        assert missing in line


STOPPED = {
    "scan": "nothing was changed",
    "write": "offsets were being written; searches are as before",
    "activate": "searches use either the old or the new correction",
    "remove": "the correction was being removed",
}
"""What is interrupted, and what is said of it."""


@pytest.mark.parametrize("step", STOPPED)
def test_ctrl_c_says_in_one_line_what_was_changed_and_the_same_command_goes_on(
    step, here, monkeypatch
):
    applying = (*APPLY, "--method", "csls", "--force")
    words = applying
    if step == "remove":
        typed(*applying)
        words = ("remove", STORE)
    before = Path("photos.faiss").read_bytes()
    kind = type(hubplugin.open_store(STORE))
    begin = kind.begin

    def stop(*_, **__):
        raise KeyboardInterrupt

    def begin_and_stop(*given, **named):
        writing = begin(*given, **named)
        setattr(writing, step, stop)
        return writing

    with monkeypatch.context() as patched:
        if step in ("scan", "remove"):
            patched.setattr(kind, step, stop)
        else:
            patched.setattr(kind, "begin", begin_and_stop)
        done = run(*words)
    assert done.returncode == 130
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hubplugin: stopped; ")
    assert STOPPED[step] in last
    assert "Traceback" not in done.stderr
    assert Path("photos.faiss").read_bytes() == before
    typed(*words)
    assert Path("photos.faiss").read_bytes() != before


DIAGNOSE = ("diagnose", STORE, "--bank")
EVALUATE = ("evaluate", "bank.npy", "--queries", "bank.npy")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*APPLY, "--set", "tau"), "expected NAME=VALUE"),
        ((*APPLY, "--method", "dualis"), "pass --answers"),
        ((*APPLY, "--set", "method=is"), "nor a parameter of method 'blend'"),
        (("refresh", STORE), "no correction"),
        ((*EVALUATE, "--k", "0"), "--k 0 is not between"),
        ((*EVALUATE, "--method", "dbsn"), "pass --bank"),
        ((*DIAGNOSE, "."), "is a folder; expected a"),
        ((*DIAGNOSE, "bank.npy", "--report", "no/a.html"), "there is no folder"),
        ((*DIAGNOSE, "bank.npy", "--report", "."), "it is a folder; expected a file"),
    ],
)
def test_what_goes_wrong_is_one_line_on_stderr_and_changes_nothing(words, said, here):
    before = Path("photos.faiss").read_bytes()
    complains(*words, said=said)
    assert Path("photos.faiss").read_bytes() == before


DIM = 6
URL = "qdrant-local:local/photos"


@pytest.fixture
def made(cwd):
    """A corrected collection in local mode, and a file of queries."""
    rng = np.random.default_rng(1)
    client = QdrantClient(path="local")
    collection(client, rng.normal(size=(120, DIM)))
    store = hubplugin_qdrant.open_store(client, "photos")
    hubplugin.apply(store, rng.normal(size=(120, DIM)), "is", force=True)
    client.close()
    np.save("queries.npy", rng.normal(size=(3, DIM)))


def test_explain_prints_a_request_to_paste_for_a_file_or_the_first_point(made):
    first = np.load("queries.npy")[0]
    for words in (["--vector", "queries.npy"], []):
        printed = typed("explain", URL, *words)
        request = "http://localhost:6333/collections/photos/points/query"
        assert printed.startswith(f"curl -X POST {request}")
        body = json.loads(printed.split("-d '")[1].split("'\n")[0])
        query = body["prefetch"][0]["query"]
        assert np.allclose(query, first) == bool(words)
        assert len(query) == DIM
    request = asked("explain", URL)["request"]
    assert request["method"] == "POST"
    assert request["path"] == "/collections/photos/points/query"


def test_what_explain_cannot_say_is_one_line(made):
    np.save("other.npy", np.ones((3, DIM + 1)))
    said = "--vector has 7 dimensions, qdrant-local:"
    complains("explain", URL, "--vector", "other.npy", said=said)
    complains("explain", flat_index("photos.faiss", np.eye(DIM)), said="")
