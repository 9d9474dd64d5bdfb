"""What `measure` and `compare` return: numbers with their verdict, as data, as tables and for a notebook.

Nothing here measures. The JSON is versioned by its mime type; the HTML shows pictures as ``<img>`` with a data
URL, so that it survives JupyterLab's sanitizer, GitHub and nbviewer.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from krex_jupyter.display import SIGNS, badge_html, seconds, table_html, table_text
from krex_jupyter.errors import KrexError
from krex_jupyter.protocol import Part, Reason, RegionReport, ReportDevice, Verdict

from .statistics import Relation
from .timers import Cache

MEASUREMENT_MIME = "application/vnd.krex.measurement.v1+json"
COMPARISON_MIME = "application/vnd.krex.comparison.v1+json"
MOST_SAMPLES_SHOWN = 1000
"""Samples in a notebook's JSON; more are thinned out evenly. `Measurement.samples_s` has all."""


class Measurement(Part, frozen=True, kw_only=True):
    """One number, what it rests on, and whether it may be trusted."""

    version: int = 1
    label: str
    device: ReportDevice
    verdict: Verdict
    """Of the region, and at least `suspect` where the samples themselves give a reason."""
    reasons: tuple[Reason, ...]
    valid: bool
    """False: ``check`` failed, so that its speed is of no interest."""
    settled: bool
    """The median is known to ``precision`` within this region. False: it ended with what it had; see `reasons`."""
    precision: float
    median_s: float | None
    """None: nothing was sampled (the check failed before the region)."""
    mean_s: float | None = None
    min_s: float | None = None
    stdev_s: float | None = None
    ci95_s: tuple[float, float] | None = None
    """Of the median; None below the smallest number of effective samples that can carry it."""
    ci99_s: tuple[float, float] | None = None
    n: int = 0
    n_effective: float = 0.0
    outlier_share: float | None = None
    mean_over_min: float | None = None
    samples_s: tuple[float, ...] = ()
    """In the order taken; none is left out. With ``batch`` above 1 each is the mean of its calls."""
    batch: int = 1
    timer: str = ""
    cache: Cache = "warm"
    clock_mhz: tuple[float, ...] | None = None
    """SM clock before and after the samples; None where there is none, or it could not be read."""
    temperature_c: tuple[float, ...] | None = None
    warm_up_s: float = 0.0
    """Warm-up inside the region; part of the held time."""
    notes: tuple[str, ...] = ()
    region: RegionReport | None = None
    """None: nothing was held, or the measurement was made inside a region that is still held."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, all samples included."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def to_pandas(self) -> Any:
        """The samples as a DataFrame (``sample``, ``seconds``); all else is in its ``attrs``."""
        frame = _pandas().DataFrame({"sample": range(len(self.samples_s)), "seconds": self.samples_s})
        frame.attrs = {name: value for name, value in self.to_dict().items() if name != "samples_s"}
        return frame

    def __str__(self) -> str:
        return measurement_text(self)

    def __repr__(self) -> str:
        return measurement_text(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        shown = self.to_dict()
        shown["samples_s"] = thinned(self.samples_s)
        return {
            "text/plain": measurement_text(self),
            "text/html": measurement_html(self),
            MEASUREMENT_MIME: shown,
        }


class Candidate(Part, frozen=True, kw_only=True):
    """One candidate of a comparison."""

    name: str
    valid: bool
    error: str = ""
    """Why there is no (further) number of it; empty where nothing went wrong."""
    median_s: float | None = None
    """Median over the blocks' medians."""
    blocks: int = 0
    samples: int = 0
    batch: int = 1
    timer: str = ""
    cache: Cache = "warm"
    notes: tuple[str, ...] = ()


class PairRelation(Part, frozen=True, kw_only=True):
    """How two candidates compare; a ratio below 1 means that ``first`` takes less time."""

    first: str
    second: str
    ratio: float
    interval: tuple[float, float]
    """Adjusted for all pairs (Holm), at ``level``."""
    level: float
    relation: Relation
    blocks: int
    needs: str = ""
    """UNRESOLVED: what a decision would take."""


class Ranked(Part, frozen=True, kw_only=True):
    """A place in the ranking; members of one group were not shown to be slower than its first."""

    name: str
    group: int
    median_s: float
    flip_risk: float | None
    """Chance that the next one is faster in a repetition; None for the last."""


class Comparison(Part, frozen=True, kw_only=True):
    """Who is faster, with what certainty, and what the regions were worth."""

    version: int = 1
    device: ReportDevice
    verdict: Verdict
    """The worst of the regions'."""
    reasons: tuple[Reason, ...]
    margin: float
    candidates: tuple[Candidate, ...]
    pairs: tuple[PairRelation, ...]
    ranking: tuple[Ranked, ...]
    block_medians_s: tuple[tuple[dict[str, float], ...], ...]
    """By region and block."""
    regions: tuple[RegionReport, ...]
    notes: tuple[str, ...] = ()

    def relation(self, first: str, second: str) -> Relation:
        """How ``first`` compares with ``second``; UNRESOLVED where they were not compared. Raises `KeyError`."""
        for name in (first, second):
            if name not in {candidate.name for candidate in self.candidates}:
                raise KeyError(name)
        for pair in self.pairs:
            if (pair.first, pair.second) == (first, second):
                return pair.relation
            if (pair.first, pair.second) == (second, first):
                return _OPPOSITE[pair.relation]
        return "UNRESOLVED"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def to_pandas(self) -> Any:
        """The pairs as a DataFrame."""
        rows = [msgspec.to_builtins(pair) for pair in self.pairs]
        return _pandas().DataFrame(rows, columns=list(PairRelation.__struct_fields__))

    def __str__(self) -> str:
        return comparison_text(self)

    def __repr__(self) -> str:
        return comparison_text(self)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return {
            "text/plain": comparison_text(self),
            "text/html": comparison_html(self),
            COMPARISON_MIME: self.to_dict(),
        }


_OPPOSITE: dict[Relation, Relation] = {
    "FASTER": "SLOWER",
    "SLOWER": "FASTER",
    "TIE": "TIE",
    "UNRESOLVED": "UNRESOLVED",
}


def thinned(samples_s: Sequence[float]) -> list[float]:
    """At most `MOST_SAMPLES_SHOWN` of the samples, evenly spread."""
    count = len(samples_s)
    if count <= MOST_SAMPLES_SHOWN:
        return list(samples_s)
    return [samples_s[position * count // MOST_SAMPLES_SHOWN] for position in range(MOST_SAMPLES_SHOWN)]


# --- One measurement -----------------------------------------------------------------------------------------------


def measurement_text(measurement: Measurement) -> str:
    """Two lines: the number with its interval and verdict; how it was taken. Then each reason and note."""
    lines = [f"{_number(measurement)} · {SIGNS[measurement.verdict]} {measurement.verdict}"]
    if not measurement.valid:
        lines[0] += " · INVALID"
    if measurement.median_s is not None:
        lines.append(_how(measurement))
    lines += [f"{reason.code}: {reason.detail}" for reason in measurement.reasons]
    lines += [f"note: {note}" for note in measurement.notes]
    return "\n".join(lines)


def measurement_html(measurement: Measurement) -> str:
    """The badge and the number, the samples as a picture, the reasons, and behind a click the rest."""
    label = f" &nbsp; <i>{escape(measurement.label)}</i>" if measurement.label else ""
    invalid = "" if measurement.valid else " &nbsp; <b>INVALID: the check failed</b>"
    reasons = "".join(
        f"<li><code>{escape(reason.code)}</code>: {escape(reason.detail)}</li>"
        for reason in measurement.reasons
    ) + "".join(f"<li>{escape(note)}</li>" for note in measurement.notes)
    picture = "" if len(measurement.samples_s) < 2 else f"<div>{_picture_html(measurement)}</div>"
    return (
        f"<div>{badge_html(measurement.verdict)} &nbsp; <b>{escape(_number(measurement))}</b>{label}{invalid}"
        f"{picture}"
        + (f"<ul>{reasons}</ul>" if reasons else "")
        + f"<div>{escape(_how(measurement))}</div></div>"
    )


def _number(measurement: Measurement) -> str:
    if measurement.median_s is None:
        return "no number"
    if measurement.ci95_s is None:
        return f"{seconds(measurement.median_s)} (median; too few samples for an interval)"
    low_s, high_s = measurement.ci95_s
    half = max(high_s - measurement.median_s, measurement.median_s - low_s) / measurement.median_s
    return f"{seconds(measurement.median_s)} ± {100 * half:.2g}% (median, 95%)"


def _how(measurement: Measurement) -> str:
    if measurement.median_s is None or measurement.mean_s is None or measurement.min_s is None:
        return measurement.device.id
    calls = "" if measurement.batch == 1 else f" of {measurement.batch} calls"
    words = [
        f"mean {seconds(measurement.mean_s)}",
        f"min {seconds(measurement.min_s)}",
        f"{measurement.n} samples{calls} ({measurement.n_effective:.0f} effective)",
        measurement.timer,
        f"{measurement.cache} cache",
        measurement.device.id,
    ]
    if measurement.outlier_share:
        words.insert(3, f"{100 * measurement.outlier_share:.2g}% outliers")
    if measurement.clock_mhz:
        words.append(f"{measurement.clock_mhz[-1]:.0f} MHz")
    if measurement.region is not None:
        words.append(
            f"waited {seconds(measurement.region.wait_s)}, held {seconds(measurement.region.held_s)}"
        )
    return " · ".join(words)


def _picture_html(measurement: Measurement) -> str:
    """The samples over time as dots, with the median as a line; outliers sit at the upper edge."""
    samples_s = thinned(measurement.samples_s)
    ordered = sorted(samples_s)
    low, high = ordered[0], ordered[min(int(len(ordered) * 0.98), len(ordered) - 1)]
    span = (high - low) or high or 1.0
    width, height, edge = 420, 72, 6

    def y(value_s: float) -> float:
        share = min(max((value_s - low) / span, 0.0), 1.0)
        return height - edge - share * (height - 2 * edge)

    step = (width - 2 * edge) / max(len(samples_s) - 1, 1)
    dots = "".join(
        f'<circle cx="{edge + position * step:.1f}" cy="{y(value_s):.1f}" r="1.6"/>'
        for position, value_s in enumerate(samples_s)
    )
    middle = y(measurement.median_s or low)
    words = f"{len(samples_s)} samples from {seconds(ordered[0])} to {seconds(ordered[-1])}"
    return _image(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">'
        f'<rect width="{width}" height="{height}" rx="4" fill="#f6f8fa"/>'
        f'<line x1="{edge}" x2="{width - edge}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="#187a4b"/>'
        f'<g fill="#57606a">{dots}</g></svg>',
        words,
    )


# --- A comparison --------------------------------------------------------------------------------------------------


def comparison_text(comparison: Comparison) -> str:
    """The ranking, the pairs, what failed, the verdict."""
    held_s = sum(region.held_s for region in comparison.regions)
    first = (
        f"{SIGNS[comparison.verdict]} {comparison.verdict} · {len(comparison.candidates)} candidates on "
        f"{comparison.device.id} · margin {100 * comparison.margin:g}% · {len(comparison.regions)} regions, "
        f"held {seconds(held_s)}"
    )
    lines = [first]
    if comparison.ranking:
        lines.append(table_text(_RANKING_HEADER, _ranking_rows(comparison)))
    if comparison.pairs:
        lines.append(table_text(_PAIRS_HEADER, _pair_rows(comparison)))
    lines += [
        f"{candidate.name}: {candidate.error}" for candidate in comparison.candidates if candidate.error
    ]
    lines += [f"{reason.code}: {reason.detail}" for reason in comparison.reasons]
    lines += [f"note: {note}" for note in _notes(comparison)]
    return "\n".join(lines)


def comparison_html(comparison: Comparison) -> str:
    """The badge, the ranking with bars, the pairs behind a click, and what failed."""
    failed = [
        f"{candidate.name}: {candidate.error}" for candidate in comparison.candidates if candidate.error
    ]
    points = [
        *failed,
        *(f"{reason.code}: {reason.detail}" for reason in comparison.reasons),
        *_notes(comparison),
    ]
    items = "".join(f"<li>{escape(point)}</li>" for point in points)
    return (
        f"<div>{badge_html(comparison.verdict)} &nbsp; margin {100 * comparison.margin:g}%"
        + (f"<div>{_bars_html(comparison)}</div>" if comparison.ranking else "")
        + (
            table_html(_RANKING_HEADER, _ranking_rows(comparison), numeric=(0, 2, 3))
            if comparison.ranking
            else ""
        )
        + (f"<ul>{items}</ul>" if items else "")
        + f"<details open><summary>{len(comparison.pairs)} pairs</summary>"
        + table_html(_PAIRS_HEADER, _pair_rows(comparison), numeric=(1, 2))
        + "</details></div>"
    )


_RANKING_HEADER = ("group", "candidate", "median", "risk of a flip with the next")
_PAIRS_HEADER = ("pair", "ratio", "interval", "relation", "what it would take")


def _ranking_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        (
            str(place.group),
            place.name,
            seconds(place.median_s),
            "" if place.flip_risk is None else f"{100 * place.flip_risk:.2g}%",
        )
        for place in comparison.ranking
    ]


def _pair_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        (
            f"{pair.first} ÷ {pair.second}",
            f"{pair.ratio:.4f}",
            f"{pair.interval[0]:.4f} to {pair.interval[1]:.4f}",
            pair.relation,
            pair.needs,
        )
        for pair in comparison.pairs
    ]


def _notes(comparison: Comparison) -> list[str]:
    return [
        *comparison.notes,
        *(f"{candidate.name}: {note}" for candidate in comparison.candidates for note in candidate.notes),
    ]


def _bars_html(comparison: Comparison) -> str:
    slowest = max(place.median_s for place in comparison.ranking)
    row, left, width = 20, 130, 420
    bars = "".join(
        f'<text x="{left - 6}" y="{number * row + 14}" text-anchor="end">{escape(place.name[:18])}</text>'
        f'<rect x="{left}" y="{number * row + 4}" width="{max(place.median_s / slowest * (width - left - 4), 1):.1f}" '
        f'height="12" fill="{("#187a4b", "#59636e")[place.group > 1]}"/>'
        for number, place in enumerate(comparison.ranking)
    )
    height = row * len(comparison.ranking) + 4
    return _image(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">'
        f'<rect width="{width}" height="{height}" rx="4" fill="#f6f8fa"/>'
        f'<g font-family="Helvetica,Arial,sans-serif" font-size="12" fill="#24292f">{bars}</g></svg>',
        "medians: " + ", ".join(f"{place.name} {seconds(place.median_s)}" for place in comparison.ranking),
    )


def _image(svg: str, words: str) -> str:
    data = base64.b64encode(svg.encode()).decode("ascii")
    return f'<img alt="{escape(words)}" src="data:image/svg+xml;base64,{data}">'


def _pandas() -> Any:
    try:
        import pandas as pd
    except ImportError as error:
        raise KrexError("to_pandas() needs pandas: pip install pandas. The same data: to_dict()") from error
    return pd
