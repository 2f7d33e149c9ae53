"""What a card computes, computed by torch on a CPU that is told to be one: the same offsets as numpy's."""

import numpy as np
import pytest

import hubplugin
from hubplugin.compute import device
from tests.core.test_fake_device import METHODS


@pytest.fixture
def card(monkeypatch) -> hubplugin.Compute:
    """A CPU without the ways that a CPU has of its own."""
    begin = device.Library.__init__

    def as_of_a_card(library, of):
        begin(library, of)
        library.is_on_cpu = of is None

    monkeypatch.setattr(device.Library, "__init__", as_of_a_card)
    return hubplugin.Compute("cpu")


def gallery(rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    bank, targets, second = (
        rng.normal(size=(rows, 24)).astype(np.float32) for rows in (400, 700, 300)
    )
    targets[350:] = targets[:350]  # copies of answers
    return bank, targets, second


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("answers", ["kept", "left out"])
@pytest.mark.parametrize(("method", "parameters"), METHODS)
def test_a_card_gives_the_offsets_of_numpy(
    method, parameters, answers, metric, card, rng
):
    if metric != "cosine":
        parameters = {
            key: 0.5 if key == "tau" else value for key, value in parameters.items()
        }
    bank, targets, second = gallery(rng)
    asked = (
        hubplugin.Bank(bank, second) if method in ("dualis", "dbsn", "blend") else bank
    )
    by_numpy, by_card = (
        hubplugin.fit(
            targets,
            asked,
            method,
            metric=metric,
            answers=answers,
            compute=compute,
            **parameters,
        )
        for compute in (hubplugin.Compute("numpy"), card)
    )
    np.testing.assert_allclose(by_card.fitted, by_numpy.fitted, atol=1e-5)
    newer = rng.normal(size=(90, 24)).astype(np.float32)
    np.testing.assert_allclose(
        by_card.offsets(newer, compute=card),
        by_numpy.offsets(newer, compute=hubplugin.Compute("numpy")),
        atol=1e-5,
    )


@pytest.mark.parametrize("method", ["is", "blend"])
def test_zero_vectors_are_found_in_the_pass_and_left_out(method, card, rng):
    bank, targets, _ = gallery(rng)
    targets[[3, 650]] = 0
    with pytest.warns(UserWarning, match="targets: 2 zero vectors are left out"):
        expected = hubplugin.fit(
            targets, bank, method, compute=hubplugin.Compute("numpy")
        )
    with pytest.warns(UserWarning, match="targets: 2 zero vectors are left out"):
        model = hubplugin.fit(targets, bank, method, compute=card)
    np.testing.assert_allclose(model.fitted, expected.fitted, atol=1e-5)
    np.testing.assert_allclose(
        model.offsets(targets, compute=card), expected.fitted, atol=1e-5
    )
    assert (model.offsets(np.zeros((2, 24)), compute=card) == 0).all()


def test_a_gallery_without_zero_vectors_is_read_once_by_one_pass(
    card, rng, monkeypatch
):
    from hubplugin.vectors import Sliceable

    bank, targets, _ = gallery(rng)
    reads, read = [], Sliceable.raw_blocks

    def counted(vectors, size):
        reads.append(vectors.name)
        return read(vectors, size)

    monkeypatch.setattr(Sliceable, "raw_blocks", counted)
    hubplugin.fit(targets, bank, "is", compute=card)
    assert reads.count("targets") == 1


@pytest.mark.parametrize("row", [0, 699])
def test_what_is_not_finite_is_named_after_the_pass(row, card, rng):
    bank, targets, _ = gallery(rng)
    targets[row, 2] = np.inf
    with pytest.raises(
        hubplugin.InputError,
        match=f"targets: row {row} holds a value that is NaN, infinity",
    ):
        hubplugin.fit(targets, bank, "is", compute=card)
