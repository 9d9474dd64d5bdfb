"""The demo's one table and its sentences, as text. Pure: rows in, a string out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from .analysis import BANDS, Analysis, Band, PolicyResult

_MEANING = {
    "alone": "one uncontended pass against the others",
    "none": "no coordination",
    "command": "a lock around the whole candidate",
    "region": "a region around the timed part",
}


def render(analysis: Analysis) -> str:
    """Table, legend and what the run showed."""
    bands = [name for name, _ in BANDS if any(name in row.inflation for row in analysis.rows)]
    header = [
        "policy",
        "candidates/min",
        "÷ command",
        *(f"inflation {band}" for band in bands),
        "flips",
        "top-1",
    ]
    lines = [_row(row, bands) for row in analysis.rows]
    lines.append(
        [
            "|alone ÷ alone|",
            "",
            "",
            *(_percent(analysis.alone_against_alone.get(band)) for band in bands),
            "",
            "",
        ]
    )
    text = _grid([header, *lines])
    legend = "   ".join(
        f"{row.policy}: {_MEANING[row.policy]}" for row in analysis.rows if row.policy in _MEANING
    )
    verdicts = "\n".join(f"  {'yes' if claim.held else ' no'}  {claim.text}" for claim in analysis.claims)
    if analysis.gapless_speedups:
        listed = ", ".join(f"{speedup:.2f}" for speedup in analysis.gapless_speedups)
        verdicts += f"\n       (against a command policy without any gap between its holders: {listed})"
    return (
        f"{text}\n\n{legend}\nInflation: mean, with its 95% interval over candidates. Rates: mean, with the "
        f"range over repetitions.\n\n{verdicts}\n"
    )


def _row(row: PolicyResult, bands: Sequence[str]) -> list[str]:
    return [
        row.policy,
        _spread([value * 60 for value in row.per_s], "{:.0f}"),
        _spread(row.speedups, "{:.2f}"),
        *(_inflation(row.inflation.get(band)) for band in bands),
        "" if row.flips.rate is None else f"{row.flips.rate:.1%} [{row.flips.low:.1%}, {row.flips.high:.1%}]",
        _percent(row.flips.top1_rate),
    ]


def _spread(values: Sequence[float], pattern: str) -> str:
    if not values:
        return ""
    return f"{pattern} ({pattern} to {pattern})".format(fmean(values), min(values), max(values))


def _inflation(band: Band | None) -> str:
    return "" if band is None else f"{band.mean:+.1%} [{band.low:+.1%}, {band.high:+.1%}]"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _grid(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(lines)
