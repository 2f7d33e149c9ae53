"""`Evaluation`: the results, and the files they are written to."""

from __future__ import annotations

import csv
import io
import os

from hubplugin.evaluation import page
from hubplugin.evaluation.report import page_of
from hubplugin.evaluation.result import MethodResult, Results


class Evaluation(Results):
    """What `evaluate` returns: the results, which are printed as a table and written as JSON, CSV or HTML."""

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes everything but the single queries' ranks. Raises InputError where `path` cannot be written."""
        page.write_text(path, self.model_dump_json(indent=1) + "\n")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes one line a method; intervals as `<figure> low` and `<figure> high`. Raises as `to_json` does."""
        rows = [_flat(method) for method in self.methods]
        content = io.StringIO()
        writer = csv.DictWriter(content, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        page.write_text(path, content.getvalue())

    def to_html(self, path: str | os.PathLike[str], command: str | None = None) -> None:
        """Writes the report: one file, which refers to nothing outside itself. command: what was typed, which the
        report then names. Raises as `to_json` does."""
        page.write(page_of(self), path, command)


def _flat(method: MethodResult) -> dict[str, object]:
    figures = {f"R@{k}": figure for k, figure in method.recall.items()} | {
        "median rank": method.median_rank,
        "mean rank": method.mean_rank,
        "mAP": method.mean_average_precision,
        "nDCG": method.ndcg,
        "skewness": method.skewness,
    }
    row: dict[str, object] = {"label": method.label, "method": method.method}
    row["parameters"] = " ".join(f"{key}={value}" for key, value in method.parameters.items())
    for name, figure in figures.items():
        row |= {name: figure.value, f"{name} low": figure.low, f"{name} high": figure.high}
    hubness = vars(method.hubness)
    row |= {key.replace("_", " "): value for key, value in hubness.items() if key != "skewness"}
    versus = method.versus_raw
    row |= {
        "won": versus.won if versus else "",
        "lost": versus.lost if versus else "",
        "p": versus.p if versus else "",
        "adjusted p": method.adjusted_p if versus else "",
    }
    return row
