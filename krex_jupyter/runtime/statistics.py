"""What the numbers of a measurement allow to be said: summary, when to stop, who is faster.

Pure functions of numbers, without clock, device or randomness of their own, so that the tests run them on
simulated processes whose truth is known (`krex bench statistics`). Nothing here drops a sample.

The rules are conservative about one thing: a result says "settled" only where the samples themselves carry it.
Timings are not independent (clocks ramp, states alternate, timers tick), so the interval rests on the *effective*
number of samples, and three processes that make a tight interval around a wrong value are looked for and
refused: two states, a trend, and ticks.

Pure Python and no NumPy: this is imported in other people's kernel environments, where NumPy may be missing or
pinned, and must not be imported for the first time inside a region (0.1 s). A look at 100 samples takes
0.2 ms, at 1,000 2 ms, at 10,000 22 ms; looks come on a geometric schedule, so that all of them together cost
about three times the last.

Durations are seconds; ``precision``, margins and shares are fractions (0.005 is half a percent).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from operator import mul
from typing import Literal, TypeAlias

FIRST_LOOK = 20
"""Samples before the first look. The 99% interval needs 8 effective ones, the test for a trend more."""

Interval: TypeAlias = tuple[float, float]
Relation: TypeAlias = Literal["FASTER", "SLOWER", "TIE", "UNRESOLVED"]

_TREND_T = 2.0
"""A drift of more than so many standard errors is a trend. 5% of quiet looks show that, and wait for the next."""
_TREND_SAFETY = 1.64
_TREND_WITHIN = 2.0
"""A drift that may be larger than this times ``precision`` (95% one-sided) is not excluded yet."""
_TREND_FROM = 0.25
"""A drift of less than this times ``precision`` is of no interest, however regular it is."""
_CORRELATION_SAFETY = 10.0
_VALLEY_P = 0.01
"""Two states are seen from this p-value on. False alarms cost one more look."""
_VALLEY_SURE_P = 1e-6
"""From here on more samples will not make two states one."""
_VALLEY_SPLITS = tuple(share / 20 for share in range(2, 19))
_EXACT_BINOMIAL = 200
"""Above this the normal distribution (with continuity) is as good and far cheaper."""
_CLOCK_CHANGE = 0.01
"""Clock changes up to one step of the device (15 MHz in 1,980) are no trend."""
_OUTLIER_MADS = 5.0


@dataclass(frozen=True, slots=True)
class Summary:
    """A sample in numbers. ``ci95_s`` and ``ci99_s`` hold the median; None: too few samples to say.

    From 20 samples on there always is one: where dependence leaves too few effective samples for order statistics, it
    is three times the farthest sample, on either side of the median.
    """

    n: int
    n_effective: float
    median_s: float
    mean_s: float
    min_s: float
    stdev_s: float
    """Of single samples; 0.0 for one sample."""
    ci95_s: Interval | None
    ci99_s: Interval | None
    outlier_share: float
    """Share above median + 5 median absolute deviations."""
    mean_over_min: float
    """mean ÷ min, less 1: a cheap smell of disturbance."""
    tick_s: float
    """Step of the timer as far as the samples or the caller know it; 0.0 where no step shows."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a sample is not settled: a stable code and a sentence with observed against required."""

    code: Literal["imprecise", "unstable", "clock_unsteady"]
    detail: str


@dataclass(frozen=True, slots=True)
class Look:
    """What is known after so many samples."""

    summary: Summary
    settled: bool
    """The median is known to ``precision``, within this region: sampling can stop."""
    hopeless: bool
    """More samples of this kind will not settle it."""
    findings: tuple[Finding, ...]
    """Empty exactly where ``settled``."""


def next_look(n: int) -> int:
    """The number of samples at which to look after a look at ``n``: 20, 30, 45, 68, 100, 150 and so on."""
    if n < FIRST_LOOK:
        return FIRST_LOOK
    grown = n * 1.5
    return round(grown) if grown < 100 else int(round(grown, 2 - len(str(int(grown)))))


def summarise(samples_s: Sequence[float], *, resolution_s: float = 0.0, reach: float = 0.01) -> Summary:
    """Describe samples given in the order they were taken.

    Args:
        samples_s: at least one; finite.
        resolution_s: step of the timer ÷ batch; 0.0 where unknown. An interval is never narrower than what a step
            hides (half of it on each side).
        reach: samples farther from the median than this share may belong to another state (`effective_size`).

    Raises:
        ValueError: no samples, or one that is not a finite number.
    """
    _check(samples_s)
    ordered = sorted(samples_s)
    n = len(ordered)
    middle_s = _median_of_sorted(ordered)
    mean_s = math.fsum(ordered) / n
    spread_s = _median_of_sorted(sorted(abs(value - middle_s) for value in ordered))
    above = n - bisect_right(ordered, middle_s + _OUTLIER_MADS * spread_s)
    variance = math.fsum((value - mean_s) ** 2 for value in ordered) / (n - 1) if n > 1 else 0.0
    tick_s = _tick_of_sorted(ordered, resolution_s)
    n_effective = effective_size(samples_s, reach=reach)
    return Summary(
        n=n,
        n_effective=n_effective,
        median_s=middle_s,
        mean_s=mean_s,
        min_s=ordered[0],
        stdev_s=math.sqrt(variance),
        ci95_s=_interval(ordered, n_effective, 0.95, tick_s),
        ci99_s=_interval(ordered, n_effective, 0.99, tick_s),
        outlier_share=above / n,
        mean_over_min=mean_s / ordered[0] - 1.0 if ordered[0] > 0.0 else 0.0,
        tick_s=tick_s,
    )


def look(
    samples_s: Sequence[float],
    *,
    precision: float,
    resolution_s: float = 0.0,
    clocks_mhz: Sequence[float] = (),
) -> Look:
    """Judge whether the samples taken so far settle the median to ``precision``.

    Settled is: the 99% interval on the effective sample size lies within ``precision`` of the median; the medians
    of both halves agree within twice that; no trend in time; the clock readings (taken around the samples, in
    order; none where there are none) agree; neither two states nor ticks. Below `FIRST_LOOK` samples nothing is
    settled.
    """
    summary = summarise(samples_s, resolution_s=resolution_s, reach=2.0 * precision)
    findings: list[Finding] = []
    hopeless = False

    coarse = summary.tick_s / 2.0 / summary.median_s if summary.median_s > 0.0 else math.inf
    if coarse > precision:
        hopeless = True
        findings.append(
            Finding(
                "unstable",
                f"The timer steps by {summary.tick_s * 1e6:.3g} µs, {_percent(2.0 * coarse)} of a sample, which hides "
                f"differences of {_percent(precision)}. Time more calls per sample, or ask for less precision.",
            )
        )
    p_value, gap = two_states(samples_s, precision=precision, n_effective=summary.n_effective)
    if p_value < _VALLEY_P:
        hopeless = hopeless or (p_value < _VALLEY_SURE_P and summary.n >= 100)
        findings.append(
            Finding(
                "unstable",
                f"The samples are in two states {_percent(gap)} apart, so that their median says little. Lock the "
                f"clocks, look for work that alternates, or compare with interleaved runs.",
            )
        )
    change_s, error_s = drift(samples_s)
    if abs(change_s) > _TREND_FROM * precision * summary.median_s and (
        abs(change_s) > _TREND_T * error_s
        or abs(change_s) + _TREND_SAFETY * error_s > _TREND_WITHIN * precision * summary.median_s
    ):
        findings.append(
            Finding(
                "unstable",
                f"The samples {'rise' if change_s > 0.0 else 'fall'} by "
                f"{_percent(abs(change_s) / summary.median_s)} from first to last. Warm up longer, "
                f"or give it more time.",
            )
        )
    first, second = _halves(samples_s)
    apart = abs(first - second) / summary.median_s if summary.median_s > 0.0 else math.inf
    if apart > 2.0 * precision:
        findings.append(
            Finding(
                "unstable",
                f"The medians of the first and the second half are {_percent(apart)} apart; up to "
                f"{_percent(2.0 * precision)} is allowed. Give it more time.",
            )
        )
    if len(clocks_mhz) > 1 and max(clocks_mhz) > 0.0:
        change = 1.0 - min(clocks_mhz) / max(clocks_mhz)
        if change > max(2.0 * precision, _CLOCK_CHANGE):
            findings.append(
                Finding(
                    "clock_unsteady",
                    f"The clock went between {min(clocks_mhz):.0f} and {max(clocks_mhz):.0f} MHz. Warm up longer, "
                    f"lock the clocks (nvidia-smi -lgc), or keep the device below its power cap.",
                )
            )
    width = _half_width(samples_s, summary, precision)
    if summary.n < FIRST_LOOK or width is None:
        findings.append(
            Finding(
                "imprecise",
                f"{summary.n} samples ({summary.n_effective:.0f} effective) are too few for an interval. Give it "
                f"more time.",
            )
        )
    elif width > precision:
        findings.append(
            Finding(
                "imprecise",
                f"The median is known to {_percent(width)}, {_percent(precision)} were asked for. Give it more "
                f"time, or ask for less precision.",
            )
        )
    return Look(summary=summary, settled=not findings, hopeless=hopeless, findings=tuple(findings))


# --- Comparing ---------------------------------------------------------------------------------------------------

Block: TypeAlias = Mapping[str, float]
"""Median of each candidate's samples in one interleaved block; a candidate may be missing."""


@dataclass(frozen=True, slots=True)
class Pair:
    """How ``first`` compares with ``second``: below 1 means that it takes less time."""

    first: str
    second: str
    ratio: float
    """Median over the blocks of first ÷ second."""
    interval: Interval
    """At the level that this pair got after the adjustment for all pairs."""
    level: float
    relation: Relation
    p_value: float
    """Of what was decided (or nearest to it), before the adjustment."""
    blocks: int
    needs: str
    """UNRESOLVED: what a decision would take; else empty."""


@dataclass(frozen=True, slots=True)
class Place:
    """A candidate in a ranking."""

    name: str
    group: int
    """From 1. Members of a group were not shown to be slower than its first; neighbours in different groups may
    still be ties, because ties are not transitive."""
    median_s: float
    flip_risk: float | None
    """Share of resampled experiments in which the next candidate comes out faster; None for the last."""


def compare(
    regions: Sequence[Sequence[Block]],
    *,
    margin: float = 0.01,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> list[Pair]:
    """Compare all pairs of candidates by their blocks.

    The unit is the block, and the region that blocks were taken in; never the sample: samples of one block share
    its clock and temperature. Regions, then blocks within them, are drawn with replacement; the ratio of a
    resample is the median of its per-block ratios. Holm's procedure over all pairs. A bootstrap of few blocks is
    too sure of itself (five equal ones never vary), so no p-value is taken below that of the sign test on the
    same blocks.

    Args:
        regions: the blocks of each region.
        margin: a ratio between 1 ÷ (1 + margin) and 1 + margin makes no difference worth having.
        confidence: that no statement on any pair is wrong.
        resamples: how many; cost is pairs by resamples by blocks.
        seed: of the resampling, so that a result can be had again.
    """
    if not margin > 0.0:
        raise ValueError(f"the margin must be above 0, not {margin!r}")
    names = sorted({name for blocks in regions for block in blocks for name in block})
    draws = _draws(regions, resamples, seed)
    weighed = [
        weighing
        for first, second in combinations(names, 2)
        if (weighing := _weigh(regions, draws, first, second, margin)) is not None
    ]
    # Holm: the surest pair has to stand against all, the next against all but one, until one fails.
    weighed.sort(key=lambda weighing: weighing.p_value)
    pairs: list[Pair] = []
    holds = True
    level_of_failed = 0.0
    for position, weighing in enumerate(weighed):
        allowed = (1.0 - confidence) / (len(weighed) - position)
        holds = holds and weighing.p_value <= allowed
        if not holds:
            level_of_failed = level_of_failed or allowed
            allowed = level_of_failed
        interval = weighing.interval(allowed)
        relation: Relation = (
            weighing.leans if holds and _bears(interval, weighing.leans, margin) else "UNRESOLVED"
        )
        pairs.append(
            Pair(
                first=weighing.first,
                second=weighing.second,
                ratio=weighing.ratio,
                interval=interval,
                level=1.0 - allowed,
                relation=relation,
                p_value=weighing.p_value,
                blocks=weighing.blocks,
                needs=_needs(weighing, interval, allowed, margin) if relation == "UNRESOLVED" else "",
            )
        )
    return sorted(pairs, key=lambda pair: (names.index(pair.first), names.index(pair.second)))


def rank(
    regions: Sequence[Sequence[Block]], pairs: Sequence[Pair], *, resamples: int = 1000, seed: int = 0
) -> list[Place]:
    """The candidates from fastest to slowest, in groups, with the risk that neighbours change places."""
    values: dict[str, list[float]] = {}
    for blocks in regions:
        for block in blocks:
            for name, value in block.items():
                values.setdefault(name, []).append(value)
    order = sorted(values, key=lambda name: (median(values[name]), name))
    slower = {(pair.first, pair.second) for pair in pairs if pair.relation == "SLOWER"}
    slower |= {(pair.second, pair.first) for pair in pairs if pair.relation == "FASTER"}
    draws = _draws(regions, resamples, seed)
    places: list[Place] = []
    leader, group = "", 0
    for position, name in enumerate(order):
        if not leader or (name, leader) in slower:
            leader, group = name, group + 1
        risk = _flip_risk(regions, draws, name, order[position + 1]) if position + 1 < len(order) else None
        places.append(Place(name=name, group=group, median_s=median(values[name]), flip_risk=risk))
    return places


@dataclass(frozen=True, slots=True)
class _Weighing:
    first: str
    second: str
    ratio: float
    blocks: int
    resampled: list[float]
    leans: Relation
    p_value: float

    def interval(self, alpha: float) -> Interval:
        """Percentile interval of the resampled ratios, rounded outwards."""
        last = len(self.resampled) - 1
        cut = math.floor(alpha / 2.0 * len(self.resampled))
        return self.resampled[min(cut, last)], self.resampled[max(last - cut, 0)]


def _draws(regions: Sequence[Sequence[Block]], resamples: int, seed: int) -> list[list[tuple[int, int]]]:
    """Resampled experiments as (region, block) places; the same for all pairs, as they were one experiment."""
    rng = random.Random(seed)  # noqa: S311 (resampling, not secrets)
    filled = [number for number, blocks in enumerate(regions) if blocks]
    return [
        [
            (region, rng.randrange(len(regions[region])))
            for region in (rng.choice(filled) for _ in filled)
            for _ in regions[region]
        ]
        for _ in range(resamples if filled else 0)
    ]


def _weigh(
    regions: Sequence[Sequence[Block]],
    draws: Sequence[Sequence[tuple[int, int]]],
    first: str,
    second: str,
    margin: float,
) -> _Weighing | None:
    """Ratio of two candidates and which statement on it is the likeliest; None: they share no block."""
    ratios = {
        (number, place): block[first] / block[second]
        for number, blocks in enumerate(regions)
        for place, block in enumerate(blocks)
        if first in block and second in block and block[second] > 0.0
    }
    if not ratios:
        return None
    resampled = sorted(
        median(drawn) for draw in draws if (drawn := [ratios[place] for place in draw if place in ratios])
    )
    low, high = 1.0 / (1.0 + margin), 1.0 + margin
    below = _p_below(ratios, resampled, low)
    above = _p_above(ratios, resampled, high)
    within = max(_p_below(ratios, resampled, high), _p_above(ratios, resampled, low))
    statements: list[tuple[float, Relation]] = [(below, "FASTER"), (above, "SLOWER"), (within, "TIE")]
    p_value, leans = min(statements)
    return _Weighing(
        first=first,
        second=second,
        ratio=median(list(ratios.values())),
        blocks=len(ratios),
        resampled=resampled,
        leans=leans,
        # Two-sided: either direction would have been reported.
        p_value=min(2.0 * p_value, 1.0),
    )


def _p_below(ratios: Mapping[tuple[int, int], float], resampled: Sequence[float], bound: float) -> float:
    """How well the blocks go with a ratio of at least ``bound``."""
    contrary = sum(1 for ratio in ratios.values() if ratio >= bound)
    share = (len(resampled) - bisect_left(resampled, bound)) / len(resampled)
    return max(share, binomial_cdf(contrary, len(ratios)))


def _p_above(ratios: Mapping[tuple[int, int], float], resampled: Sequence[float], bound: float) -> float:
    contrary = sum(1 for ratio in ratios.values() if ratio <= bound)
    share = bisect_right(resampled, bound) / len(resampled)
    return max(share, binomial_cdf(contrary, len(ratios)))


def _bears(interval: Interval, relation: Relation, margin: float) -> bool:
    low, high = 1.0 / (1.0 + margin), 1.0 + margin
    if relation == "FASTER":
        return interval[1] < low
    if relation == "SLOWER":
        return interval[0] > high
    return low < interval[0] and interval[1] < high


def _needs(weighing: _Weighing, interval: Interval, allowed: float, margin: float) -> str:
    """What would decide a pair: blocks by the square root law, from the nearest border of the margin."""
    low, high = 1.0 / (1.0 + margin), 1.0 + margin
    least = math.ceil(math.log2(2.0 / allowed))
    distance = min(abs(weighing.ratio - low), abs(weighing.ratio - high))
    width = max(interval[1] - weighing.ratio, weighing.ratio - interval[0])
    if distance * 10.0 < width:
        return (
            f"The ratio, {weighing.ratio:.4f}, is at the border of the margin of {100 * margin:g}%: choose another "
            f"margin, or take either."
        )
    wanted = max(least, math.ceil(weighing.blocks * (width / distance) ** 2))
    if wanted <= weighing.blocks:
        wanted = weighing.blocks + max(weighing.blocks // 2, 2)
    return (
        f"About {wanted} blocks instead of {weighing.blocks} (give it more max_time), or a margin other than "
        f"{100 * margin:g}%."
    )


def _flip_risk(
    regions: Sequence[Sequence[Block]], draws: Sequence[Sequence[tuple[int, int]]], first: str, second: str
) -> float:
    """Share of resamples in which ``second`` comes out faster; exact ties count one half."""
    flips = total = 0.0
    for draw in draws:
        ratios = [
            block[first] / block[second]
            for number, place in draw
            if first in (block := regions[number][place]) and second in block and block[second] > 0.0
        ]
        if ratios:
            total += 1.0
            ratio = median(ratios)
            flips += 1.0 if ratio > 1.0 else 0.5 if ratio == 1.0 else 0.0
    return flips / total if total else 0.5


# --- Parts of the rule -------------------------------------------------------------------------------------------


def effective_size(samples: Sequence[float], *, reach: float = 0.01) -> float:
    """How many independent samples would say as much about the median, at most ``len(samples)``.

    From the autocorrelation of the *ranks*, which outliers do not mask; and from that of being more than
    ``reach`` above the median, and below it: a few samples in a row in another state say that the state lasts,
    which the ranks of all others hide. The least of the three. Negative correlation earns no credit.
    """
    n = len(samples)
    if n < 4:
        return float(n)
    least = n / correlation_time(_centred(_ranks(samples)))
    middle = median(samples)
    for outside in (
        [1.0 if value > middle * (1.0 + reach) else 0.0 for value in samples],
        [1.0 if value < middle * (1.0 - reach) else 0.0 for value in samples],
    ):
        if 2.0 <= math.fsum(outside) <= n - 2.0:
            least = min(least, n / correlation_time(_centred(outside)))
    return max(least, 1.0)


def correlation_time(centred: list[float]) -> float:
    """Samples that one independent sample is worth, at least 1, at most half of them all.

    The larger of two estimates: autocorrelations summed in pairs of lags while a pair stays positive (Geyer's
    initial positive sequence neither stops at the first noisy lag nor adds up noise), and what the first lag
    would mean in an autoregressive process (the sum is biased down where samples are few).
    """
    n = len(centred)
    variance = _dot(centred, centred)
    if n < 4 or variance == 0.0:
        return 1.0
    most = n / 2.0
    first = _lagged(centred, 1) / variance
    # The estimated mean pulls the first lag down by about (1 + 4 rho) / n (Kendall), others by 1 / n.
    first = min(first + (1.0 + 4.0 * max(first, 0.0)) / n, 1.0)
    if first >= 1.0:
        return most
    time = max((1.0 + first) / (1.0 - first), 1.0)
    bias = variance / n
    before = variance
    summed = -1.0
    for lag in range(1, n, 2):
        pair = (before + _lagged(centred, lag) + bias) / variance
        if pair <= 0.0:
            break
        summed += 2.0 * pair
        if summed > most:
            return most
        before = _lagged(centred, lag + 1) + bias
    time = max(time, summed)
    # Few correlation times leave the estimate itself uncertain, and too low when it matters: the rule stops where
    # the interval looks narrow. Simulated, AR(1) of 0.8 at 0.5% noise: 90% coverage without this, 96% with it.
    return min(time * (1.0 + _CORRELATION_SAFETY * (time - 1.0) / n), most)


def drift(samples: Sequence[float]) -> tuple[float, float]:
    """Change along the line through the samples, from first to last, and its standard error; unit of the samples.

    Outliers are drawn in to 5 median absolute deviations first, for this purpose only. The effective number of
    samples is that of the residuals, so that a trend does not hide behind the correlation it causes itself.
    """
    n = len(samples)
    if n < 4:
        return 0.0, math.inf
    middle = median(samples)
    bound = _OUTLIER_MADS * median([abs(value - middle) for value in samples])
    values = _centred([min(max(value, middle - bound), middle + bound) for value in samples])
    times = [position - (n - 1) / 2.0 for position in range(n)]
    weight = _dot(times, times)
    slope = _dot(values, times) / weight
    residuals = [value - slope * at for value, at in zip(values, times, strict=True)]
    freedom = max(n / correlation_time(residuals) - 2.0, 1.0)
    variance = _dot(residuals, residuals) / freedom
    return slope * (n - 1), math.sqrt(variance / weight) * (n - 1)


def two_states(samples: Sequence[float], *, precision: float, n_effective: float) -> tuple[float, float]:
    """Whether the samples have a valley between two heaps: (p-value, distance of the heaps ÷ median).

    The samples are split at seventeen places; between the medians of the two sides the middle third of the way
    is compared with equally wide windows around both medians. One heap leaves at least as many samples in the
    middle as in the lesser window, whatever its shape (a flat one: equally many), so that fewer are judged by a
    binomial test. Heaps nearer to each other than twice ``precision`` are one: they cannot mislead by more.
    """
    ordered = sorted(samples)
    n = len(ordered)
    if n < FIRST_LOOK:
        return 1.0, 0.0
    # Dependent samples count for less, but two states that dwell *are* dependent: never below half.
    share = min(max(n_effective / n, 0.5), 1.0)
    middle = _median_of_sorted(ordered)
    best_p, best_gap = 1.0, 0.0
    for split in _VALLEY_SPLITS:
        at = round(n * split)
        low, high = _median_of_sorted(ordered[:at]), _median_of_sorted(ordered[at:])
        gap = high - low
        if middle <= 0.0 or gap / middle <= 2.0 * precision:
            continue
        wing = gap / 6.0
        in_low = bisect_right(ordered, low + wing) - bisect_left(ordered, low - wing)
        in_high = bisect_right(ordered, high + wing) - bisect_left(ordered, high - wing)
        between = bisect_right(ordered, high - 2.0 * wing) - bisect_left(ordered, low + 2.0 * wing)
        lesser = min(in_low, in_high)
        p_value = binomial_cdf(round(between * share), round((between + lesser) * share))
        if p_value < best_p:
            best_p, best_gap = p_value, gap / middle
    return best_p, best_gap


@lru_cache(maxsize=4096)
def binomial_cdf(successes: int, trials: int) -> float:
    """P(X ≤ successes) of a fair coin thrown ``trials`` times."""
    if successes >= trials:
        return 1.0
    if trials > _EXACT_BINOMIAL:
        return math.erfc(-(2.0 * successes + 1.0 - trials) / math.sqrt(2.0 * trials)) / 2.0
    ways = sum(math.comb(trials, k) for k in range(successes + 1))
    return float(ways / (1 << trials))


def proportion_interval(successes: int, trials: int, confidence: float = 0.95) -> Interval:
    """Clopper-Pearson interval of a share; (0, 1) without trials."""
    tail = (1.0 - confidence) / 2.0

    def tail_at(share: float, upper: bool) -> float:
        """P(X >= successes) or P(X <= successes) of a binomial with that share."""
        if share in (0.0, 1.0):
            return float((share == 1.0) == upper)
        counted = range(successes, trials + 1) if upper else range(successes + 1)
        log_all = math.lgamma(trials + 1)
        return math.fsum(
            math.exp(
                log_all
                - math.lgamma(k + 1)
                - math.lgamma(trials - k + 1)
                + k * math.log(share)
                + (trials - k) * math.log1p(-share)
            )
            for k in counted
        )

    def solve(upper: bool) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2.0
            # The upper tail grows with the share, the lower tail falls.
            if (tail_at(middle, upper) < tail) == upper:
                low = middle
            else:
                high = middle
        return (low + high) / 2.0

    if trials == 0:
        return 0.0, 1.0
    return (
        0.0 if successes == 0 else solve(upper=True),
        1.0 if successes == trials else solve(upper=False),
    )


@lru_cache(maxsize=4096)
def interval_ranks(n: int, level: float) -> tuple[int, int] | None:
    """Ranks (from 1) of the order statistics that hold the median with at least ``level``; None: n is too small.

    Distribution-free: the number of samples below the median is binomial. 95% needs 6 samples, 99% needs 8.
    """
    tail = (1.0 - level) / 2.0
    if n < 1 or 0.5**n > tail:
        return None
    low, high = 0, n // 2
    while low < high:
        middle = (low + high + 1) // 2
        if binomial_cdf(middle - 1, n) <= tail:
            low = middle
        else:
            high = middle - 1
    return low, n + 1 - low


def _interval(ordered: Sequence[float], n_effective: float, level: float, tick_s: float) -> Interval | None:
    n = len(ordered)
    ranks = interval_ranks(int(n_effective), level)
    if ranks is None:
        if n < FIRST_LOOK:
            return None
        # Many samples that depend on each other: a slow wander. Three times what was seen is claimed (twice holds the
        # median of an AR(1) of 0.95 in 93% of cases only): wide for most processes, and tight for a quiet device
        # whose temperature creeps.
        middle = _median_of_sorted(ordered)
        spread = 3.0 * max(ordered[-1] - middle, middle - ordered[0]) + tick_s / 2.0
        return middle - spread, middle + spread
    # The rank that the effective sample asks for, as a place among all samples; rounded outwards.
    place = ranks[0] / (int(n_effective) + 1.0) * (n + 1.0)
    low = max(math.floor(place + 1e-9), 1)
    return ordered[low - 1] - tick_s / 2.0, ordered[n - low] + tick_s / 2.0


def _half_width(samples_s: Sequence[float], summary: Summary, precision: float) -> float | None:
    """Half-width of the 99% interval as a fraction of the median."""
    middle_s = summary.median_s
    if middle_s <= 0.0:
        return math.inf
    widths = []
    if summary.ci99_s is not None:
        widths.append(max(summary.ci99_s[1] - middle_s, middle_s - summary.ci99_s[0]) / middle_s)
    return min(widths, default=None)


def _halves(samples: Sequence[float]) -> tuple[float, float]:
    half = (len(samples) + 1) // 2
    return median(samples[:half]), median(samples[-half:])


def median(values: Sequence[float]) -> float:
    """The median; raises `ValueError` where there are no values."""
    if not values:
        raise ValueError("a median needs at least one value")
    return _median_of_sorted(sorted(values))


def _median_of_sorted(ordered: Sequence[float]) -> float:
    n = len(ordered)
    return ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2.0


def _tick_of_sorted(ordered: Sequence[float], resolution_s: float) -> float:
    """Step between distinct values where most samples share theirs with others, at least ``resolution_s``.

    Values nearer than a billionth are the same reading after different arithmetic. Equal samples do not show the
    timer's step: where it is not known either, anything below the whole value could be hidden.
    """
    same = ordered[-1] * 1e-9
    steps = [right - left for left, right in pairwise(ordered) if right - left > same]
    if not steps:
        return resolution_s or (ordered[-1] if len(ordered) > 1 else 0.0)
    if 2 * len(steps) >= len(ordered):
        return resolution_s
    return max(min(steps), resolution_s)


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, ties sharing their mean rank."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) + 1) / 2.0 for value in values]


def _centred(values: list[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _dot(left: list[float], right: list[float]) -> float:
    """Sum of products over the shorter length; plain addition, as values are centred and few."""
    total: float = sum(map(mul, left, right))
    return total


def _lagged(centred: list[float], lag: int) -> float:
    return _dot(centred, centred[lag:])


def _percent(share: float) -> str:
    value = 100.0 * share
    return f"{value:.2g}%" if value < 100.0 else f"{value:.0f}%"


def _check(samples: Sequence[float]) -> None:
    if not samples:
        raise ValueError("statistics need at least one sample")
    for position, value in enumerate(samples):
        if not math.isfinite(value):
            raise ValueError(f"sample {position} is {value}, not a finite number")
