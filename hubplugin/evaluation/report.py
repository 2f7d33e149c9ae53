"""The report of an evaluation: every method, side by side."""

from __future__ import annotations

from hubplugin.evaluation import plots
from hubplugin.evaluation.page import HubLine, Page, Plot, Table, Tile, Verdict, share_tile, sides_tile
from hubplugin.evaluation.result import MethodResult, Results, p_told
from hubplugin.measures.significance import Figure

NEEDS_BANK = "pass example queries (--query-bank)"


def page_of(evaluation: Results) -> Page:
    """What the report of `evaluation` shows."""
    shown, k = evaluation.shown, evaluation.k
    told = evaluation.sentences()
    return Page(
        title="Hubness: every method side by side",
        subtitle=_subtitle(evaluation),
        tiles=_tiles(evaluation, shown),
        k=k,
        verdict=_verdict(evaluation),
        sentences=told,
        examples=evaluation.examples,
        hubs=[
            HubLine(hub.name, hub.found_by["raw"], None if shown is None else hub.found_by[shown.label], hub.thumbnail)
            for hub in evaluation.hubs
        ],
        after="corrected" if shown is None else shown.label,
        anti_hubs=evaluation.anti_hubs,
        plots=_plots(evaluation, shown),
        tables=[_every_method(evaluation), _hubness(evaluation), _banks(evaluation)],
        facts=[("seed", str(evaluation.seed))],
    )


def _subtitle(e: Results) -> str:
    judged = f" ({e.judged:,} with a known true target)" if e.judged != e.queries else ""
    bank = f", a bank of {e.query_bank:,} queries" if e.query_bank else ""
    second = f" and {e.target_bank:,} targets" if e.target_bank else ""
    return f"{e.queries:,} queries{judged}, {e.targets:,} targets, {e.metric} similarity{bank}{second}"


def _tiles(e: Results, shown: MethodResult | None) -> list[Tile]:
    by = "" if shown is None else f"by {shown.label}"
    raw, after = e.raw.hubness, None if shown is None else shown.hubness
    return [
        share_tile(
            "True target first (R@1)", e.raw.recall[1].value, None if shown is None else shown.recall[1].value,
            more_is_better=True, note=by or NEEDS_BANK,
        ),
        share_tile(
            "Queries that find the worst hub", raw.largest / e.queries,
            None if after is None else after.largest / e.queries,
            more_is_better=False, note=f"in their top {e.k}; even: {100 * e.k / e.targets:.1f} %",
        ),
        share_tile(
            "Targets that are never found", raw.anti_hub_share, None if after is None else after.anti_hub_share,
            more_is_better=False, note="by none of these queries",
        ),
        sides_tile(
            None if e.asked is None else (e.asked.before, e.asked.after),
            None if e.not_asked is None else (e.not_asked.before, e.not_asked.after),
            NEEDS_BANK,
        ),
    ]  # fmt: skip


def _verdict(e: Results) -> Verdict | None:
    if all(method.transductive for method in e.methods[1:]):
        return None
    if e.best is None:
        return Verdict(False, "No correction: none is better than the raw search beyond chance")
    versus = e[e.best].versus_raw
    assert versus is not None
    return Verdict(True, f"{e.best} puts more true targets first: {versus.won} queries won, {versus.lost} lost")


def _plots(e: Results, shown: MethodResult | None) -> list[Plot]:
    transductive = any(method.transductive for method in e.methods)
    found = [
        Plot(
            "True target in the first place",
            plots.recall(e.methods, e.best),
            "Bars are 95 % bootstrap intervals over the queries; the dashed line is the raw search."
            + (" Grey squares need every query beforehand: no search can use them." if transductive else ""),
        ),
        Plot(
            "How often targets are found",
            plots.occurrences(
                {"raw": e.raw.occurrences, **({} if shown is None else {shown.label: shown.occurrences})},
                e.k * e.queries / e.targets,
                e.k,
            ),
        ),
    ]
    if e.offsets is not None:
        found.append(Plot("Offsets", plots.offsets(e.offsets.edges, e.offsets.counts), f"Of {e.offsets.label}."))
    if e.sweep:
        note = "Shaded: 95 % intervals. Dashed: the raw search."
        found.append(Plot("Recall against temperature", plots.temperatures(e.sweep, e.raw, e.k), note))
    return found


def _every_method(e: Results) -> Table:
    at = [k for k in e.raw.recall if k > 1]
    columns = ["method", "R@1", "- raw", "won", "lost", "p", *(f"R@{k}" for k in at)]
    columns += ["median rank", "mean rank", f"mAP@{e.k}", f"nDCG@{e.k}", "skewness"]
    rows = []
    for m in e.methods:
        versus = m.versus_raw
        against: list[str | tuple[str, str]] = ["", "", "", ""]
        if versus is not None:
            change = versus.difference
            interval = f"{100 * change.low:+.1f} to {100 * change.high:+.1f}"
            told = p_told(m.adjusted_p).removeprefix("= ")
            against = [(f"{100 * change.value:+.1f}", interval), str(versus.won), str(versus.lost), told]
        name = m.label if m.described == m.label else (m.label, m.described[len(m.label) :])
        figures = [
            *(_figure(m.recall[k], 100, 1) for k in at),
            *(_figure(f, 1, 1) for f in (m.median_rank, m.mean_rank)),
        ]
        figures += [_figure(f, 100, 1) for f in (m.mean_average_precision, m.ndcg)]
        rows.append([name, _figure(m.recall[1], 100, 1), *against, *figures, _figure(m.skewness, 1, 2)])
    return Table(
        "Every method", columns, rows, _marked(e),
        "R@k: per cent of the queries with a true target among the first k. Small figures are 95 % bootstrap "
        "intervals. Ties count by their expected rank. p: McNemar's exact test against the raw search, corrected for "
        "the number of methods (Benjamini-Hochberg).",
    )  # fmt: skip


def _hubness(e: Results) -> Table:
    rows = [
        [
            m.label, f"{m.hubness.skewness:.2f}", f"{m.hubness.kurtosis:.2f}", f"{m.hubness.mean_absolute_error:.2f}",
            str(m.hubness.largest), f"{100 * m.hubness.robin_hood:.1f} %", f"{100 * m.hubness.anti_hub_share:.1f} %",
        ]
        for m in e.methods
    ]  # fmt: skip
    return Table(
        "Hubness of every method",
        ["method", "skewness", "kurtosis", "mean abs. error", "largest", "Robin Hood", "anti-hubs"],
        rows,
        _marked(e),
        f"Of the {e.k}-occurrence: the number of queries that have a target among their first {e.k}. Robin Hood: share "
        "of all finds that would have to move for an even search. Anti-hubs: targets that no query finds.",
    )


def _banks(e: Results) -> Table:
    told = {
        "queries to targets": e.banks.queries_to_targets,
        "query bank to queries": e.banks.query_bank_to_queries,
        "query bank to targets": e.banks.query_bank_to_targets,
        "query bank to both target sets": e.banks.query_bank_to_targets_and_target_bank,
    }
    note = f"Between samples of {e.banks.sample:,} vectors each."
    if e.query_bank:
        note += " The nearer the query bank lies to the queries, the better it stands for them."
    rows = [[name, f"{value:.3f}"] for name, value in told.items() if value is not None]
    return Table("How the banks lie", ["earth mover's distance", ""], rows, note=note)


def _marked(e: Results) -> list[int]:
    return [row for row, method in enumerate(e.methods) if method.label == e.best]


def _figure(figure: Figure, scale: float, digits: int) -> tuple[str, str]:
    value, low, high = (f"{scale * part:.{digits}f}" for part in (figure.value, figure.low, figure.high))
    return value, f"{low} to {high}"
