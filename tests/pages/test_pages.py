"""Pages say what the program does: generated ones are up to date, commands can be typed, every page is in the site."""

import re

import pytest
import yaml
from typer.main import get_command

import hubplugin
import hubplugin_chroma
import hubplugin_faiss
import hubplugin_lancedb
import hubplugin_qdrant
from hubplugin.cli import app
from pages.generated import outdated
from tests.pages.blocks import NOT_RUN, PAGES, ROOT, RUNNABLE, blocks, commands


def test_every_generated_page_is_up_to_date():
    assert [path.name for path in outdated()] == [], "run `python -m pages`"


@pytest.mark.parametrize(
    "package",
    [hubplugin, hubplugin_chroma, hubplugin_faiss, hubplugin_lancedb, hubplugin_qdrant],
    ids=lambda package: package.__name__,
)
def test_every_public_name_stands_in_the_reference(package):
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    shown = set(re.findall(rf"^::: {package.__name__}\.(\w+)$", page, re.MULTILINE))
    assert set(package.__all__) - {"__version__"} <= shown


def test_every_method_of_a_store_that_a_page_names_is_there():
    kinds = [hubplugin.store.Store]
    for kind in kinds:
        kinds += kind.__subclasses__()
    names = {
        name
        for page in PAGES
        for name in re.findall(r"`store\.(\w+)", page.read_text())
    }
    assert {
        name for name in names if not any(hasattr(kind, name) for kind in kinds)
    } == set()


def test_every_page_stands_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = set(re.findall(r"[\w/.-]+\.md", navigation))
    assert listed == {
        str(page.relative_to(ROOT / "docs"))
        for page in PAGES
        if page.is_relative_to(ROOT / "docs")
    }


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem != "cli"], ids=lambda page: page.stem
)
def test_a_command_that_a_page_shows_can_be_typed(page):
    root = get_command(app)
    for words in commands(page):
        name, *arguments = words
        root.commands[name].make_context(name, arguments).close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_says_what_it_is(page):
    unknown = [
        each for each in blocks(page) if each.language not in ("", *RUNNABLE, *NOT_RUN)
    ]
    assert unknown == []


def test_the_skill_has_a_name_and_a_description_that_can_be_read():
    text = (ROOT / "skills" / "hubplugin" / "SKILL.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["name"] == "hubplugin"
    assert 40 < len(head["description"]) < 1024


def test_every_file_on_the_map_is_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = re.findall(r"`((?:hubplugin|adapters)/[a-z_/]+(?:\.py)?)`", text)
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []
