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
from hubplugin.rerank import QUERY_METHODS
from hubplugin.store import Store, Writing
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
    pages = "\n".join(page.read_text() for page in PAGES)
    names = set(re.findall(r"`store\.(\w+)", pages))
    assert names <= {name for kind in kinds for name in dir(kind)}


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
    languages = {each.language for each in blocks(page)}
    assert languages <= {"", *RUNNABLE, *NOT_RUN}


def test_the_skill_has_a_name_and_a_description_that_can_be_read():
    text = (ROOT / "skills" / "hubplugin" / "SKILL.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["name"] == "hubplugin"
    assert 40 < len(head["description"]) < 1024


def test_every_name_on_the_map_is_defined():
    folders = (ROOT / "hubplugin", ROOT / "adapters")
    files = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    defined = set(
        re.findall(r"^ *(?:async )?(?:def|class) (\w+)", "\n".join(files), re.M)
    )
    ways = (ROOT / "docs" / "architecture.md").read_text().split("## Three ways")[1]
    named = set(re.findall(r"`(?:[A-Za-z_]+\.)?([A-Za-z_]+)`", ways))
    assert named - defined <= {"def", "class", "targets", "bank", "query"}


def test_every_module_stands_in_the_house():
    house = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    rooms = {path.stem for path in (ROOT / "hubplugin").glob("[a-z]*")}
    assert rooms - set(re.findall(r"\w+", house)) <= {"progress", "py"}


def test_every_method_stands_in_the_table_of_the_evaluation():
    page = (ROOT / "docs" / "evaluation.md").read_text()
    methods = {*hubplugin.methods.METHODS, *QUERY_METHODS}
    assert methods <= set(re.findall(r"`(\w+)`", page))


def test_the_page_on_adapters_names_all_that_a_store_and_a_writing_have():
    page = (ROOT / "docs" / "adapters.md").read_text()
    public = {
        name
        for kind in (Store, Writing)
        for name in (*vars(kind), *kind.__annotations__)
        if name[0] != "_"
    }
    assert public <= set(re.findall(r"`(?:\w+\.)?(\w+)[`(]", page))


@pytest.mark.parametrize(
    "page",
    sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("*.md")),
    ids=lambda page: page.stem,
)
def test_a_page_refers_to_files_and_targets_that_are_there(page):
    text = page.read_text()
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        there = page.parent / link if link else page
        assert there.exists(), link
        heading = rf'^#+ .*{anchor.replace("-", ".+")}|id="{anchor}"'
        if anchor:
            assert re.search(heading, there.read_text(), re.I | re.M), anchor
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", text):
        assert f"\n{target}:" in makefile, target
    for module in re.findall(r"python -m (benchmarks\.\w+|tests\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for path in re.findall(
        r"`((?:hubplugin|adapters|tests|examples|docs|benchmarks)/[\w/.-]+)`", text
    ):
        assert (ROOT / path).exists(), path
