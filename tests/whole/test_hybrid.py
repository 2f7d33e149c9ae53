"""The example of a hybrid search: the correction goes with it, and adds to what keywords find."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_correction_adds_to_what_a_hybrid_search_finds(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import with_hybrid

    shares = with_hybrid.main()
    assert shares["hybrid, raw"] > shares["dense, raw"]
    assert shares["hybrid, corrected"] > shares["hybrid, raw"] + 0.01
    assert shares["hybrid, corrected"] == max(shares.values())
    assert capsys.readouterr().out.count("among the first ten") == 4
