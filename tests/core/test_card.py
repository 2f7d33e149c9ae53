"""The card of a model says what it was made of, and nothing that it does not know."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

import hubplugin
from hubplugin.cli import app
from hubplugin.model import GainAtFit
from hubplugin.model.card import card


@pytest.fixture
def model(rng):
    return hubplugin.fit(rng.normal(size=(60, 8)), rng.normal(size=(40, 8)), "is", tau=0.1)


def test_a_card_names_method_bank_gallery_and_offsets(model, rng):
    text = card(model)
    assert "| method | is (tau=0.1" in text
    assert "| similarity | cosine, 8 dimensions |" in text
    assert f"| banks | 40 vectors, {model.bank_fingerprint} |" in text
    assert "| gallery of the fit | 60 targets |" in text
    assert f"{model.gallery.smallest:+.4f} to {model.gallery.largest:+.4f}" in text
    assert model.fingerprint in text
    assert "query map" not in text
    assert "skewness" not in text


def test_a_card_of_a_model_without_a_gallery_leaves_it_out(rng):
    text = card(hubplugin.fit(None, rng.normal(size=(40, 8)), "nnn", k=4))
    assert "gallery of the fit" not in text


def test_the_command_prints_it_of_a_file(model, tmp_path):
    model.save(tmp_path / "photos.hub")
    done = CliRunner().invoke(app, ["card", str(tmp_path / "photos.hub")])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("# Offsets by is\n")
    refused = CliRunner().invoke(app, ["card", str(tmp_path / "nothing.hub")])
    assert refused.exit_code == 1
    assert refused.output.count("\n") == 1


def test_a_card_has_the_gain_that_apply_saw_on_held_out_queries(model):
    gained = model.having(gain_at_fit=GainAtFit(2_500, 0.497, 0.524, 0.0055))
    told = "| right answers first, 2,500 held-out bank queries | 49.7 % raw, 52.4 % corrected (+1.6 to +3.8 points) |"
    assert told in card(gained)
    assert told in card(hubplugin.OffsetModel.from_bytes(gained.to_bytes()))
    assert gained.fingerprint == model.fingerprint
    assert "right answers" not in card(model)


def test_apply_keeps_what_its_trial_gained_with_the_model(real, tmp_path):
    import faiss

    index = faiss.IndexFlatIP(384)
    index.add(real["test_targets"][:300])
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    store = hubplugin.open_store(f"faiss:{tmp_path}/x.faiss")
    bank = hubplugin.Bank(real["bank_queries"][:600], real["bank_targets"][:600])
    trial = hubplugin.apply(store, bank, force=False).trial
    kept = hubplugin.open_store(store.url).correction().model.gain_at_fit
    assert kept == GainAtFit(trial.queries, trial.raw.recall, trial.recall, trial.error)


@pytest.mark.slow
def test_the_command_prints_it_of_a_store_with_the_hubness_that_apply_counted(tmp_path, rng):
    import faiss

    gallery, bank = (rng.normal(size=(count, 8)).astype(np.float32) for count in (300, 400))
    faiss.normalize_L2(gallery)
    index = faiss.IndexFlatIP(8)
    index.add(gallery)
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    url = f"faiss:{tmp_path}/x.faiss"
    assert "has no correction" in CliRunner().invoke(app, ["card", url]).output
    hubplugin.apply(hubplugin.open_store(url), bank, force=True)
    done = CliRunner().invoke(app, ["card", url])
    assert done.exit_code == 0, done.output
    assert "skewness of the 10-occurrence" in done.output
