"""The guard: what it must refuse, what it must let pass, and that nothing happens to a store that is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hubplugin
from hubplugin.jobs import correction
from hubplugin.registry import open_store
from hubplugin.store import Store


@pytest.fixture(scope="session")
def banks(real):
    return real["bank_queries"], real["bank_targets"]


def refused(*given, **options):
    with pytest.raises(hubplugin.CorrectionRefused) as caught:
        hubplugin.check(*given, **options)
    assert "\n" not in str(caught.value)
    assert "force=True" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("with_pairs", [True, False])
def test_dbsn_at_005_passes_on_the_example_set(real, banks, with_pairs):
    judgement = hubplugin.check(banks[0], real["test_targets"], "dbsn", banks[1] if with_pairs else None, tau=0.05)
    assert judgement.objections == []
    assert (judgement.candidate.recall is not None) is with_pairs
    assert "passed" in str(judgement)


def test_a_bank_is_judged_the_same_on_every_scale_and_by_every_metric(real, banks):
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (banks[0], real["test_targets"])]
    found = [
        hubplugin.judge(scale * unit[0], size * unit[1], "nnn", metric=metric).bank
        for scale, size, metric in (
            (1, 1, "cosine"), (1, 1, "dot"), (1, 1, "euclidean"), (1, 3, "dot"), (5, 1, "dot"), (5, 3, "cosine"),
        )
    ]  # fmt: skip
    np.testing.assert_allclose([one.agreement for one in found], found[0].agreement, atol=1e-4)
    np.testing.assert_allclose([one.coverage for one in found], found[0].coverage, atol=1e-2)


@pytest.mark.parametrize("with_pairs", [True, False])
def test_the_papers_inverted_softmax_at_002_is_refused_on_the_example_set(real, banks, with_pairs):
    said = refused(banks[0], real["test_targets"], "is", banks[1] if with_pairs else None, tau=0.02)
    assert "hubness (skewness) goes from" in said
    assert ("R@1" in said) is with_pairs
    assert "method='auto'" in said


@pytest.mark.parametrize("rows", [5, 30])
def test_a_bank_that_is_too_small_is_refused(real, banks, rows):
    said = refused(banks[0][:rows], real["test_targets"], "dbsn", banks[1][:rows])
    assert f"{rows} distinct queries" in said


def test_a_bank_that_is_one_text_repeated_is_refused(real, banks):
    said = refused(np.repeat(banks[0][:1], 1_000, axis=0), real["test_targets"], "dbsn")
    assert "1 distinct queries" in said


@pytest.mark.parametrize("rows", [1_200, 300])
def test_a_gallery_as_its_own_bank_is_refused_though_hubness_falls(real, banks, monkeypatch, rows):
    monkeypatch.setattr("hubplugin.experiment.FIT_ROWS", rows // 2)  # the experiment sees `rows` of the gallery
    gallery = real["test_targets"].astype(np.float32)
    said = refused(gallery.astype(np.float16), gallery, "nnn", k=32, alpha=0.75)
    assert "of the bank queries are targets of the gallery" in said
    assert hubplugin.judge(banks[0], gallery, "nnn", k=32, alpha=0.75).bank.copies == 0


@pytest.mark.parametrize("with_targets", [True, False])
def test_a_bank_from_a_corner_of_another_subject_that_hurts_is_refused(real, banks, with_targets):
    """Bank pairs near one bank target stand in for another domain; R@1 of the test queries falls with them."""
    queries, targets = (banks[i].astype(np.float32) for i in (0, 1))
    corner = np.argsort(-(targets @ targets[7]))[:500]
    gallery, asked = real["test_targets"].astype(np.float32), real["test_queries"].astype(np.float32)
    near = np.argsort(-(gallery @ targets[7]))
    far = np.sort(near[300:])
    gallery, asked = gallery[far], asked[far]
    second = targets[corner] if with_targets else None
    scores, own = asked @ gallery.T, np.arange(len(asked))
    offsets = hubplugin.fit(queries[corner], "dbsn", gallery, second).offsets(gallery)
    assert ((scores + offsets).argmax(axis=1) == own).mean() < (scores.argmax(axis=1) == own).mean() - 0.01
    said = refused(queries[corner], gallery, "dbsn", second)
    assert "this very gallery" in said


@pytest.fixture
def store(real, tmp_path) -> Store:
    faiss = pytest.importorskip("faiss", reason="needs faiss-cpu: pip install 'hubplugin[faiss]'")
    targets = real["test_targets"][:500].astype(np.float32)
    faiss.normalize_L2(targets)
    index = faiss.IndexFlatIP(targets.shape[1])
    index.add(targets)
    faiss.write_index(index, str(tmp_path / "photos.faiss"))
    return open_store(f"faiss:{tmp_path / 'photos.faiss'}")


def test_a_refused_correction_leaves_the_store_as_it_was_and_force_applies_it(store, banks):
    path = Path(store.url.removeprefix("faiss:"))
    before = path.read_bytes()
    with pytest.raises(hubplugin.CorrectionRefused):
        correction.apply(store, banks[0][:60], "is", tau=0.02)
    assert path.read_bytes() == before
    assert open_store(store.url).correction() is None
    correction.apply(store, banks[0][:60], "is", tau=0.02, force=True)
    assert open_store(store.url).correction().active


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "is", "tau": -1}, "tau=-1 is refused"),
        ({"method": "auto", "tau": 0.1}, "takes no parameters"),
        ({"method": "dbsn", "target_bank": np.eye(3)}, "384 dimensions, target bank has 3"),
    ],
)
def test_what_cannot_be_used_is_told_before_the_gallery_is_read(store, banks, given, says, monkeypatch):
    monkeypatch.setattr(type(store), "scan", lambda *_: pytest.fail("the gallery was read"))
    with pytest.raises(hubplugin.InputError, match=says):
        correction.apply(store, banks[0], **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"target_bank": np.ones((5, 384)), "pairs": [1, 2]}, "pairs must hold one row"),
        ({"pairs": True}, "pass target_bank="),
        ({"method": "dualis"}, "pass target_bank="),
        ({"memory": "much"}, "memory='much' is not a size"),
        ({"device": "abacus"}, "device 'abacus' is not usable here"),
        ({"vector_name": "x"}, "no parameter 'vector_name'; .*; apply itself takes store, query_bank, "),
        ({"targetbank": None}, r"did you mean target_bank=\?"),
        ({"method": "sn", "iteration": 3}, r"did you mean iterations=\?"),
    ],
)
def test_what_else_cannot_be_used_is_told_before_the_gallery_is_read(store, banks, given, says, monkeypatch):
    monkeypatch.setattr(type(store), "scan", lambda *_: pytest.fail("the gallery was read"))
    with pytest.raises(hubplugin.InputError, match=says):
        correction.apply(store, banks[0], **given)


@pytest.mark.parametrize("method", ["auto", "dbsn"])
def test_a_bank_that_is_too_small_is_refused_before_the_gallery_is_read(store, banks, method, monkeypatch):
    monkeypatch.setattr(type(store), "scan", lambda *_: pytest.fail("the gallery was read"))
    with pytest.raises(hubplugin.CorrectionRefused, match="20 distinct queries, of which 400 are needed; nothing was"):
        correction.apply(store, banks[0][:20], method)


def test_a_gallery_as_its_own_bank_is_refused_before_a_method_is_looked_for(store, real, monkeypatch):
    monkeypatch.setattr("hubplugin.experiment.Experiment.run", lambda *_: pytest.fail("candidates were tried"))
    with pytest.raises(hubplugin.CorrectionRefused, match="100% of the bank queries are targets of the gallery"):
        correction.apply(store, real["test_targets"][:500])


@pytest.mark.parametrize(
    ("queries", "options", "says"),
    [
        (np.eye(9, 384), {}, "query bank has 9 distinct queries"),
        (np.eye(9, 12), {}, "query bank has 12 dimensions, faiss:.* has 384"),
        (np.eye(50, 384), {"pairs": True}, "pass target_bank="),
    ],
)
def test_diagnose_tells_what_it_cannot_use_before_it_reads_the_gallery(store, queries, options, says, monkeypatch):
    monkeypatch.setattr(type(store), "scan", lambda *_: pytest.fail("the gallery was read"))
    with pytest.raises(hubplugin.InputError, match=says):
        hubplugin.diagnose(store, queries, **options)


def test_what_is_no_store_is_told_how_to_open_one(banks):
    with pytest.raises(hubplugin.InputError, match=r"expected a store, got ndarray; open one: hubplugin\.open_store"):
        correction.apply(banks[1], banks[0])


def test_apply_auto_is_applied_with_what_it_chose(store, banks):
    applied = correction.apply(store, banks[0][:600], "auto", banks[1][:600])
    assert applied.model.method in hubplugin.METHODS
    assert open_store(store.url).correction().active
    assert applied.judgement is not None
    assert "held-out bank queries:\n  none()" in str(applied)


def test_diagnose_names_the_hubs_of_a_store_and_says_whether_a_bank_would_help(store, real, banks):
    queries, targets = banks[0][:600].astype(np.float64), real["test_targets"][:500].astype(np.float64)
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, targets)]
    nearest = np.argsort(-(unit[0] @ unit[1].T), axis=1)[:, :10]
    counts = np.bincount(nearest.ravel(), minlength=500)
    found = hubplugin.diagnose(store, banks[0][:600], banks[1][:600])
    assert found.hubs[0][1] == counts.max()
    assert all(counts[row] == count for row, count in found.hubs)
    assert found.hubness.largest == counts.max()
    text = str(found)
    for part in ("hubs: ", "skewness", "R@1", "95 % interval", found.choice.winner.name, "verdict: "):
        assert part in text
    assert open_store(store.url).correction() is None


def test_diagnose_refuses_the_judgement_a_bank_cannot_carry(real, banks):
    found = hubplugin.diagnose(real["test_targets"][:300], banks[0][:60])
    assert not found.helps
    assert "60 distinct queries" in str(found)


def test_the_command_line_diagnoses_refuses_and_forces(store, banks, tmp_path):
    from typer.testing import CliRunner

    from hubplugin.cli import app

    np.save(tmp_path / "queries.npy", banks[0][:100])
    given = [store.url, "--queries", str(tmp_path / "queries.npy")]
    diagnosed = CliRunner().invoke(app, ["diagnose", *given])
    assert "it would be refused: the bank has 100 distinct queries, of which 400 are needed" in diagnosed.output
    applying = ["apply", *given, "--method", "nnn"]
    refused = CliRunner().invoke(app, applying)
    assert refused.exit_code == 1
    assert "of which 400 are needed; nothing was changed; collect queries" in refused.output
    assert CliRunner().invoke(app, [*applying, "--force"]).exit_code == 0
