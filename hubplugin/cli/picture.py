"""The demo's picture: how often the worst hubs come back, before and after, as an SVG that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

INK, QUIET, RAW, CORRECTED = "#1f2933", "#616e7c", "#d64545", "#0f8b8d"
FONT = "font-family='system-ui, sans-serif'"
WIDTH, LEFT, RIGHT, ROW, TOP = 760, 280, 50, 34, 112


@dataclass(frozen=True)
class Hub:
    """One target: its name, and how many queries find it before and after."""

    name: str
    before: int
    after: int


def picture(title: str, before: str, after: str, hubs: Sequence[Hub], usual: float) -> str:
    """Two bars for each hub, on a scale that starts at 0; a line at `usual`, where all would be if all were found
    alike. before, after: what the bars of each colour mean."""
    height = TOP + ROW * len(hubs) + 40
    scale = (WIDTH - LEFT - RIGHT) / max(max(hub.before, hub.after) for hub in hubs)
    at_usual = LEFT + usual * scale
    bottom = TOP + ROW * len(hubs)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img' {FONT}>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{WIDTH}' height='{height}' rx='8' fill='#ffffff'/>",
        _text(24, 34, title, 18, INK, "font-weight='600'"),
        _text(24, 60, before, 13, RAW),
        _text(24, 80, after, 13, CORRECTED),
    ]
    for place, hub in enumerate(hubs):
        parts += _bars(hub, TOP + ROW * place, scale)
    parts += [
        f"<line x1='{at_usual:.1f}' x2='{at_usual:.1f}' y1='{TOP - 4}' y2='{bottom}' stroke='{QUIET}' "
        "stroke-dasharray='3 3'/>",
        _text(at_usual, bottom + 18, f"{usual:g}, if all were found alike", 12, QUIET, "text-anchor='middle'"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bars(hub: Hub, y: float, scale: float) -> list[str]:
    """A hub's name at the left, and beside it its bar before above its bar after, each with its count."""
    parts = [_text(LEFT - 12, y + 18, hub.name, 13, INK, "text-anchor='end'")]
    for count, colour, down in ((hub.before, RAW, 2), (hub.after, CORRECTED, 15)):
        width = count * scale
        parts.append(
            f"<rect x='{LEFT}' y='{y + down}' width='{width:.1f}' height='11' rx='2' fill='{colour}'/>"
            + _text(LEFT + width + 6, y + down + 10, str(count), 12, colour)
        )
    return parts


def _text(x: float, y: float, text: str, size: int, colour: str, further: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{colour}' {further}>{escape(text)}</text>"
