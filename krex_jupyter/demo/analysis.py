"""What the demo's numbers say: inflation, flips, throughput, and whether the run shows anything at all. Pure.

Definitions are those of `MEASUREMENT.md`. Inflation is paired: a kernel's median under load over the median
of the same compiled kernel in the same process a moment later, while all others did nothing; alone against
alone puts one more uncontended pass in the place of the first. Intervals are bootstrapped over candidates
(all repetitions of a candidate stay together), because repetitions of one candidate are not independent. A
run that cannot show harm without coordination, or whose machine does not agree with itself, says so instead
of claiming anything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Final

BANDS: Final = (("<0.1ms", 1e-4), ("0.1-1ms", 1e-3), ("1-10ms", 1e-2), (">10ms", math.inf))
"""Name and upper end, in seconds of the alone time."""

NOISE_LIMIT: Final = 0.03
"""Alone against alone above this: the machine was too noisy to show anything."""
MARGIN: Final = 0.01
"""What a policy's inflation may exceed alone against alone by; also the margin of a tie."""

_RESAMPLES = 1000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Timing:
    """One candidate in one repetition under one policy: seconds per call.

    ``alone_s`` is the reference, pooled from several uncontended passes; ``loaded_s`` and ``again_s`` are what one
    pass read, under load and without.
    """

    task: str
    name: str
    loaded_s: float
    alone_s: float
    again_s: float


@dataclass(frozen=True)
class Run:
    """One policy in one repetition."""

    policy: str
    repetition: int
    elapsed_s: float
    candidates: int
    """Tuned in all, the wrong ones included."""
    wrong_caught: int
    timings: tuple[Timing, ...]
    held_s: tuple[float, ...]
    """How long each region was held; empty for `none`."""
    gaps_s: float
    """Time in which no region was held though candidates were left: hand-offs, pauses for fairness."""

    @property
    def per_s(self) -> float:
        """Candidates tuned per second."""
        return self.candidates / self.elapsed_s


@dataclass(frozen=True)
class Band:
    """Inflation of one band, as fractions; ``low`` and ``high`` bound the mean at 95%."""

    n: int
    median: float
    mean: float
    p95: float
    low: float
    high: float


@dataclass(frozen=True)
class Flips:
    """How far a ranking is from the reference, as fractions; None where there is nothing to rank."""

    rate: float | None
    low: float | None
    high: float | None
    separable_rate: float | None
    """Among pairs whose order the reference is sure of."""
    top1_rate: float | None
    """Tasks whose fastest candidate is another one."""
    regret: float | None
    """Reference time of the chosen candidate over that of the best one, mean over tasks."""
    pairs: int
    separable_pairs: int


@dataclass(frozen=True)
class PolicyResult:
    """One row."""

    policy: str
    agents: int
    candidates: int
    wrong_caught: int
    per_s: tuple[float, ...]
    """For each repetition."""
    speedups: tuple[float, ...]
    """Over `command`, for each repetition; empty where there is none to compare with."""
    share_of_bound: float | None
    held_s: float | None
    inflation: dict[str, Band]
    flips: Flips


@dataclass(frozen=True)
class Claim:
    """Something the demo is there to show, and whether this run showed it."""

    name: str
    held: bool
    text: str


@dataclass(frozen=True)
class Analysis:
    """Everything that table and JSON show."""

    rows: tuple[PolicyResult, ...]
    claims: tuple[Claim, ...]
    alone_against_alone: dict[str, float]
    """Mean absolute difference of two uncontended timings of the same kernel, by band, and ``all``."""
    too_noisy: bool
    none_shows_harm: bool
    gapless_speedups: tuple[float, ...]
    """`region` over a `command` policy whose gaps between regions are taken out, for each repetition."""

    @property
    def held(self) -> bool:
        """Whether every claim held."""
        return all(claim.held for claim in self.claims)


def analyse(runs: Sequence[Run], *, agents: int, parallel: int, seed: int = 0) -> Analysis:
    """Judge a whole demo. ``parallel`` is how many agents the machine can really run at once."""
    source = random.Random(seed)  # noqa: S311  resampling
    passes = uncontended_passes(runs)
    separable = separable_pairs(passes, _tasks(runs))
    by_policy: dict[str, list[Run]] = {}
    for run in runs:
        by_policy.setdefault(run.policy, []).append(run)
    command = {run.repetition: run for run in by_policy.get("command", [])}
    bound = _bound_per_s(by_policy, parallel)

    everything = [timing for run in runs for timing in run.timings]
    rows = [
        PolicyResult(
            policy="alone",
            agents=1,
            candidates=0,
            wrong_caught=0,
            per_s=(),
            speedups=(),
            share_of_bound=None,
            held_s=None,
            inflation=inflation(everything, lambda timing: timing.again_s, source),
            flips=flips(_left_out(passes), _tasks(runs), separable, source),
        )
    ]
    for policy, mine in by_policy.items():
        timings = [timing for run in mine for timing in run.timings]
        held = [held_s for run in mine for held_s in run.held_s]
        reference = {name: median(values) for name, values in _pooled(passes).items()}
        rankings = [({timing.name: timing.loaded_s for timing in run.timings}, reference) for run in mine]
        rate = sum(run.candidates for run in mine) / sum(run.elapsed_s for run in mine)
        rows.append(
            PolicyResult(
                policy=policy,
                agents=agents,
                candidates=sum(run.candidates for run in mine),
                wrong_caught=sum(run.wrong_caught for run in mine),
                per_s=tuple(run.per_s for run in mine),
                speedups=tuple(
                    run.per_s / command[run.repetition].per_s for run in mine if run.repetition in command
                ),
                share_of_bound=rate / bound if bound and policy == "region" else None,
                held_s=fmean(held) if held else None,
                inflation=inflation(timings, lambda timing: timing.loaded_s, source),
                flips=flips(rankings, _tasks(runs), separable, source),
            )
        )
    noise = alone_against_alone(everything)
    too_noisy = noise["all"] > NOISE_LIMIT
    by_name = {row.policy: row for row in rows}
    harm = "none" in by_name and _exceeds(by_name["none"].inflation, noise)
    gapless = tuple(
        run.per_s * (command[run.repetition].elapsed_s - command[run.repetition].gaps_s)
        / command[run.repetition].candidates
        for run in by_policy.get("region", [])
        if run.repetition in command
    )  # fmt: skip
    return Analysis(
        rows=tuple(rows),
        claims=tuple(_claims(by_name, noise, too_noisy=too_noisy, harm=harm)),
        alone_against_alone=noise,
        too_noisy=too_noisy,
        none_shows_harm=harm,
        gapless_speedups=gapless,
    )


def band_of(alone_s: float) -> str:
    """The band that a kernel of this alone time belongs to."""
    return next(name for name, end_s in BANDS if alone_s < end_s)


def inflation(
    timings: Iterable[Timing], loaded: Callable[[Timing], float], source: random.Random
) -> dict[str, Band]:
    """Inflation by band of the alone time, with a bootstrap interval of the mean over candidates.

    A candidate belongs to one band: that of its median alone time over all repetitions.
    """
    by_name: dict[str, list[Timing]] = {}
    for timing in timings:
        by_name.setdefault(timing.name, []).append(timing)
    bands: dict[str, list[list[float]]] = {}
    for mine in by_name.values():
        band = band_of(median(timing.alone_s for timing in mine))
        bands.setdefault(band, []).append([loaded(timing) / timing.alone_s - 1 for timing in mine])
    result: dict[str, Band] = {}
    for name, _ in BANDS:
        if name not in bands:
            continue
        clusters = bands[name]
        values = sorted(value for cluster in clusters for value in cluster)
        low, high = bootstrap_mean(clusters, source)
        result[name] = Band(len(values), median(values), fmean(values), _quantile(values, 0.95), low, high)
    return result


def bootstrap_mean(
    clusters: Sequence[Sequence[float]], source: random.Random, resamples: int = _RESAMPLES
) -> tuple[float, float]:
    """95% percentile interval of the mean of all values, drawing whole clusters with replacement."""
    sums = [(math.fsum(cluster), len(cluster)) for cluster in clusters]
    means = []
    for _ in range(resamples):
        drawn = source.choices(sums, k=len(sums))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    tail = (1 - _CONFIDENCE) / 2
    return _quantile(means, tail), _quantile(means, 1 - tail)


def alone_against_alone(timings: Iterable[Timing]) -> dict[str, float]:
    """Mean of |again / alone - 1| by band and over ``all`` (0.0 where nothing ran); signs do not cancel."""
    by_name: dict[str, list[Timing]] = {}
    for timing in timings:
        by_name.setdefault(timing.name, []).append(timing)
    bands: dict[str, list[float]] = {}
    for mine in by_name.values():
        band = band_of(median(timing.alone_s for timing in mine))
        bands.setdefault(band, []).extend(abs(timing.again_s / timing.alone_s - 1) for timing in mine)
    result = {name: fmean(bands[name]) for name, _ in BANDS if name in bands}
    everything = [value for values in bands.values() for value in values]
    result["all"] = fmean(everything) if everything else 0.0
    return result


# --- Rankings -----------------------------------------------------------------------------------------------


def uncontended_passes(runs: Sequence[Run]) -> list[dict[str, float]]:
    """Every uncontended reading of the candidates: two per run, each from passes of its own."""
    passes: list[dict[str, float]] = []
    for run in runs:
        passes.append({timing.name: timing.alone_s for timing in run.timings})
        passes.append({timing.name: timing.again_s for timing in run.timings})
    return [one for one in passes if one]


def separable_pairs(
    passes: Sequence[Mapping[str, float]], tasks: Mapping[str, Sequence[str]]
) -> set[tuple[str, str]]:
    """Pairs whose order is certain without load.

    The 95% order-statistics interval of the median ratio over the uncontended passes excludes 1 ± `MARGIN`.
    """
    found: set[tuple[str, str]] = set()
    for names in tasks.values():
        for one, other in combinations(names, 2):
            ratios = sorted(each[one] / each[other] for each in passes if one in each and other in each)
            bounds = _median_interval(ratios)
            if bounds is not None and (bounds[0] > 1 + MARGIN or bounds[1] < 1 - MARGIN):
                found.add((one, other))
    return found


def flips(
    rankings: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
    tasks: Mapping[str, Sequence[str]],
    separable: set[tuple[str, str]],
    source: random.Random,
    resamples: int = 300,
) -> Flips:
    """How often the order in a ranking differs from its reference. Exact ties count one half."""
    flipped: dict[tuple[str, str], list[float]] = {}
    top: list[float] = []
    regrets: list[float] = []
    for times, reference in rankings:
        for names in tasks.values():
            here = [name for name in names if name in times and name in reference]
            for one, other in combinations(here, 2):
                flipped.setdefault((one, other), []).append(
                    _disagreement(times[one] - times[other], reference[one] - reference[other])
                )
            if len(here) >= 2:
                chosen = min(here, key=times.__getitem__)
                best = min(here, key=reference.__getitem__)
                top.append(float(reference[chosen] > reference[best]))
                regrets.append(reference[chosen] / reference[best])
    if not flipped:
        return Flips(None, None, None, None, None, None, 0, len(separable))
    sums = {pair: (sum(values), len(values)) for pair, values in flipped.items()}
    total = sum(count for _, count in sums.values())
    sure = [sums[pair] for pair in sums if pair in separable]
    low, high = _bootstrap_flips(sums, tasks, source, resamples)
    return Flips(
        rate=sum(value for value, _ in sums.values()) / total,
        low=low,
        high=high,
        separable_rate=sum(value for value, _ in sure) / sum(count for _, count in sure) if sure else None,
        top1_rate=fmean(top),
        regret=fmean(regrets),
        pairs=len(sums),
        separable_pairs=len(sure),
    )


def _bootstrap_flips(
    sums: Mapping[tuple[str, str], tuple[float, int]],
    tasks: Mapping[str, Sequence[str]],
    source: random.Random,
    resamples: int,
) -> tuple[float, float]:
    """95% interval of the flip rate: candidates of each task are drawn with replacement."""
    rates = []
    for _ in range(resamples):
        weight: dict[str, int] = {}
        for names in tasks.values():
            for name in source.choices(list(names), k=len(names)):
                weight[name] = weight.get(name, 0) + 1
        value = count = 0.0
        for (one, other), (total, size) in sums.items():
            both = weight.get(one, 0) * weight.get(other, 0)
            value += both * total
            count += both * size
        if count:
            rates.append(value / count)
    rates.sort()
    tail = (1 - _CONFIDENCE) / 2
    return (_quantile(rates, tail), _quantile(rates, 1 - tail)) if rates else (0.0, 0.0)


def _disagreement(difference: float, reference: float) -> float:
    if difference == 0 or reference == 0:
        return 0.5
    return float((difference > 0) != (reference > 0))


def _left_out(passes: Sequence[Mapping[str, float]]) -> list[tuple[Mapping[str, float], Mapping[str, float]]]:
    """Each uncontended pass against a reference pooled from the others: what repeating alone costs."""
    result: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
    for at, one in enumerate(passes):
        others = _pooled([each for index, each in enumerate(passes) if index != at])
        result.append((one, {name: median(values) for name, values in others.items()}))
    return result


def _pooled(passes: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for each in passes:
        for name, time_s in each.items():
            values.setdefault(name, []).append(time_s)
    return values


def _tasks(runs: Iterable[Run]) -> dict[str, list[str]]:
    tasks: dict[str, list[str]] = {}
    for run in runs:
        for timing in run.timings:
            names = tasks.setdefault(timing.task, [])
            if timing.name not in names:
                names.append(timing.name)
    return {task: sorted(names) for task, names in sorted(tasks.items())}


def _median_interval(ordered: Sequence[float]) -> tuple[float, float] | None:
    """Distribution-free 95% interval of the median; None below six values, where there is none."""
    n = len(ordered)
    below = 0.0
    rank = -1
    for at in range(n // 2):
        below += math.comb(n, at) / 2**n
        if 2 * below > 1 - _CONFIDENCE:
            break
        rank = at
    return None if rank < 0 else (ordered[rank], ordered[n - 1 - rank])


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


# --- Throughput and claims ----------------------------------------------------------------------------------


def _bound_per_s(by_policy: Mapping[str, Sequence[Run]], parallel: int) -> float | None:
    """The most that `region` could reach.

    No more than the device's ceiling (regions one after another), and no more than ``parallel`` candidates at
    once at the pace of `command`.
    """
    command = [held_s for run in by_policy.get("command", []) for held_s in run.held_s]
    region = [held_s for run in by_policy.get("region", []) for held_s in run.held_s]
    if not command or not region:
        return None
    return min(parallel / fmean(command), 1 / fmean(region))


def _exceeds(bands: Mapping[str, Band], noise: Mapping[str, float]) -> bool:
    return any(band.low > noise.get(name, noise["all"]) + MARGIN for name, band in bands.items())


def _claims(
    rows: Mapping[str, PolicyResult], noise: Mapping[str, float], *, too_noisy: bool, harm: bool
) -> Iterable[Claim]:
    if "region" in rows and rows["region"].speedups:
        speedups = rows["region"].speedups
        listed = ", ".join(f"{speedup:.2f}" for speedup in speedups)
        held = min(speedups) > 1
        yield Claim(
            "throughput",
            held,
            f"region ÷ command is {listed}: {'above' if held else 'NOT above'} 1 in every repetition",
        )
    if "region" in rows:
        bands = rows["region"].inflation
        over = [name for name, band in bands.items() if band.low > noise.get(name, noise["all"]) + MARGIN]
        yield Claim(
            "fidelity",
            not over,
            "timings inside regions are as if alone: in no band is the lower end of the inflation interval "
            "more than 1 point above alone against alone"
            if not over
            else "timings inside regions are NOT as if alone in " + ", ".join(over),
        )
    if "none" in rows:
        yield Claim(
            "control",
            harm,
            "without coordination timings are visibly worse, so this run can show a difference"
            if harm
            else "`none` shows no harm here: the run says nothing about what regions protect from",
        )
    yield Claim(
        "quiet machine",
        not too_noisy,
        f"alone against alone differs by {noise['all']:.1%} (mean), "
        + (
            f"more than {NOISE_LIMIT:.0%}: the machine was too noisy, do not rely on this run"
            if too_noisy
            else f"within {NOISE_LIMIT:.0%}"
        ),
    )
