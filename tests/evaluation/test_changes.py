"""What a correction changes, target by target, against plain counting."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from typer.testing import CliRunner

import hubplugin
from hubplugin.cli import app
from hubplugin.evaluation.changes import Changes, Moved

K = 5


@pytest.fixture(scope="module")
def measured(real):
    targets, queries, bank = real["test_targets"][:400], real["test_queries"][:400], real["bank_queries"]
    results = hubplugin.evaluate(targets, bank, queries=queries, methods=["is tau=0.05"], k=K)
    model = hubplugin.fit(targets, bank, "is", tau=0.05)
    unit = targets.astype(np.float64) / np.linalg.norm(targets.astype(np.float64), axis=1, keepdims=True)
    raw = queries.astype(np.float64) @ unit.T
    return results, [np.argsort(-scores, axis=1) for scores in (raw, raw + model.offsets(targets))]


def test_what_became_findable_and_what_no_longer_is(measured):
    results, orders = measured
    before, after = (np.bincount(order[:, :K].ravel(), minlength=400) for order in orders)
    found, lost = np.flatnonzero((before == 0) & (after > 0)), np.flatnonzero((before > 0) & (after == 0))
    changes = results.changes
    assert changes.of == (len(found), len(lost))
    assert {name for name, _ in changes.found} <= {f"target {row}" for row in found}
    assert [times for _, times in changes.found] == sorted(after[found], reverse=True)[: len(changes.found)]
    assert [times for _, times in changes.lost] == sorted(before[lost], reverse=True)[: len(changes.lost)]


def test_the_ranks_that_moved_most(measured):
    results, orders = measured
    before, after = (1 + np.argmax(order == np.arange(400)[:, None], axis=1) for order in orders)
    apart = np.abs(before - after)
    told = [abs(each.before - each.after) for each in results.changes.moved]
    assert told == sorted(apart, reverse=True)[:20]
    first = results.changes.moved[0]
    row = int(first.query.split()[1])
    assert (first.target, first.before, first.after) == (f"target {row}", before[row], after[row])


def test_the_markdown_shows_names_as_text():
    moved = [Moved("a | b", "<script>", float("inf"), 2.0)]
    text = Changes("raw", "is", 5, 10, [("x\ny", 3)], [], (1, 0), moved, (0.5, 0.6)).markdown()
    assert "**1 targets became findable** in the first 5 of any query." in text
    assert "| x y | 3 |" in text
    assert "| a \\| b | &lt;script&gt; | not found | 2 |" in text


@pytest.mark.slow
def test_the_command_writes_it_of_a_store(real, tmp_path):
    index = faiss.IndexFlatIP(384)
    index.add(real["test_targets"][:400])
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    np.save(tmp_path / "q.npy", real["test_queries"][:400])
    np.save(tmp_path / "truth.npy", np.arange(400))
    np.save(tmp_path / "bank.npy", real["bank_queries"])
    url = f"faiss:{tmp_path}/x.faiss"
    asked = ["evaluate", url, "--queries", "q.npy", "--truth", "truth.npy", "--changes", "changes.md"]
    located = [str(tmp_path / part) if part.endswith((".npy", ".md")) else part for part in asked]
    done = CliRunner().invoke(app, located)
    assert done.exit_code == 1
    assert "nothing beside the raw search" in done.output
    hubplugin.apply(hubplugin.open_store(url), real["bank_queries"])
    assert CliRunner().invoke(app, located, catch_exceptions=False).exit_code == 0
    text = (tmp_path / "changes.md").read_text()
    assert text.startswith("### raw -> corrected, 400 queries")
    assert "targets became findable** in the first 10 of any query." in text
