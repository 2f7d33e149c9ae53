"""A model as a card in Markdown, as model hubs show beside a file."""

from __future__ import annotations

from collections.abc import Iterator

from hubplugin.model.file import FORMAT, MAPPED_FORMAT
from hubplugin.model.grouped import GroupedModel
from hubplugin.model.offset_model import Dot, LogSumExp, OffsetModel, TopKMean


def card(model: OffsetModel) -> str:
    """What is known of `model` without its data: method, bank, gallery, offsets, and hubness where a job counted it."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(model))
    return f"""# Offsets by {model.method}

One number for each target of a gallery, added to its similarity to a query, so that no target is found by too many
queries and none by none. Made by hubplugin; `hubplugin.load(FILE).offsets(targets)` gives it for targets old and new.

| | |
|---|---|
{rows}

**What to know.** It belongs to vectors of the model that embedded its bank and its gallery, and to no others. The file
holds the vectors of its query bank: treat it like a query log. Gains are known where `apply` or `refit` knew answers;
`hubplugin evaluate` measures them on other queries.
"""


def _rows(model: OffsetModel) -> Iterator[tuple[str, str]]:
    settings = ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in model.parameters.items()
    )
    yield "method", f"{model.method} ({settings})" if settings else model.method
    yield "similarity", f"{model.metric.value}, {model.dim} dimensions"
    banks = {id(term.bank): len(term.bank) for term in model.terms if not isinstance(term, Dot)}
    if banks:
        yield "banks", f"{' and '.join(f'{count:,}' for count in banks.values())} vectors, {model.bank_fingerprint}"
    left_out = any(isinstance(term, (LogSumExp, TopKMean)) and term.answers is not None for term in model.terms)
    yield "answers of the bank", "left out of its sums" if left_out else "not left out"
    if isinstance(model, GroupedModel):
        yield "groups", f"{len(model.groups):,}, by `{model.key}`"
    if model.gallery is not None:
        yield "gallery of the fit", f"{model.gallery.count:,} targets"
        spread = f"{model.gallery.smallest:+.4f} to {model.gallery.largest:+.4f}"
        yield "offsets", f"{spread}, mean 0, standard deviation {model.gallery.deviation:.4f}"
    if model.bound is not None:
        yield "newcomers", f"in {model.bound.share:.2%} of the bank's lists at most"
    if model.query_map is not None:
        yield "query map", f"taught by {model.query_map.pairs:,} pairs, strength {model.query_map.strength:.3g}"
    if model.fold is not None:
        yield "targets folded", f"{len(model.fold.at):,}, strength {model.fold.strength:.3g}"
    counted = model.hubness_at_fit
    if counted is not None:
        skewness = f"{counted.raw:.2f} raw, {counted.corrected:.2f} corrected, {counted.chance:.2f} by chance"
        yield f"skewness of the 10-occurrence, {counted.queries:,} bank queries", skewness
        yield "the most found target, corrected", f"in {counted.largest:.1%} of the lists"
    gain = model.gain_at_fit
    if gain is not None:
        low, high = (100 * (gain.corrected - gain.raw + side * 1.96 * gain.error) for side in (-1, 1))
        shares = (
            f"{100 * gain.raw:.1f} % raw, {100 * gain.corrected:.1f} % corrected ({low:+.1f} to {high:+.1f} points)"
        )
        yield f"right answers first, {gain.queries:,} held-out bank queries", shares
    yield "file", f"format {MAPPED_FORMAT if model.learned else FORMAT}, model {model.fingerprint}"
