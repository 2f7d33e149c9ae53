"""A fit within groups by the default method: what is common, and what is each group's own."""

import numpy as np
import pytest

import hubplugin
from hubplugin.bank import Bank
from hubplugin.compute import Compute
from hubplugin.jobs.correct import fit_within
from hubplugin.jobs.write import Members
from hubplugin.methods import configure
from hubplugin.metric import Metric
from hubplugin.model import OffsetModel


@pytest.mark.parametrize("method", ["blend", "nnn", "dbsn", "dn", "dualis"])
def test_each_group_is_fitted_as_if_it_were_alone(method, rng):
    centre = 2 * rng.standard_normal(12)
    targets = (centre + rng.standard_normal((300, 12))).astype(np.float32)
    bank = (
        targets[rng.integers(0, 300, 80)] + 0.3 * rng.standard_normal((80, 12))
    ).astype(np.float32)
    second = (
        (centre + rng.standard_normal((50, 12))).astype(np.float32)
        if method == "dualis"
        else None
    )
    given = Bank(bank, second).prepare(Metric.COSINE, Compute()).against(targets)
    rows = {"a": np.arange(0, 130), "b": np.arange(130, 300)}
    members = [
        (value, Members(value, given.targets, some)) for value, some in rows.items()
    ]
    configuration = configure(method, answers="left out")
    model, neutral, _ = fit_within(given, configuration, "kind", members, force=True)
    assert not neutral
    # The temperature and the strength of blend are those of the whole gallery.
    common = {
        name: value for name, value in model.parameters.items() if name != "answers"
    }
    # Like the others, and on the far side, which no bank query is near, so that the cap of each group is reached.
    late = np.concatenate(
        [
            centre + rng.standard_normal((20, 12)),
            -3 * centre + rng.standard_normal((20, 12)),
        ]
    )
    for value, some in rows.items():
        alone = hubplugin.fit(
            targets[some],
            hubplugin.Bank(bank, second),
            method,
            answers="left out",
            **common,
        )
        assert alone.offsets(late).max() == np.float32(alone.gallery.cap)
        for vectors in (targets[some], late):
            found = model.offsets(vectors, groups=[value] * len(vectors))
            np.testing.assert_allclose(found, alone.offsets(vectors), atol=2e-6)
    loaded = OffsetModel.from_bytes(model.to_bytes())
    groups = ["a", "b", None, "b"] * 10
    assert np.array_equal(
        loaded.offsets(late, groups=groups), model.offsets(late, groups=groups)
    )
    assert loaded.fingerprint == model.fingerprint
    with pytest.raises(hubplugin.InputError, match="pass groups="):
        model.offsets(late)
    with pytest.raises(hubplugin.errors.ModelFileError, match="damaged"):
        OffsetModel.from_bytes(model.to_bytes()[:-1] + b"\0\0", "model")
