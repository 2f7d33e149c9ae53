from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_calibration_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than elsewhere: by six, too few candidates are chosen for what the tests demand."""
    monkeypatch.setattr("hubplugin.calibration.QUERIES", 24)
