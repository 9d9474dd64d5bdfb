"""`compare`: who is faster, from blocks in which every candidate is visited once, in random order.

A comparison is a few short regions, so that others get their turn between them; it ends with the first look at
which all pairs are decided, or at its time. A candidate that raises, fails its check or breaks the device's context
is reported for itself; the region is released whatever happens.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from krex_jupyter.protocol import DeviceInfo, Reason, RegionReport, ReportDevice, Verdict

from .measure import LEASE_SPARE_S, judged
from .region import exclusive
from .results import Candidate, Comparison, PairRelation, Ranked
from .statistics import Block, Pair, median, rank
from .statistics import compare as compare_blocks
from .subject import (
    WARM_UP_S,
    Check,
    Settings,
    Subject,
    prepare,
    resolve_device,
    settings_of,
    without_garbage_collection,
)
from .synchronize import synchronise
from .timers import Cache

_REGION_S = 1.0
"""A comparison's regions are about so short."""
_MOST_LOOKS = 5
_VISIT_S = 1e-3
_VISIT_SAMPLES = (3, 20)
_SEVERITY: dict[Verdict, int] = {"clean": 0, "suspect": 1, "unknown": 2, "contended": 3, "revoked": 4}


def compare(
    candidates: Mapping[str, Callable[..., Any]],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    setup: Callable[[], Any] | None = None,
    check: Check | None = None,
    device: str | None = None,
    precision: float = 0.005,
    max_time: float = 1.0,
    cache: Cache = "cold",
    timer: str = "auto",
    margin: float = 0.01,
    label: str | None = None,
) -> Comparison:
    """Which candidate is faster: all are called with the same arguments, interleaved, in few short regions.

    Args:
        candidates: functions by name; at least one.
        args: positional arguments, the same for all.
        kwargs: keyword arguments, the same for all.
        setup: called before each call, untimed.
        check: as for `measure`; a candidate that fails it is reported as such and not compared.
        device: as for `exclusive`.
        precision: chooses batch sizes, as for `measure`.
        max_time: seconds of held time at most, *per candidate*.
        cache: as for `measure`.
        timer: as for `measure`.
        margin: differences up to this fraction make no difference; a pair within it is a TIE.
        label: a name for status and history.

    A candidate that raises, fails its check or breaks the device's context is reported for itself. Raises as
    `measure` does, but never for a candidate's sake.
    """
    settings = settings_of(precision=precision, max_time=max_time, cache=cache)
    if not isinstance(candidates, Mapping):
        raise TypeError(
            f"compare takes functions by name, {{'naive': f, …}}, not {type(candidates).__name__}"
        )
    if not candidates:
        raise ValueError("compare needs at least one candidate, {'naive': f, 'tiled': g}")
    if not (isinstance(margin, int | float) and 0.0 < margin < 1.0):
        raise ValueError(f"margin must be a fraction between 0 and 1, not {margin!r}")
    info, device_id = resolve_device(device)
    contest = _Contest(info)
    for name, fn in candidates.items():
        contest.prepare(str(name), fn, args, kwargs, setup, check, timer, settings)
    reported = ReportDevice(id=device_id, uuid=info.uuid, name=info.name, vendor=info.vendor)
    reports, inside = _interleave(contest, device, label or "compare", settings, margin)
    contest.check_again()
    return _comparison(contest, reported, reports, inside, margin)


class _Contest:
    """The candidates of a comparison: who still takes part, and what was seen of each."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.subjects: dict[str, Subject] = {}
        self.errors: dict[str, str] = {}
        self.names: list[str] = []
        self.samples: dict[str, int] = {}
        self.regions: list[list[dict[str, float]]] = []
        self.context_broken_by = ""

    @property
    def running(self) -> list[str]:
        """Candidates that are measured."""
        return [name for name in self.names if name in self.subjects and name not in self.errors]

    def prepare(
        self,
        name: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        setup: Callable[[], Any] | None,
        check: Check | None,
        timer: str,
        settings: Settings,
    ) -> None:
        """Call the candidate for the first time; what goes wrong is kept as its error."""
        self.names.append(name)
        self.samples[name] = 0
        if self.context_broken_by:
            self._blame_context(name)
            return
        try:
            subject = prepare(fn, args, kwargs, setup, check, self.info, timer, settings)
        except Exception as error:  # noqa: BLE001 (a candidate may raise anything; it is reported for it)
            self.fail(name, error)
            return
        self.subjects[name] = subject
        if subject.check_error:
            self.errors[name] = f"{subject.check_error} It was not measured."

    def fail(self, name: str, error: BaseException) -> None:
        """Take a candidate out, and find out whether it broke the device's context for everybody."""
        self.errors[name] = f"{type(error).__name__}: {error}"
        if self.info.vendor == "cpu":
            return
        broken = synchronise((self.info.uuid,)).error
        if broken:
            self.context_broken_by = name
            self.errors[name] += f" It broke this process's device context ({broken}); restart the kernel."
            for left in self.running:
                self._blame_context(left)

    def _blame_context(self, name: str) -> None:
        self.errors[name] = (
            f"Not measured (any further): '{self.context_broken_by}' broke the device context of this process. Restart "
            f"the kernel and leave it out."
        )

    def check_again(self) -> None:
        """Check what the candidates return now."""
        for name in self.running:
            subject = self.subjects[name]
            subject.check_again()
            if subject.check_error:
                self.errors[name] = f"After the measurement: {subject.check_error}"


def _interleave(
    candidates: _Contest, device: str | None, label: str, settings: Settings, margin: float
) -> tuple[list[RegionReport], bool]:
    """Regions of blocks until all pairs are decided or the time is over: their reports, and whether some lack one."""
    rng = random.Random(len(candidates.names))  # noqa: S311 (an order, not a secret)
    budget_s = settings.max_time_s * max(len(candidates.running), 1)
    reports: list[RegionReport] = []
    unreported = False
    spent_s = 0.0
    looks = 0
    while candidates.running:
        blocks = _blocks_per_region(candidates, looks_left=_MOST_LOOKS - looks)
        # A block is never cut short, and others' work may have stretched what is expected.
        block_s = sum(_visit_cost_s(candidates.subjects[name]) for name in candidates.running)
        lease_s = _REGION_S + 4.0 * block_s + LEASE_SPARE_S
        with exclusive(device, label=label, max_hold=lease_s) as region, without_garbage_collection():
            started_s = time.perf_counter()
            taken = _blocks(candidates, blocks, rng, settings, started_s, min(_REGION_S, budget_s - spent_s))
            spent_s += time.perf_counter() - started_s
        candidates.regions.append(taken)
        if region.report is None:
            unreported = True
        else:
            reports.append(region.report)
        looks += 1
        if spent_s >= budget_s or looks >= _MOST_LOOKS or len(candidates.running) < 2:
            break
        if looks >= 2 and all(pair.relation != "UNRESOLVED" for pair in _decide(candidates, margin)[1]):
            break
    return reports, unreported


def _blocks_per_region(candidates: _Contest, *, looks_left: int) -> int:
    """Half of what Holm's first step needs for a certain decision, so that two regions can decide."""
    pairs = max(len(candidates.running) * (len(candidates.running) - 1) // 2, 1)
    least = math.ceil(math.log2(2.0 * pairs * _MOST_LOOKS / 0.05))
    return math.ceil(least / 2) + 1 if looks_left else 1


def _blocks(
    candidates: _Contest, count: int, rng: random.Random, settings: Settings, started_s: float, most_s: float
) -> list[dict[str, float]]:
    """The blocks of one region: medians by candidate."""
    names = candidates.running
    # Warm up with everybody in turn, by time.
    while time.perf_counter() - started_s < min(WARM_UP_S, most_s / 4.0):
        for name in names:
            _visit(candidates, name, samples=1)
    taken: list[dict[str, float]] = []
    for number in range(count):
        if number and time.perf_counter() - started_s >= most_s:
            break
        order = candidates.running
        rng.shuffle(order)
        block: dict[str, float] = {}
        for name in order:
            found = _visit(candidates, name, samples=None)
            if found:
                block[name] = median(found)
                candidates.samples[name] += len(found)
        taken.append(block)
    return taken


def _visit_samples(subject: Subject) -> int:
    sample_s = subject.expected_s * subject.plan.batch
    if sample_s > 10.0 * _VISIT_S:
        return 1
    return min(max(math.ceil(_VISIT_S / sample_s), _VISIT_SAMPLES[0]), _VISIT_SAMPLES[1])


def _visit_cost_s(subject: Subject) -> float:
    return (_visit_samples(subject) + 1) * subject.expected_s * subject.plan.batch


def _visit(candidates: _Contest, name: str, *, samples: int | None) -> list[float]:
    """Sample one candidate for about a millisecond, after one untimed sample: what it finds is another's state."""
    if name in candidates.errors:
        return []
    subject = candidates.subjects[name]
    wanted = samples or _visit_samples(subject)
    try:
        if samples is None:
            subject.sample(1)
        found: list[float] = []
        while len(found) < wanted:
            found += subject.sample(wanted - len(found))
    except Exception as error:  # noqa: BLE001 (a candidate may raise anything; it is reported for it)
        candidates.fail(name, error)
        return []
    return found


def _decide(candidates: _Contest, margin: float) -> tuple[list[list[Block]], list[Pair]]:
    """The blocks of those that still take part, and what they decide."""
    usable = set(candidates.running)
    regions: list[list[Block]] = [
        [{name: value for name, value in block.items() if name in usable} for block in blocks]
        for blocks in candidates.regions
    ]
    # The looks share the error that is allowed, as each of them could have been the last.
    return regions, compare_blocks(regions, margin=margin, confidence=1.0 - 0.05 / _MOST_LOOKS)


def _comparison(
    candidates: _Contest, device: ReportDevice, reports: list[RegionReport], inside: bool, margin: float
) -> Comparison:
    regions, decided = _decide(candidates, margin)
    places = rank(regions, decided)
    verdict: Verdict = "clean" if reports else "unknown"
    reasons: dict[str, Reason] = {}
    for report in reports:
        verdict = max(verdict, report.verdict, key=_SEVERITY.__getitem__)
        for reason in report.reasons:
            reasons.setdefault(reason.code, reason)
    if inside:
        verdict = max(verdict, "unknown", key=_SEVERITY.__getitem__)
        _, (held,) = judged(None, [])
        reasons.setdefault(held.code, held)
    return Comparison(
        device=device,
        verdict=verdict,
        reasons=tuple(reasons.values()),
        margin=margin,
        candidates=tuple(_candidate(candidates, name) for name in candidates.names),
        pairs=tuple(
            PairRelation(
                first=pair.first,
                second=pair.second,
                ratio=pair.ratio,
                interval=pair.interval,
                level=pair.level,
                relation=pair.relation,
                blocks=pair.blocks,
                needs=pair.needs,
            )
            for pair in decided
        ),
        ranking=tuple(
            Ranked(name=place.name, group=place.group, median_s=place.median_s, flip_risk=place.flip_risk)
            for place in places
        ),
        block_medians_s=tuple(tuple(dict(block) for block in blocks) for blocks in candidates.regions),
        regions=tuple(reports),
    )


def _candidate(candidates: _Contest, name: str) -> Candidate:
    subject = candidates.subjects.get(name)
    values = [block[name] for blocks in candidates.regions for block in blocks if name in block]
    error = candidates.errors.get(name, "")
    return Candidate(
        name=name,
        valid=not error,
        error=error,
        median_s=median(values) if values else None,
        blocks=len(values),
        samples=candidates.samples[name],
        batch=1 if subject is None else subject.plan.batch,
        timer="" if subject is None else subject.timer_name,
        cache="warm" if subject is None else subject.plan.cache,
        notes=() if subject is None else tuple(subject.notes),
    )
