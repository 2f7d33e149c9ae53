"""An evaluation as one HTML file that refers to nothing outside itself and reads well on a phone."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hubplugin.errors import InputError
from hubplugin.evaluation.result import MethodResult, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RAW_COLOUR, OTHER_COLOURS = "#8a8f98", ("#0b6e4f", "#c2410c", "#1d4ed8", "#7e22ce")


def render(evaluation: Results) -> str:
    """The report of `evaluation`. Raises InputError where matplotlib or Jinja2 is missing."""
    try:
        import matplotlib  # noqa: F401
        from jinja2 import Environment, PackageLoader
    except ImportError as error:
        raise InputError(f"the report needs {error.name}: pip install 'hubplugin[evaluation]'") from None
    shown = corrected(evaluation)
    environment = Environment(
        loader=PackageLoader("hubplugin.evaluation", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page: str = environment.get_template("report.html").render(
        e=evaluation,
        shown=shown,
        recall_plot=_svg(_draw_recall, evaluation),
        occurrence_plot=_svg(_draw_occurrence, evaluation),
        temperature_plot=_svg(_draw_temperature, evaluation) if evaluation.sweep else None,
    )
    return page


def corrected(evaluation: Results) -> MethodResult | None:
    """The method that is shown beside the raw search: the best one, or else the usable one of the highest R@1."""
    if evaluation.best is not None:
        return evaluation[evaluation.best]
    usable = [method for method in evaluation.methods[1:] if not method.transductive]
    return max(usable, key=lambda method: method.recall[1].value, default=None)


def _svg(draw: Callable[[Figure, Results], None], evaluation: Results) -> str:
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "hubplugin", "font.family": "sans-serif", "font.size": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e5e7eb",
        "axes.axisbelow": True,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        canvas = Canvas(figsize=(5.2, 3.4), layout="constrained")
        draw(canvas, evaluation)
        content = io.StringIO()
        canvas.savefig(
            content,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
            transparent=True,
        )
    text = content.getvalue()
    return text[text.index("<svg") :].replace('width="', 'data-width="', 1).replace('height="', 'data-height="', 1)


def _draw_recall(canvas: Figure, evaluation: Results) -> None:
    methods = evaluation.methods[::-1]
    canvas.set_size_inches(5.2, 0.9 + 0.26 * len(methods))
    axes = canvas.add_subplot()
    figures = [method.recall[1] for method in methods]
    values = np.array([100 * figure.value for figure in figures])
    errors = np.abs(
        np.array([[100 * figure.low for figure in figures], [100 * figure.high for figure in figures]]) - values
    )
    for row, method in enumerate(methods):
        raw = method is evaluation.raw
        colour = RAW_COLOUR if raw or method.transductive else OTHER_COLOURS[0]
        axes.errorbar(
            values[row], row, xerr=errors[:, row : row + 1], fmt="o" if not method.transductive else "s", color=colour,
            capsize=3, markersize=7 if method.label == evaluation.best else 5,
        )  # fmt: skip
    axes.axvline(100 * evaluation.raw.recall[1].value, color=RAW_COLOUR, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(methods)), [method.label for method in methods])
    axes.set_ylim(-0.6, len(methods) - 0.4)
    axes.set_xlabel("R@1, per cent of the queries")
    axes.grid(axis="y", visible=False)


def _draw_occurrence(canvas: Figure, evaluation: Results) -> None:
    axes = canvas.add_subplot()
    shown = corrected(evaluation)
    largest = max(method.hubness.largest for method in (evaluation.raw, shown) if method is not None)
    width = 1 + largest // 40
    edges = np.arange(0, largest + width + 1, width) - 0.5
    for method, colour, filled in ((evaluation.raw, RAW_COLOUR, True), (shown, OTHER_COLOURS[0], False)):
        if method is None:
            continue
        found, targets = np.array(list(method.occurrences)), np.array(list(method.occurrences.values()))
        counts, _ = np.histogram(found, edges, weights=targets)
        axes.stairs(
            counts, edges, color=colour, fill=filled, alpha=0.45 if filled else 1, linewidth=2, label=method.label
        )
    mean = evaluation.k * evaluation.queries / evaluation.targets
    axes.axvline(mean, color="black", linestyle=":", linewidth=1, label=f"even: {mean:.3g}")
    axes.set_yscale("symlog", linthresh=1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"queries that find a target among their first {evaluation.k}")
    axes.set_ylabel("targets")
    axes.legend(frameon=False)


def _draw_temperature(canvas: Figure, evaluation: Results) -> None:
    canvas.set_size_inches(5.2, 5.2)
    recall, skewness = canvas.subplots(2, 1, sharex=True)
    for number, method in enumerate(sorted({point.method for point in evaluation.sweep})):
        points = sorted((p for p in evaluation.sweep if p.method == method), key=lambda point: point.tau)
        taus, colour = [point.tau for point in points], OTHER_COLOURS[number % len(OTHER_COLOURS)]
        recall.plot(taus, [100 * point.recall.value for point in points], "o-", color=colour, label=method)
        recall.fill_between(
            taus, [100 * p.recall.low for p in points], [100 * p.recall.high for p in points], color=colour, alpha=0.12,
            linewidth=0,
        )  # fmt: skip
        skewness.plot(taus, [point.skewness for point in points], "o-", color=colour)
    recall.axhline(100 * evaluation.raw.recall[1].value, color=RAW_COLOUR, linestyle="--", label="raw")
    skewness.axhline(evaluation.raw.hubness.skewness, color=RAW_COLOUR, linestyle="--")
    taus = sorted({point.tau for point in evaluation.sweep})
    skewness.set_xscale("log")
    skewness.set_xticks(taus, [f"{tau:g}" for tau in taus])
    skewness.minorticks_off()
    skewness.set_xlabel("temperature tau")
    recall.set_ylabel("R@1, per cent")
    skewness.set_ylabel(f"skewness of N{evaluation.k}")
    recall.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
