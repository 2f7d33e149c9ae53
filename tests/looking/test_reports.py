"""Reports of what is done with a store: whole, self-contained, and bad news as visible as good."""

import numpy as np
import pytest
from typer.testing import CliRunner

import hubplugin
from hubplugin.cli import app
from hubplugin.measures.significance import Figure, Side
from hubplugin.report import (
    Report,
    as_html,
    describe_changes,
    share_figure,
    sides_figure,
)
from hubplugin.report.plots import VARIABLES
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
    (folder / "names.txt").write_text(
        "\n".join(f"<i>photo {row}" for row in range(300))
    )
    return folder


@pytest.mark.slow
def test_every_command_that_looks_writes_a_page_of_its_own(place):
    store, names = (
        f"faiss:{place / 'photos.faiss'}",
        ["--names", str(place / "names.txt")],
    )
    bank = ["--bank", str(place / "bank.npy")]
    hubplugin.apply(hubplugin.open_store(store), place / "bank.npy")
    asked = [
        "--queries",
        str(place / "queries.npy"),
        "--truth",
        str(place / "truth.npy"),
    ]
    for typed in (
        ["diagnose", store, *bank, *names],
        ["inspect", store, *names],
        ["evaluate", store, *asked, *names],
    ):
        file = place / f"{typed[0]}.html"
        done = CliRunner().invoke(
            app, [*typed, "--report", str(file)], catch_exceptions=False
        )
        assert done.exit_code == 0, done.output
        text = file.read_text()
        page = Parsed(text)
        assert len(page.tiles) == 4
        assert all(
            reference.startswith(("#", "data:")) for reference in page.references
        )
        assert all(part.startswith("#") for part in text.split("url(")[1:])
        assert "script" not in page.tags
        assert "prefers-color-scheme: dark" in text
        assert not any(
            colour in text for colour in VARIABLES
        )  # all took the page's own
        for part in (
            "hubplugin 0",
            "<dt>date</dt>",
            "<dt>command</dt>",
            "What was found",
            store,
        ):
            assert part in text
        if "--names" in typed:
            assert "&lt;i&gt;photo" in text
            assert "<i>photo" not in text


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_refused_before_the_work(place):
    typed = [
        "diagnose",
        "faiss:nowhere",
        "--bank",
        "nowhere.npy",
        "--report",
        str(place / "no" / "page.html"),
    ]
    done = CliRunner().invoke(app, typed)
    assert (done.exit_code, "cannot write" in done.output) == (1, True)


def share(before, after, low, high):
    return Side(
        before,
        after,
        0.1,
        100,
        "some",
        Figure(value=after - before, low=low, high=high),
    )


def test_both_sides_are_as_bad_as_the_worse_of_them_beyond_chance():
    worse, better, noise = (
        share(0.7, 0.5, -0.3, -0.1),
        share(0.4, 0.6, 0.1, 0.3),
        share(0.54, 0.49, -0.11, 0.01),
    )
    pairs = ((worse, better), (noise, better), (None, noise), ())
    key_figures = [sides_figure("R@1", each, "no log") for each in pairs]
    assert [tile.direction for tile in key_figures] == [
        "worse",
        "better",
        "same",
        "unknown",
    ]
    assert [tile.shown for tile in key_figures] == [
        "-20.0 / +20.0",
        "same / +20.0",
        "? / same",
        "not measured",
    ]
    assert "(-11.0 to +1.0)" in key_figures[1].note
    assert key_figures[3].note == "no log"


def test_bad_news_have_a_word_a_sign_and_a_colour_as_good_ones_do():
    """The arrow is the number's own: a hub that is found less often is better, and goes down."""
    key_figures = [
        share_figure("a hub", *each, more_is_better=False)
        for each in ((0.02, 0.01), (0.02, 0.03), (0.02, 0.02))
    ]
    key_figures += [
        share_figure("R@1", *each, more_is_better=True)
        for each in ((0.5, 0.6), (0.6, 0.5))
    ]
    text = as_html(
        Report(
            "page", key_figures=key_figures, verdict="it does harm", direction="worse"
        ),
        {},
    )
    assert Parsed(text).tiles == ["better", "worse", "same", "better", "worse"]
    signs = [
        "▼ better (was 2.0 %)",
        "▲ worse (was 2.0 %)",
        "= the same",
        "▲ better (was 50.0 %)",
        "▼ worse (was 60.0 %)",
    ]
    places = [text.replace("\N{NO-BREAK SPACE}", " ").find(sign) for sign in signs]
    assert -1 not in places
    assert places == sorted(places)
    assert '<section class="verdict worse"><h2>It does harm</h2>' in text


def test_what_changes_is_told_as_a_user_would_say_it():
    told = describe_changes(97 / 2500, 60 / 2500, 2500, 0.536, 0.566).replace(
        "\N{NO-BREAK SPACE}", " "
    )
    assert (
        told
        == "the worst hub falls from 97 to 60 of 2,500 queries; right answers first: 53.6 to 56.6 %"
    )
    assert (
        describe_changes(0.01, 0.02, 100, None, None)
        == "the worst hub rises from 1 to 2 of 100 queries"
    )


def test_a_verdict_of_neither_help_nor_harm_is_not_red():
    text = as_html(
        Report("page", verdict="neither help nor harm beyond chance", direction="same"),
        {},
    )
    assert '<section class="verdict same">' in text
    assert (
        ".verdict.same" not in text
    )  # so that it has the colour of what has no direction
