"""What the pages must name, they name."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

import hubplugin
from hubplugin.cli import app
from hubplugin.rerank import QUERY_METHODS
from hubplugin.store import Store, Writing

ROOT = Path(__file__).parent.parent.parent

STORES = {
    "chroma": "Chroma",
    "faiss": "Faiss",
    "lancedb": "LanceDB",
    "pgvector": "PostgreSQL",
    "qdrant": "Qdrant",
}
"""What users call the store of each adapter."""


def places_where_every_store_is_named():
    """By name, the first words that somebody reads of hubplugin, and the answers that differ from store to store."""
    answers = dict(
        part.split("\n", 1)
        for part in (ROOT / "docs" / "questions.md").read_text().split("\n## ")[1:]
    )
    asked = (
        "How do I switch it off at once?",
        "How do I uninstall it?",
        "What does it cost to serve?",
    )
    texts = {
        question: answers[question]
        for question in (*asked, "Which stores can it correct?")
    }
    start = (ROOT / "docs" / "index.md").read_text().split("![")[0]
    described = re.search(
        "^description = .*$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )[0]
    texts |= {"index": start, "description": described, "help": get_command(app).help}
    texts |= {
        "README": (ROOT / "README.md").read_text(),
        "skill": (ROOT / "pages" / "skill.md").read_text(),
    }
    return texts | {
        "llms.txt": "\n".join((ROOT / "llms.txt").read_text().splitlines()[:4])
    }


@pytest.mark.parametrize("place", places_where_every_store_is_named())
def test_every_store_that_has_an_adapter_is_named(place):
    assert {
        path.name.removeprefix("hubplugin_")
        for path in (ROOT / "adapters").glob("hubplugin_*")
    } == set(STORES)
    text = places_where_every_store_is_named()[place]
    assert [name for name in STORES.values() if name not in text] == []


def test_every_method_stands_in_the_table_of_the_evaluation():
    page = (ROOT / "docs" / "evaluation.md").read_text()
    assert [
        name
        for name in (*hubplugin.methods.METHODS, *QUERY_METHODS)
        if f"`{name}`" not in page
    ] == []


def test_the_page_on_adapters_names_all_that_a_store_and_a_writing_have():
    page = (ROOT / "docs" / "adapters.md").read_text()
    public = {
        name
        for kind in (Store, Writing)
        for name in (*vars(kind), *kind.__annotations__)
        if name[0] != "_"
    }
    assert [
        name
        for name in sorted(public)
        if not re.search(rf"`(?:\w+\.)?{name}[`(]", page)
    ] == []


def anchors(page):
    """What the headings of `page` are called in a link, as both the site and a repository's viewer have them."""
    headings = re.findall(
        r"^#+ (.+)$",
        re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL),
        re.MULTILINE,
    )
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    named = re.findall(r'<a id="([^"]+)"', page.read_text())
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in plain
    } | {*named}


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
        assert not anchor or anchor in anchors(there), f"{link}#{anchor}"
    for target in re.findall(r"`make (\w+)`", text):
        assert re.search(
            rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE
        ), target
    for module in re.findall(r"python -m (benchmarks\.\w+|tests\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for path in re.findall(
        r"`((?:hubplugin|adapters|tests|examples|docs|benchmarks)/[\w/.-]+)`", text
    ):
        assert (ROOT / path).exists(), path
