"""The commands that look after a correction, as a user types them."""

import json
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from hubplugin.jobs.write import write
from hubplugin.registry import open_store
from pages.json_output import FIGURES, schema_of
from tests.whole.commands import hubplugin, write_photos

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corrected(tmp_path_factory, real):
    """An index whose active correction is by dbsn, and the one before by nnn."""
    folder = tmp_path_factory.mktemp("keeping")
    targets = write_photos(folder, real)
    np.save(folder / "bank.npy", real["bank_queries"])
    store = open_store(f"faiss:{folder / 'photos.faiss'}")
    import hubplugin as package

    for method in ("nnn", "dbsn"):
        write(store, package.fit(targets, real["bank_queries"], method))
    return folder


@pytest.fixture
def photos(corrected, tmp_path):
    shutil.copytree(corrected, tmp_path, dirs_exist_ok=True)
    return Path(tmp_path / "photos.faiss")


def asked(command: str, *arguments: object) -> dict[str, object]:
    """The figures that a command prints, which are those of docs/reference/json.md, there under its name."""
    run = hubplugin(command, *arguments, "--json")
    assert run.returncode == 0, run.stderr
    figures = json.loads(
        run.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON")
    )
    assert (figures.pop("command"), figures.pop("version")) == (command, 1)
    schema = closed(schema_of(FIGURES[command]))
    jsonschema.validate(figures, schema)
    return figures


def closed(schema: dict[str, object]) -> dict[str, object]:
    """`schema`, by which a figure that it does not list is refused."""
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part["additionalProperties"] = False
    return schema


def test_a_rollback_and_a_removal_are_told_before_they_are_done(photos):
    store, before = f"faiss:{photos}", photos.read_bytes()
    told = asked("rollback", store, "--dry-run")
    assert (told["written"], told["model"]["method"]) == (False, "nnn")
    told = asked("remove", store, "--dry-run")
    assert told["correction"]["model"]["method"] == "dbsn"
    assert photos.read_bytes() == before
    assert asked("remove", store)["written"] is True
    assert sorted(path.name for path in photos.parent.iterdir()) == [
        "bank.npy",
        "photos.faiss",
    ]


def test_every_command_prints_the_figures_that_its_page_lists(photos):
    store, bank = f"faiss:{photos}", photos.parent / "bank.npy"
    refitted = asked("refit", store, "--bank", bank, "--dry-run")
    assert refitted["versus"]["gain"] is None
    assert asked("inspect", store, "--live", bank)["attention"] == []
    assert asked("refresh", store, "--dry-run")["written"] is False
    applied = asked("apply", store, "--bank", bank, "--method", "nnn", "--dry-run")
    assert applied["trial"]["skewness"] < applied["trial"]["raw"]["skewness"]
    found = asked("diagnose", store, "--bank", bank)
    assert {"findings", "trial", "hubs"} <= found.keys()
    assert asked("inspect", store)["correction"]["model"]["method"] == "dbsn"
    truth = photos.with_name("truth.npy")
    np.save(truth, np.arange(len(np.load(bank))) % 10)
    found = asked("evaluate", store, "--queries", bank, "--truth", truth)
    assert [method["label"] for method in found["methods"]] == ["raw", "corrected"]
