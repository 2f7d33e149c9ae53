"""The pictures of a report, as SVG whose colours are those of the page, in light and in dark."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hubplugin.errors import InputError
from hubplugin.evaluation.result import MethodResult, SweepPoint
from hubplugin.selection import CurvePoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, LINE, RAW, AFTER, OTHERS = "#010203", "#020304", "#030405", "#040506", ("#040506", "#050607", "#060708", "#070809")
"""What matplotlib is told; the page's own colours take their place, which change with the reader's scheme."""

VARIABLES = {
    INK: "ink", LINE: "line", RAW: "raw", AFTER: "after", OTHERS[1]: "second", OTHERS[2]: "third", OTHERS[3]: "fourth",
}  # fmt: skip


def svg(draw: Callable[[Figure], None]) -> str:
    """What `draw` draws. Raises InputError where matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise InputError(f"the report needs {error.name}: pip install 'hubplugin[evaluation]'") from None
    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "hubplugin", "font.family": "sans-serif", "font.size": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": LINE,
        "axes.axisbelow": True, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK,
        "ytick.color": INK,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        canvas = Canvas(figsize=(5.2, 3.4), layout="constrained")
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


def recall(methods: Sequence[MethodResult], best: str | None) -> str:
    """R@1 of each method with its interval; the first is the raw search."""

    def draw(canvas: Figure) -> None:
        canvas.set_size_inches(5.2, 0.9 + 0.26 * len(methods))
        axes = canvas.add_subplot()
        for row, method in enumerate(methods[::-1]):
            figure = method.recall[1]
            value = 100 * figure.value
            error = [[value - 100 * figure.low], [100 * figure.high - value]]
            axes.errorbar(
                [value], [row], xerr=error, fmt="s" if method.transductive else "o", capsize=3,
                color=RAW if method is methods[0] or method.transductive else AFTER,
                markersize=7 if method.label == best else 5,
            )  # fmt: skip
        axes.axvline(100 * methods[0].recall[1].value, color=RAW, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(methods)), [method.label for method in methods[::-1]])
        axes.set_ylim(-0.6, len(methods) - 0.4)
        axes.set_xlabel("R@1, per cent of the queries")
        axes.grid(axis="y", visible=False)

    return svg(draw)


def occurrences(parts: Mapping[str, Mapping[int, int]], even: float, k: int) -> str:
    """How many targets have the k-occurrence N, by N, of the raw search first. even: N if all were found alike."""

    def draw(canvas: Figure) -> None:
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

    return svg(draw)


def temperatures(sweep: Sequence[SweepPoint], raw: MethodResult, k: int) -> str:
    """R@1 and skewness by temperature."""

    def draw(canvas: Figure) -> None:
        canvas.set_size_inches(5.2, 5.2)
        above, below = canvas.subplots(2, 1, sharex=True)
        for number, method in enumerate(sorted({point.method for point in sweep})):
            points = sorted((p for p in sweep if p.method == method), key=lambda point: point.tau)
            taus, colour = [point.tau for point in points], OTHERS[number % len(OTHERS)]
            above.plot(taus, [100 * p.recall.value for p in points], "o-", color=colour, label=method)
            low, high = ([100 * getattr(p.recall, end) for p in points] for end in ("low", "high"))
            above.fill_between(taus, low, high, color=colour, alpha=0.12, linewidth=0)
            below.plot(taus, [p.skewness for p in points], "o-", color=colour)
        above.axhline(100 * raw.recall[1].value, color=RAW, linestyle="--", label="raw")
        below.axhline(raw.hubness.skewness, color=RAW, linestyle="--")
        ticks = sorted({point.tau for point in sweep})
        below.set_xscale("log")
        below.set_xticks(ticks, [f"{tau:g}" for tau in ticks])
        below.minorticks_off()
        below.set_xlabel("temperature tau")
        above.set_ylabel("R@1, per cent")
        below.set_ylabel(f"skewness of N{k}")
        above.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return svg(draw)


def offsets(edges: Sequence[float], counts: Sequence[int]) -> str:
    """How many targets have which offset."""

    def draw(canvas: Figure) -> None:
        axes = canvas.add_subplot()
        axes.stairs(counts, edges, color=AFTER, fill=True, alpha=0.6)
        axes.axvline(0, color=INK, linestyle=":", linewidth=1)
        axes.set_xlabel("offset: what is added to the similarity of a target")
        axes.set_ylabel("targets")

    return svg(draw)


def curve(points: Sequence[CurvePoint]) -> str:
    """What each size of bank does: R@1 where pairs say it, else hubness."""

    def draw(canvas: Figure) -> None:
        axes = canvas.add_subplot()
        sizes, known = [point.queries for point in points], all(point.gain is not None for point in points)
        values = np.array([100 * (p.gain or 0.0) if known else p.skewness for p in points])
        places = np.arange(len(sizes))  # each size is twice the one before, the first is none
        axes.plot(places, values, "o-", color=AFTER)
        if known:
            errors = np.array([196 * (point.error or 0.0) for point in points])
            axes.fill_between(places, values - errors, values + errors, color=AFTER, alpha=0.15, linewidth=0)
        axes.axhline(values[0], color=RAW, linestyle="--", linewidth=1)
        axes.set_xticks(places, [f"{size:,}" for size in sizes])
        axes.set_xlabel("queries in the bank of the fit")
        axes.set_ylabel("gain of R@1, points" if known else "skewness of what is found")

    return svg(draw)
