"""The renderer: a page of HTML whole and self-contained, and bad news as visible as good in both forms."""

from dataclasses import dataclass

import numpy as np
import pytest
from typer.testing import CliRunner

import hubplugin
from hubplugin.cli import app
from hubplugin.measures.significance import Figure, Side
from hubplugin.results import (
    COMPARED,
    Chart,
    Page,
    Result,
    Section,
    changes_of,
    describe_changes,
    row_of,
)
from tests.galleries import flat_index, unit
from tests.html import Parsed


@pytest.fixture(scope="module")
def place(real, tmp_path_factory):
    """A folder with an index of the example set, a bank, queries, their true ids, and names."""
    folder = tmp_path_factory.mktemp("reports")
    flat_index(folder / "photos.faiss", unit(real["test_targets"][:300]))
    np.save(folder / "bank.npy", real["bank_queries"][:300])
    np.save(folder / "queries.npy", real["test_queries"][:300])
    np.save(folder / "truth.npy", np.arange(300))
    names = [f"<i>photo {row}" for row in range(300)]
    (folder / "names.txt").write_text("\n".join(names))
    return folder


@pytest.mark.slow
def test_every_command_that_looks_writes_a_page_of_its_own(place):
    store = f"faiss:{place / 'photos.faiss'}"
    hubplugin.apply(hubplugin.open_store(store), place / "bank.npy")
    asked = ["--queries", f"{place}/queries.npy", "--truth", f"{place}/truth.npy"]
    for typed in (
        ["diagnose", store, "--bank", f"{place}/bank.npy"],
        ["inspect", store],
        ["evaluate", store, *asked],
    ):
        file = place / f"{typed[0]}.html"
        options = ["--names", f"{place}/names.txt", "--report", str(file)]
        done = CliRunner().invoke(app, [*typed, *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        text = file.read_text()
        page = Parsed(text)
        assert all(each.startswith(("#", "data:")) for each in page.references)
        assert "url(" not in text
        assert "@import" not in text
        assert {"script", "img"}.isdisjoint(page.tags)
        assert "svg" in page.tags
        assert "prefers-color-scheme: dark" in text
        for part in ("hubplugin 0", "<dt>date</dt>", "<dt>command</dt>", store):
            assert part in text
        assert "&lt;i&gt;photo" in text
        assert "<i>photo" not in text
        headline = done.stdout.splitlines()[0]
        assert headline in text.replace("&#39;", "'")


def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    typed = ["diagnose", "faiss:nowhere", "--report", f"{tmp_path}/no/page.html"]
    done = CliRunner().invoke(app, typed)
    assert (done.exit_code, "cannot write" in done.output) == (1, True)


def side(before, after, low, high):
    change = Figure(value=after - before, low=low, high=high)
    return Side(before, after, 0.1, 100, "some", change)


@dataclass(frozen=True)
class Said(Result):
    shown: Page
    store: str = "faiss:photos"

    def page(self):
        return self.shown


def test_bad_news_have_a_word_and_a_colour_as_good_ones_do_and_chance_has_neither(
    tmp_path,
):
    rows = changes_of(
        {
            "asked before": side(0.7, 0.5, -0.3, -0.1),
            "not asked": side(0.4, 0.6, 0.1, 0.3),
            "by chance": side(0.54, 0.49, -0.11, 0.01),
            "not measured": None,
        }
    )
    rows += row_of("skewness", 1.5, 0.2, form=str)
    sections = [
        Section("Changes", rows, COMPARED, note="of 100 queries"),
        Section("Found", chart=Chart("queries", {"raw": {0: 3, 7: 1}})),
        Section("Details", row_of("detail", 0.5), detail=True),
    ]
    said = Said(Page("it does harm", "worse", "100 targets", sections))
    text = str(said)
    assert text.splitlines()[:2] == ["It does harm.", "faiss:photos · 100 targets"]
    words = [line.split()[-1] for line in text.splitlines() if " points " in line]
    assert words == ["worse", "better", "same"]
    assert "not measured" not in text
    assert "of 100 queries" in text
    assert "detail" not in text
    assert "detail" in said.as_text(verbose=True)
    said.to_html(tmp_path / "page.html", "hubplugin evaluate")
    page = (tmp_path / "page.html").read_text()
    assert '<h1 class="worse">It does harm.</h1>' in page
    classes = [part.split('"')[0] for part in page.split('<tr class="')[1:]]
    assert classes == words
    assert page.count("<rect") == 2
    assert "hubplugin evaluate" in page


def test_what_changes_is_told_as_a_user_would_say_it():
    told = describe_changes(
        (97 / 2500, 60 / 2500), 2500, side(0.536, 0.566, 0.01, 0.05)
    )
    for part in ("falls from 97 to 60 of 2,500 queries", "53.6 % to 56.6 %", "+1.0"):
        assert part in told
    assert "rises from 1 to 2 of 100" in describe_changes((0.01, 0.02), 100, None)
    assert "stays at 1 of 100" in describe_changes((0.01, 0.01), 100, None)
