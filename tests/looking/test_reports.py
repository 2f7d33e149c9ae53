"""The renderer: a page of HTML whole and self-contained, and bad news as visible as good in both forms."""

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hubplugin import Bank
from hubplugin.jobs.results import doubt_clicks
from hubplugin.measures.significance import Figure, Side
from hubplugin.results import (
    COMPARED,
    Bar,
    Hub,
    Outcome,
    Page,
    Result,
    Row,
    Section,
    Step,
    compare,
    list_hubs,
)
from hubplugin_qdrant import HubQdrantClient
from tests.commands import STORE, typed
from tests.galleries import flat_index, unit

BANK = ("--bank", "bank.npy")


@pytest.fixture
def here(real, tmp_path, monkeypatch):
    """A folder with an index of the example set, a bank, queries, their true ids, and names."""
    folder = tmp_path / "re ports"
    folder.mkdir()
    monkeypatch.chdir(folder)
    flat_index("photos.faiss", unit(real["test_targets"][:300]))
    np.save("bank.npy", real["bank_queries"][:300])
    np.save("queries.npy", real["test_queries"][:300])
    np.save("truth.npy", np.arange(300))
    names = [f"<i>photo {row}" for row in range(300)]
    Path("names.txt").write_text("\n".join(names))


@pytest.mark.slow
def test_every_command_that_people_look_at_writes_a_page_of_its_own(here):
    shown = ["--show", "names.txt"]
    asked = ["--queries", "queries.npy", "--truth", "truth.npy"]
    for words in (
        ["diagnose", STORE, *BANK, *shown],
        ["apply", STORE, *BANK],
        ["inspect", STORE, *shown],
        ["evaluate", STORE, *asked, *shown],
    ):
        headline = typed(*words, "--report", "page.html").splitlines()[0]
        text = Path("page.html").read_text()
        assert all(each.startswith(("#", "data:")) for each in references_of(text))
        assert not re.search(r"url\(|@import|<i>photo", text)
        tags = set(re.findall(r"<(\w+)", text))
        assert "svg" in tags
        assert {"script", "img"}.isdisjoint(tags)
        for part in (
            *("hubplugin 0", "<dt>date</dt>", "<dt>command</dt>", "queries"),
            "prefers-color-scheme: dark",
        ):
            assert part in text
        assert ("&lt;i&gt;photo" in text) == ("--show" in words)
        assert headline in text.replace("&#39;", "'")


@pytest.mark.slow
def test_the_commands_that_are_next_run_as_they_stand(here):
    commands = [["diagnose", STORE, *BANK]]
    seen = []
    while commands:
        command = commands.pop(0)
        seen.append(command[0])
        lines = [line.strip() for line in typed(*command).splitlines()]
        following = [
            shlex.split(line)[1:] for line in lines if line.startswith("hubplugin ")
        ]
        commands += [each for each in following if each[0] not in seen]
    assert seen == ["diagnose", "apply", "inspect", "remove"]


def references_of(text):
    return re.findall(r'\b(?:src|href|srcset|data|action)="(.*?)"', text)


def side(before, after, low, high):
    change = Figure(value=after - before, low=low, high=high)
    return Side(before, after, 0.1, 100, "some", change)


@dataclass(frozen=True, repr=False)
class Said(Result):
    shown: Page
    store: str = "faiss:photos"

    def page(self):
        return self.shown


def written(page, path, **options):
    Said(page).to_html(path, **options)
    return path.read_text()


def test_bad_news_have_a_word_and_a_colour_as_good_ones_do_and_chance_has_neither(
    tmp_path,
):
    measures = {
        "asked before": side(0.7, 0.5, -0.3, -0.1),
        "not asked": side(0.4, 0.6, 0.1, 0.3),
        "by chance": side(0.54, 0.49, -0.11, 0.01),
        "not measured": None,
        "skewness": (1.5, 0.2),
    }
    chart = {"raw": {0: 3, 7: 1}}
    rows = compare(measures)
    section = Section("Changes", (), rows, COMPARED, chart, "of 100 queries")
    page = Page("it does harm", -1, "100 targets", [section])
    said = Said(page)
    text = str(said)
    assert text.splitlines()[:2] == ["It does harm.", "faiss:photos · 100 targets"]
    words = [line.split()[-1] for line in text.splitlines() if "(" in line][1:]
    assert words == ["worse", "better", "same"]
    assert "not measured" not in text
    assert re.search(r"skewness +1\.50 +0\.20$", text, re.MULTILINE)
    assert "of 100 queries" in text
    assert "\x1b" not in text
    coloured = said.as_text(terminal=True)
    for word, colour in (("worse", "31m"), ("better", "32m")):
        (line,) = [line for line in coloured.splitlines() if word in line]
        assert colour in line
    shown = written(page, tmp_path / "page.html", command="hubplugin evaluate")
    assert '<h1 class="worse">It does harm.</h1>' in shown
    classes = re.findall('<tr class="(.+?)">', shown)
    assert classes == words
    assert shown.count("<rect") == 2
    assert shown.count('class="bar zero"') == 3, "intervals are drawn"
    assert "hubplugin evaluate" in shown
    assert repr(said) == "<Said: It does harm>"


def test_stored_texts_show_nothing_but_themselves(tmp_path):
    evil = "a\x1b[31m\u202eb<script>\u2066"
    hubs = [Hub(1, evil, {"raw": 3}, [Outcome(evil, evil, True)])]
    page = Page(evil, sections=[list_hubs(hubs, 10)])
    lines = Section(evil, [evil], note=evil)
    steps = [Step(evil, text=evil)]
    page = Page(page.headline, 0, evil, [*page.sections, lines], steps)
    for text in (str(Said(page)), written(page, tmp_path / "page.html")):
        assert not re.search("[\x1b\u202e\u2066]", text)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_hubs_that_a_correction_makes_are_listed_with_all_their_bars():
    hubs = [Hub(row, f"t{row}", {"raw": 9 - row, "corrected": row}) for row in range(8)]
    hubs.append(Hub(9, "made", {"raw": 0, "corrected": 18}))
    section = list_hubs(hubs, 10)
    assert section.rows[0].cells[0] == "made"
    assert [bar.end for bar in section.rows[0].cells[1:]] == [0, 1]
    shown = str(Said(Page("x", sections=[section])))
    assert re.search(r"made +0 +█+ +18$", shown, re.MULTILINE)


def test_a_long_name_is_cut_and_what_it_opens_to_is_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    misled = Outcome("q" * 70, "a" * 60, False)
    hubs = [Hub(1, "n" * 90, {"raw": 5, "corrected": 2}, [misled])]
    text = str(Said(Page("x", sections=[list_hubs(hubs, 10)])))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if "nnn" in line]
    assert re.search(r"n +█{6} +5 +██ +2$", row)
    assert str(misled).replace(" ", "") in "".join(text.split())


def test_pictures_of_targets_are_small_and_lie_in_their_folder(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (900, 600)).save(folder / "sea.jpg")
    Image.new("RGB", (900, 600)).save(tmp_path / "secret.jpg")
    (folder / "broken.jpg").write_text("no picture")
    names = ["sea.jpg", "../secret.jpg", "broken.jpg", "https://x/sea.jpg"]
    rows = [Row((name, Bar("1", 1.0)), image=name) for name in names]
    page = Page("x", sections=[Section("Hubs", (), rows, ("raw",))])
    shown = written(page, tmp_path / "page.html", images=folder)
    (picture,) = [each for each in references_of(shown) if each.startswith("data:")]
    assert len(picture) < 3000


def test_banks_and_clients_print_in_one_line(tmp_path):
    bank = Bank(np.ones((1200, 3)), ["a"] * 1200)
    assert repr(bank) == "<Bank: queries 1,200 x 3, answers 1,200>"
    assert repr(Bank("q.npy")) == "<Bank: queries q.npy, answers none>"
    client = HubQdrantClient(url="http://key:secret@here:6333", timeout=1)
    assert repr(client).startswith("<HubQdrantClient: http://")
    assert "secret" not in repr(client)


def test_clicks_that_look_wrong_are_said_to_be_so():
    rest = Side(0.37, 0.40, 0.01, 1500, "pairs", Figure(0.03, 0.01, 0.05))
    wrong = Side(0.20, 0.20, 0.02, 195, "other wordings", Figure(0, -0.02, 0.02))
    told = doubt_clicks(wrong, rest)
    for part in ("195 other wordings", "20.0%", "37.0%", "clicks look wrong"):
        assert part in told
    assert doubt_clicks(replace(wrong, before=0.30), rest) == ""
    assert doubt_clicks(replace(wrong, queries=20), rest) == ""
    assert doubt_clicks(None, rest) == ""
