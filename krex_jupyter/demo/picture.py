"""The region timeline as an SVG: who compiled, waited and held the device when, one panel per policy. Pure.

No style sheet of a page can be relied on (the file is shown by GitHub, by an ``<img>`` in a notebook, by a
browser), so the colours are in the file, mid-tones that read on white and on black, and the text colour
follows ``prefers-color-scheme``. No meaning is carried by colour alone: held regions are also the tall bars,
paused time is hatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from xml.sax.saxutils import escape, quoteattr

Kind: TypeAlias = Literal["compile", "check", "wait", "held", "paused"]

_FILL: Final[dict[Kind, str]] = {
    "compile": "#5b9bd5",
    "check": "#45a89b",
    "wait": "url(#waiting)",
    "held": "#e08214",
    "paused": "url(#paused)",
}
_LEGEND: Final[tuple[tuple[Kind, str], ...]] = (
    ("compile", "compiles"),
    ("check", "checks"),
    ("wait", "waits for the device"),
    ("held", "enters and holds it"),
    ("paused", "paused by another's region"),
)
_ORDER: Final[tuple[Kind, ...]] = ("held", "compile", "check", "paused", "wait")
"""Painted in this order: work done while holding lies within the tall bar, paused time over what it cuts.
A waiter may be paused too, and nothing is lost by that, so waiting covers it."""

_WIDTH = 960
_LEFT = 90
_RIGHT = 20
_LANE = 26
_BAR = 16


@dataclass(frozen=True)
class Span:
    """Something that one agent did; seconds since the panel's start."""

    lane: int
    kind: Kind
    start_s: float
    end_s: float
    title: str = ""


@dataclass(frozen=True)
class Panel:
    """One policy's timeline."""

    title: str
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]


def draw(panels: Sequence[Panel], window_s: float) -> str:
    """The picture: panels under each other, each showing its first ``window_s`` seconds on one scale."""
    top = 16.0
    body: list[str] = []
    for panel in panels:
        body.append(f'<text class="title" x="{_LEFT}" y="{top + 12:.0f}">{escape(panel.title)}</text>')
        top += 22
        body += _panel(panel, top, window_s)
        top += _LANE * len(panel.lanes)
        body += _axis(top, window_s)
        top += 34
    body += _legend(top)
    height = round(top + 26)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="Timeline of exclusive regions">\n{_STYLE}\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


_STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #333; }
.title { font-weight: 600; font-size: 13px; }
.axis { stroke: #888; stroke-width: 1; }
.track { fill: #888; fill-opacity: 0.12; }
@media (prefers-color-scheme: dark) { text { fill: #ddd; } }
</style>
<defs>
<pattern id="paused" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="#bdbdbd" fill-opacity="0.8"/>
<rect width="2" height="6" fill="#666"/></pattern>
<pattern id="waiting" width="4" height="4" patternUnits="userSpaceOnUse">
<rect width="1.5" height="1.5" fill="#888"/></pattern>
</defs>"""


def _x(seconds: float, window_s: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(max(seconds / window_s, 0.0), 1.0)


def _panel(panel: Panel, top: float, window_s: float) -> list[str]:
    shapes: list[str] = []
    for lane, name in enumerate(panel.lanes):
        y = top + lane * _LANE
        shapes.append(f'<text x="{_LEFT - 8}" y="{y + 16:.1f}" text-anchor="end">{escape(name)}</text>')
        shapes.append(
            f'<rect class="track" x="{_LEFT}" y="{y + 4:.1f}" '
            f'width="{_WIDTH - _LEFT - _RIGHT}" height="{_BAR}"/>'
        )
    for span in sorted(panel.spans, key=lambda span: _ORDER.index(span.kind)):
        if span.start_s >= window_s or span.end_s <= 0:
            continue
        left, right = _x(span.start_s, window_s), _x(span.end_s, window_s)
        tall = 6 if span.kind == "held" else 0
        y = top + span.lane * _LANE + 4 - tall / 2
        title = f"<title>{escape(span.title)}</title>" if span.title else ""
        shapes.append(
            f'<rect x="{left:.2f}" y="{y:.1f}" width="{max(right - left, 0.4):.2f}" height="{_BAR + tall}" '
            f"fill={quoteattr(_FILL[span.kind])}>{title}</rect>"
        )
    return shapes


def _axis(y: float, window_s: float) -> list[str]:
    shapes = [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y + 2:.1f}" y2="{y + 2:.1f}"/>']
    step = next((step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60) if window_s / step <= 10), 120)
    tick = 0.0
    while tick <= window_s + 1e-9:
        x = _x(tick, window_s)
        shapes.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 2:.1f}" y2="{y + 6:.1f}"/>')
        shapes.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{tick:g} s</text>')
        tick += step
    return shapes


def _legend(top: float) -> list[str]:
    shapes: list[str] = []
    x = float(_LEFT)
    for kind, text in _LEGEND:
        shapes.append(
            f'<rect x="{x:.0f}" y="{top:.0f}" width="18" height="12" stroke="#888" '
            f"fill={quoteattr(_FILL[kind])}/>"
        )
        shapes.append(f'<text x="{x + 24:.0f}" y="{top + 10:.0f}">{escape(text)}</text>')
        x += 44 + 6.6 * len(text)
    return shapes
