"""Fits on a card that is not there: torch's fake tensors have devices and shapes and no values.

They raise where tensors of two devices meet, and wherever a value is asked for, as by `.item()`, `nonzero` or
`.numpy()`: on a card, each would make the host wait for all that was begun. `to_host` alone may, once a pass.
By dot product and Euclidean distance each block is asked for its longest vector, so these are not here.
"""

import sys

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hubplugin
from hubplugin.compute import device, reductions, similarities

METHODS = [
    ("is", {}),
    ("nnn", {}),
    ("csls", {}),
    ("dn", {}),
    ("dualis", {}),
    ("sn", {"tau": 0.05, "iterations": 3}),
    ("sn", {"tau": 0.005, "iterations": 3}),
    ("dbsn", {"tau": 0.05, "iterations": 3}),
    ("blend", {"tau": 0.05, "strength": 1.0, "iterations": 3}),
]


@pytest.fixture
def returned(monkeypatch):
    """How many numbers each return to the host brought."""
    seen = []

    def to_host(array):
        if isinstance(array, np.ndarray):
            return array
        seen.append(array.numel())
        return np.ones(tuple(array.shape), str(array.dtype).removeprefix("torch."))

    for module in (
        device,
        reductions,
        similarities,
        sys.modules["hubplugin.compute.sinkhorn"],
    ):
        monkeypatch.setattr(module, "to_host", to_host)
    monkeypatch.setattr(reductions, "import_kernels", lambda similarities: None)
    return seen


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="a card is there: test_numerical_truth tries every method on it",
)
@pytest.mark.parametrize("memory", ["1GiB", "1MiB"])
@pytest.mark.parametrize("answers", ["kept", "left out"])
@pytest.mark.parametrize("precision", ["auto", "float64"])
@pytest.mark.parametrize(("method", "parameters"), METHODS)
def test_no_pass_asks_a_card_for_a_value_or_mixes_devices(
    method, parameters, precision, answers, memory, returned, rng
):
    bank, targets, second = (
        rng.normal(size=(rows, 24)).astype(np.float32) for rows in (400, 700, 300)
    )
    targets[350:] = targets[:350]  # copies of answers
    targets = targets.astype(">f8")  # as a file may hold them
    compute = hubplugin.Compute("cuda", memory=memory, precision=precision)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = hubplugin.fit(
            targets,
            hubplugin.Bank(bank, second)
            if method in ("dualis", "dbsn", "blend")
            else bank,
            method,
            answers=answers,
            compute=compute,
            **parameters,
        )
        model.offsets(rng.normal(size=(90, 24)), compute=compute)
    assert max(returned) <= len(
        targets
    )  # nothing of the size of bank x targets comes back
