"""The pictures of a report, as SVG whose colours are those of the page, in light and in dark."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hubplugin.errors import InputError, install
from hubplugin.measures.significance import Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

INK, LINE, RAW, AFTER = "#010203", "#020304", "#030405", "#040506"
"""What matplotlib is told; the page's own colours take their place, which change with the reader's scheme."""

VARIABLES = {INK: "ink", LINE: "line", RAW: "raw", AFTER: "after"}


Draw: TypeAlias = "Callable[[Canvas], None]"


def svg(draw: Draw) -> str:
    """What `draw` draws. Raises InputError where matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as Drawing
    except ImportError as error:
        raise InputError(f"the report needs {error.name}; {install('evaluation')}") from None
    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "hubplugin", "font.family": "sans-serif", "font.size": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": LINE,
        "axes.axisbelow": True, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK,
        "ytick.color": INK,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        canvas = Drawing(figsize=(5.2, 3.4), layout="constrained")
        draw(canvas)
        content = io.StringIO()
        canvas.savefig(
            content,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
            transparent=True,
        )
    text = content.getvalue()
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text[text.index("<svg") :].replace('width="', 'data-width="', 1).replace('height="', 'data-height="', 1)


@dataclass(frozen=True)
class Bar:
    """A share with its interval. quiet: drawn as the raw search is. square: and as a square; marked: larger."""

    label: str
    share: Figure
    quiet: bool = False
    square: bool = False
    marked: bool = False


def recall(bars: Sequence[Bar]) -> Draw:
    """R@1 of each method; the first is the raw search."""

    def draw(canvas: Canvas) -> None:
        canvas.set_size_inches(5.2, 0.9 + 0.26 * len(bars))
        axes = canvas.add_subplot()
        for row, bar in enumerate(bars[::-1]):
            figure = bar.share
            value = 100 * figure.value
            error = [[value - 100 * figure.low], [100 * figure.high - value]]
            axes.errorbar(
                [value],
                [row],
                xerr=error,
                fmt="s" if bar.square else "o",
                capsize=3,
                color=RAW if bar.quiet else AFTER,
                markersize=7 if bar.marked else 5,
            )
        axes.axvline(100 * bars[0].share.value, color=RAW, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars[::-1]])
        axes.set_ylim(-0.6, len(bars) - 0.4)
        axes.set_xlabel("R@1, per cent of the queries")
        axes.grid(axis="y", visible=False)

    return draw


def occurrences(parts: Mapping[str, Mapping[int, int]], even: float, k: int) -> Draw:
    """How many targets have the k-occurrence N, by N, of the raw search first. even: N if all were found alike."""

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot()
        largest = max(max(part, default=0) for part in parts.values())
        width = 1 + largest // 40
        edges = np.arange(0, largest + width + 1, width) - 0.5
        for (label, part), colour, filled in zip(parts.items(), (RAW, AFTER), (True, False), strict=False):
            counts, _ = np.histogram(np.array([*part]), edges, weights=np.array([*part.values()]))
            axes.stairs(counts, edges, color=colour, fill=filled, alpha=0.45 if filled else 1, linewidth=2, label=label)
        axes.axvline(even, color=INK, linestyle=":", linewidth=1, label=f"even: {even:.3g}")
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"queries that find a target among their first {k}")
        axes.set_ylabel("targets")
        axes.legend(frameon=False)

    return draw


def offsets(edges: Sequence[float], counts: Sequence[int]) -> Draw:
    """How many targets have which offset."""

    def draw(canvas: Canvas) -> None:
        axes = canvas.add_subplot()
        axes.stairs(counts, edges, color=AFTER, fill=True, alpha=0.6)
        axes.axvline(0, color=INK, linestyle=":", linewidth=1)
        axes.set_xlabel("offset: what is added to the similarity of a target")
        axes.set_ylabel("targets")

    return draw
