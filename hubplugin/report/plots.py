"""The pictures of a page, as SVG whose colours are those of the page, in light and in dark."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hubplugin.measures.significance import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, LINE, RAW, AFTER = "#010203", "#020304", "#030405", "#040506"
"""What matplotlib is told; the page's own colours take their place, which change with the reader's scheme."""

VARIABLES = {INK: "ink", LINE: "line", RAW: "raw", AFTER: "after"}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "hubplugin", "font.family": "sans-serif", "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": LINE, "axes.axisbelow": True,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip


def svg(draw: Callable[[Axes], None]) -> str:
    """What `draw` draws."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(STYLE):
        canvas, content = (
            Canvas(figsize=(5.2, 3.4), layout="constrained"),
            io.StringIO(),
        )
        draw(canvas.add_subplot())
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.savefig(content, format="svg", metadata=nothing, transparent=True)
    text = content.getvalue()
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return (
        text[text.index("<svg") :]
        .replace('width="', 'data-width="', 1)
        .replace('height="', 'data-height="', 1)
    )


def recall(
    axes: Axes,
    shares: Sequence[tuple[str, Figure]],
    unusable: set[str],
    best: str | None,
) -> None:
    """Draws R@1 of each method.

    Args:
        axes: drawn on.
        shares: R@1 by label; the first is the raw search.
        unusable: the labels of those that no search can use.
        best: the label of the best.
    """
    raw = shares[0]
    axes.figure.set_size_inches(5.2, 0.9 + 0.26 * len(shares))  # type: ignore[union-attr]
    for row, (label, share) in enumerate(shares[::-1]):
        value, low, high = 100 * share.value, 100 * share.low, 100 * share.high
        quiet = label == raw[0] or label in unusable
        axes.errorbar(
            [value],
            [row],
            xerr=[[value - low], [high - value]],
            fmt="s" if label in unusable else "o",
            capsize=3,
            color=RAW if quiet else AFTER,
            markersize=7 if label == best else 5,
        )
    axes.axvline(100 * raw[1].value, color=RAW, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(shares)), [label for label, _ in shares[::-1]])
    axes.set_ylim(-0.6, len(shares) - 0.4)
    axes.set_xlabel("R@1, per cent of the queries")
    axes.grid(axis="y", visible=False)


def occurrences(
    axes: Axes, parts: Mapping[str, Mapping[int, int]], even: float, k: int
) -> None:
    """Draws how many targets have the k-occurrence N, by N.

    Args:
        axes: drawn on.
        parts: the counts by label; the first are those of the raw search.
        even: N if all targets were found alike.
        k: of the k-occurrence.
    """
    largest = max(max(part, default=0) for part in parts.values())
    width = 1 + largest // 40
    edges = np.arange(0, largest + width + 1, width) - 0.5
    for (label, part), colour, filled in zip(
        parts.items(), (RAW, AFTER), (True, False), strict=False
    ):
        counts, _ = np.histogram(
            np.array([*part]), edges, weights=np.array([*part.values()])
        )
        axes.stairs(
            counts,
            edges,
            color=colour,
            fill=filled,
            alpha=0.45 if filled else 1,
            linewidth=2,
            label=label,
        )
    axes.axvline(even, color=INK, linestyle=":", linewidth=1, label=f"even: {even:.3g}")
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"queries that find a target among their first {k}")
    axes.set_ylabel("targets")
    axes.legend(frameon=False)


def offsets(axes: Axes, edges: Sequence[float], counts: Sequence[int]) -> None:
    """Draws on `axes` how many targets, `counts`, have offsets between two `edges`."""
    axes.stairs(counts, edges, color=AFTER, fill=True, alpha=0.6)
    axes.axvline(0, color=INK, linestyle=":", linewidth=1)
    axes.set_xlabel("offset: what is added to the similarity of a target")
    axes.set_ylabel("targets")
