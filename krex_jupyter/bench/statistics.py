"""`krex bench statistics`: does the stopping rule keep its word on processes whose truth is known?

Each process is sampled as `measure` would sample it, looked at on its schedule, and ends settled or at a bound.
Where the rule says "settled", the interval it reports must hold the true median; two states and ticks must never
be called settled. The last rows show the limits: what the samples alone cannot tell.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from krex_jupyter.runtime.statistics import FIRST_LOOK, Look, look, next_look, proportion_interval

MOST_SAMPLES = 1000
"""Where a run ends that did not settle."""
COVERAGE = 0.94
"""Required of the 95% interval whenever the rule says settled."""

Source: TypeAlias = Callable[[random.Random], Iterator[float]]


@dataclass(frozen=True, slots=True)
class Process:
    """A simulated process. ``truth`` is the median that the interval should hold; None: it must not settle."""

    name: str
    source: Source
    truth: float | None
    judged: bool = True
    """False: a limit that is shown and not judged."""


def independent(noise: float, mean: float = 1.0) -> Source:
    """Independent normal noise, as a fraction of the mean."""

    def source(rng: random.Random) -> Iterator[float]:
        while True:
            yield mean * (1.0 + rng.gauss(0.0, noise))

    return source


def autoregressive(rho: float, noise: float) -> Source:
    """AR(1) around 1.0; ``noise`` is the standard deviation of the samples, not of the innovations."""

    def source(rng: random.Random) -> Iterator[float]:
        state = rng.gauss(0.0, noise)
        innovation = noise * math.sqrt(1.0 - rho * rho)
        while True:
            yield 1.0 + state
            state = rho * state + rng.gauss(0.0, innovation)

    return source


def alternating(apart: float, dwell: float, noise: float) -> Source:
    """Two states; each lasts ``dwell`` samples on average, whichever comes first is drawn."""

    def source(rng: random.Random) -> Iterator[float]:
        high = rng.random() < 0.5
        while True:
            yield (1.0 + apart * high) * (1.0 + rng.gauss(0.0, noise))
            if rng.random() < 1.0 / dwell:
                high = not high

    return source


def ramp(by: float, over: int, noise: float) -> Source:
    """Falls by ``by`` over the first ``over`` samples to 1.0 and stays there."""

    def source(rng: random.Random) -> Iterator[float]:
        position = 0
        while True:
            yield (1.0 + by * max(1.0 - position / over, 0.0)) * (1.0 + rng.gauss(0.0, noise))
            position += 1

    return source


def ticking(tick: float, mean: float, noise: float) -> Source:
    """A timer that counts whole ticks, read at both ends of a call that starts anywhere in one."""

    def source(rng: random.Random) -> Iterator[float]:
        while True:
            phase = rng.random() * tick
            end = phase + mean * (1.0 + rng.gauss(0.0, noise))
            yield tick * (math.floor(end / tick) - math.floor(phase / tick))

    return source


def heavy_tailed(share: float, noise: float) -> Source:
    """Normal noise, and a share of samples that are late by a Pareto-distributed time (infinite variance)."""

    def source(rng: random.Random) -> Iterator[float]:
        while True:
            late = 0.02 * rng.paretovariate(1.5) if rng.random() < share else 0.0
            yield 1.0 + rng.gauss(0.0, noise) + late

    return source


def processes() -> tuple[Process, ...]:
    """The six processes of the rule, then what lies beyond it."""
    late = heavy_tailed(0.1, 0.01)
    return (
        Process("independent noise of 1%", independent(0.01), 1.0),
        Process("AR(1), rho 0.8, 1%", autoregressive(0.8, 0.01), 1.0),
        Process("two states 3% apart, 0.5% noise", alternating(0.03, 2, 0.005), None),
        Process("ramp of 5% over 60 samples, 1% noise", ramp(0.05, 60, 0.01), 1.0),
        Process("ticks of 0.5 us at 5.2 us", ticking(0.5e-6, 5.2e-6, 0.01), None),
        Process("1% noise, 10% late (Pareto 1.5)", late, _median_of(late)),
        Process("independent noise of 0.2%", independent(0.002), 1.0, judged=False),
        Process("AR(1), rho 0.8, 0.2%", autoregressive(0.8, 0.002), 1.0, judged=False),
        Process("AR(1), rho 0.95, 0.1%", autoregressive(0.95, 0.001), 1.0, judged=False),
        Process("two states, 5 samples each, 0.5%", alternating(0.03, 5, 0.005), None, judged=False),
        Process("two states, 50 samples each, 0.5%", alternating(0.03, 50, 0.005), None, judged=False),
        Process("two states 3% apart, 1% noise", alternating(0.03, 2, 0.01), None, judged=False),
        Process("ramp of 5% over 100 samples, 1% noise", ramp(0.05, 100, 0.01), 1.0, judged=False),
        Process("ramp of 5% over 100 samples, 0.5% noise", ramp(0.05, 100, 0.005), 1.0, judged=False),
        Process("ramp of 5% over 1,000 samples, 1% noise", ramp(0.05, 1000, 0.01), 1.0, judged=False),
    )


def run_once(process: Process, seed: int, precision: float) -> Look:
    """Sample a process as `measure` does: on the schedule, until it settles, is hopeless, or is at its bound."""
    samples = process.source(random.Random(seed))  # noqa: S311 (a simulation)
    taken: list[float] = []
    wanted = FIRST_LOOK
    while True:
        taken.extend(next(samples) for _ in range(wanted - len(taken)))
        seen = look(taken, precision=precision)
        if seen.settled or seen.hopeless or wanted >= MOST_SAMPLES:
            return seen
        wanted = min(next_look(wanted), MOST_SAMPLES)


def simulate(process: Process, *, seeds: int, precision: float = 0.005) -> dict[str, Any]:
    """One row: how often it settled, after how many samples, and whether the interval then held the truth."""
    settled = held = held99 = 0
    counts: list[int] = []
    codes: dict[str, int] = {}
    for seed in range(seeds):
        seen = run_once(process, seed, precision)
        counts.append(seen.summary.n)
        for code in {finding.code for finding in seen.findings}:
            codes[code] = codes.get(code, 0) + 1
        if not seen.settled:
            continue
        settled += 1
        if process.truth is not None:
            held += _holds(seen.summary.ci95_s, process.truth)
            held99 += _holds(seen.summary.ci99_s, process.truth)
    coverage = held / settled if settled and process.truth is not None else None
    passed = settled == 0 if process.truth is None else coverage is None or coverage >= COVERAGE
    counts.sort()
    return {
        "process": process.name,
        "judged": process.judged,
        "must_not_settle": process.truth is None,
        "seeds": seeds,
        "settled_share": settled / seeds,
        "samples_p50": counts[len(counts) // 2],
        "coverage95": coverage,
        "coverage95_ci": proportion_interval(held, settled) if coverage is not None else None,
        "coverage99": held99 / settled if coverage is not None else None,
        "not_settled_because": {code: count / seeds for code, count in sorted(codes.items())},
        "passed": passed,
    }


def measure_statistics(*, seeds: int, limits: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """All processes, as a document of `krex bench`. 2,000 seeds take about five minutes on one core."""
    started_at = time.time()
    say(f"{'process':42} {'settled':>8} {'samples':>8} {'95% holds':>10} {'99% holds':>10}")
    rows = []
    for process in processes():
        if not (process.judged or limits):
            continue
        row = simulate(process, seeds=seeds)
        rows.append(row)
        verdict = ("ok" if row["passed"] else "FAILED") if process.judged else "(a limit, not judged)"
        say(
            f"{row['process']:42} {row['settled_share']:8.2%} {row['samples_p50']:8d} "
            f"{_percent(row['coverage95']):>10} {_percent(row['coverage99']):>10}  {verdict}"
        )
    return {
        "version": 1,
        "command": "bench statistics",
        "started_at": started_at,
        "precision": 0.005,
        "most_samples": MOST_SAMPLES,
        "required_coverage": COVERAGE,
        "rows": rows,
        "passed": all(row["passed"] for row in rows if row["judged"]),
    }


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _holds(interval: tuple[float, float] | None, truth: float) -> bool:
    return interval is not None and interval[0] <= truth <= interval[1]


def _median_of(source: Source) -> float:
    samples = source(random.Random(1))  # noqa: S311 (a simulation)
    drawn = sorted(next(samples) for _ in range(200_001))
    return drawn[len(drawn) // 2]
