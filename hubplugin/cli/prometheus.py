"""Figures of `hubplugin monitor` as Prometheus text, for node exporter's textfile collector."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hubplugin.errors import InputError, install

if TYPE_CHECKING:
    from hubplugin.jobs.health import Monitored


def write(path: Path, seen: Monitored) -> None:
    """Puts the figures into the file `path`, in one step. Raises InputError where that cannot be done."""
    try:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
    except ModuleNotFoundError:
        raise InputError(f"--prometheus needs a package that is missing; {install('monitoring')}") from None

    registry, offsets, hubness, gain = CollectorRegistry(), seen.offsets, seen.hubness, seen.gain
    fit = None if hubness is None else hubness.fit
    figures = [
        ("targets", "Targets in the store.", seen.count),
        ("version", "Number of the active version.", seen.version.number),
        ("looked_at", "Targets that were looked at.", offsets.looked_at),
        ("missing_offsets", "Of them, without an offset.", offsets.missing),
        ("stale_offsets", "Of them, with an offset that their vector does not give.", offsets.stale),
        ("foreign_offsets", "Of them, with something else in its place.", offsets.foreign),
        ("offset_shift", "Mean offset in standard deviations of the fit; 0 at the fit.", offsets.shift),
        ("offset_spread", "Standard deviation of the offsets as a share of the fit's.", offsets.spread),
        ("skewness_raw", "Skewness of the 10-occurrence, searched raw.", None if hubness is None else hubness.raw),
        (
            "skewness_corrected",
            "Skewness of the 10-occurrence, corrected.",
            None if hubness is None else hubness.corrected,
        ),
        ("skewness_corrected_at_fit", "What it was at the fit.", None if fit is None else fit.corrected),
        ("query_drift", "Own share of live queries and bank; 0.5: of one kind.", seen.drift),
        ("recall_at_1_raw", "R@1 of recent clicks, searched raw.", None if gain is None else gain.raw[0]),
        ("recall_at_1_corrected", "R@1 of recent clicks, corrected.", None if gain is None else gain.corrected[0]),
        ("attention", "How many things need attention.", len(seen.attention)),
    ]
    for name, what, value in figures:
        if value is not None:
            Gauge(f"hubplugin_{name}", what, ["store"], registry=registry).labels(seen.url).set(value)
    try:
        write_to_textfile(str(path), registry)
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from None
