"""The command line as a user types it, in this process."""

import json
import logging
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from subprocess import CompletedProcess
from unittest.mock import patch

from hubplugin.cli import main

STORE = "faiss:photos.faiss"


def run(*words):
    """Return what `hubplugin WORDS` prints, and its exit status."""
    typed = ["hubplugin", *map(str, words)]
    shown, said = StringIO(), StringIO()
    with (
        redirect_stdout(shown),
        redirect_stderr(said),
        patch("sys.argv", typed),
        patch.object(logging.root, "handlers", []),
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
    return CompletedProcess(typed, status, shown.getvalue(), said.getvalue())


def typed(*words, status=0):
    """Run a command that must end with `status`; return what it prints."""
    done = run(*words)
    assert done.returncode == status, done.stderr
    return done.stdout


def complains(*words, said, status=1):
    """Run a command that must fail with one line on stderr, which has `said`."""
    done = run(*words)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("hubplugin: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    return done.stderr


def asked(*words, status=0):
    """Return the figures that a command prints with `--json`."""
    return json.loads(typed(*words, "--json", status=status))


def unwrapped(text):
    """Return what is printed without the ends of its lines."""
    return " ".join(str(text).split())
