"""`measure`: from a function to a number with its verdict.

Held time is what everyone else pays, so a region holds only what must be exclusive:

    outside   resolve the device, choose the timer, first call (JIT, allocation), check, batch or graph
    inside    warm up by time → clock → sample, look, sample, look … → clock
    outside   check the last result, judge, describe

The region is released whatever the function does, and its exceptions come through as they are.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from krex_jupyter.protocol import Queued, Reason, RegionReport, ReportDevice, Verdict

from .readings import Readings
from .region import Region, exclusive
from .results import Measurement
from .statistics import FIRST_LOOK, Look, look, median, next_look
from .subject import (
    WARM_UP_S,
    Check,
    Settings,
    Subject,
    name_of,
    prepare,
    resolve_device,
    settings_of,
    without_garbage_collection,
)
from .timers import Cache

MOST_SAMPLES = 10_000
"""More are never taken: the median would not get better, and a look at them takes 20 ms."""
LEASE_SPARE_S = 2.0
_WARM_UP_BLOCK_S = 5e-3
_WARM_UP_MOST = 0.25
"""Longest warm-up as a share of ``max_time``."""
_OTHER_STREAM_S = 50e-6
_OTHER_STREAM_SHARE = 0.05
_NOTHING_BELOW = 1.5
"""Times an empty sample: what reads no more launched nothing that the timer sees."""
_FRAMEWORKS = ("torch", "cupy", "numba", "jax", "tensorflow", "triton")


def measure(
    fn: Callable[..., Any],
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
    label: str | None = None,
    on_queued: Callable[[Queued], None] | None = None,
) -> Measurement:
    """How long ``fn(*args, **kwargs)`` takes, measured in an exclusive region.

    Blocks for its turn, then holds the device for 20 ms of warm-up and as many calls as the precision needs, at
    most ``max_time``. The function is called a few times before (outside the region).

    Args:
        fn: the function; its exceptions come through unchanged, with the region released.
        args: positional arguments.
        kwargs: keyword arguments.
        setup: called before each call, untimed; for functions that change their inputs.
        check: gets the function's result, outside the timed part. False, or an exception, makes the result invalid.
        device: as for `exclusive`.
        precision: wanted half-width of the median's 99% interval, as a fraction. It is repeatability within this
            region, not accuracy from run to run.
        max_time: seconds of sampling at most, warm-up included.
        cache: ``cold`` overwrites the device's L2 before each call; ``warm`` does not. On the cpu always warm.
        timer: ``auto``, ``host``, ``events``, ``torch``, ``cupy``, ``numba``. Named on the result.
        label: a name for status, history and result; the function's name where it is None.
        on_queued: as for `exclusive`.

    Raises:
        ValueError, TypeError: an argument that cannot be meant.
        KrexError: no timer for the device; a call that is far longer than ``max_time``; and what `exclusive` raises.
    """
    settings = settings_of(precision=precision, max_time=max_time, cache=cache)
    name = label if label is not None else name_of(fn)
    info, device_id = resolve_device(device)
    subject = prepare(fn, args, kwargs, setup, check, info, timer, settings)
    reported = ReportDevice(id=device_id, uuid=info.uuid, name=info.name, vendor=info.vendor)
    if subject.check_error:
        return Measurement(
            label=name,
            device=reported,
            verdict="unknown",
            reasons=(Reason(code="check_failed", detail=subject.check_error),),
            valid=False,
            settled=False,
            precision=precision,
            median_s=None,
            timer=subject.timer.name,
            notes=(*subject.notes, "Nothing was measured: a wrong result is not worth the device's time."),
        )
    readings = Readings(info)
    loaded = _frameworks_loaded()
    lease_s = max_time + 4.0 * subject.expected_s + LEASE_SPARE_S
    held = exclusive(device, label=name, max_hold=lease_s, on_queued=on_queued)
    with held as region, without_garbage_collection():
        run = _sample(subject, readings, settings)
    subject.check_again()
    return _measurement(name, reported, subject, run, region, settings, _frameworks_loaded() - loaded)


# --- Inside the region ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """What was sampled in a region."""

    samples_s: list[float]
    seen: Look | None
    warm_up_s: float
    clocks_mhz: list[float | None]
    temperatures_c: list[float | None]
    outlasts_s: float


def _sample(subject: Subject, readings: Readings, settings: Settings) -> _Run:
    started_s = time.perf_counter()
    _warm_up(subject, settings, started_s)
    warm_up_s = time.perf_counter() - started_s
    outlasts_s = subject.timer.outlasts(subject.call) if _affordable(subject, settings) else 0.0
    first = readings.read()
    samples_s: list[float] = []
    wanted = FIRST_LOOK
    seen: Look | None = None
    resolution_s = subject.timer.resolution_s / subject.plan.batch
    while True:
        while len(samples_s) < wanted and time.perf_counter() - started_s < settings.max_time_s:
            samples_s += subject.sample(wanted - len(samples_s))
        if not samples_s:
            # The warm-up took it all: one sample is the least that is owed.
            samples_s += subject.sample(1)
        seen = look(samples_s, precision=settings.precision, resolution_s=resolution_s)
        over = time.perf_counter() - started_s >= settings.max_time_s
        if seen.settled or seen.hopeless or over or wanted >= MOST_SAMPLES:
            break
        wanted = min(next_look(wanted), MOST_SAMPLES)
    last = readings.read()
    return _Run(
        samples_s=samples_s,
        seen=seen,
        warm_up_s=warm_up_s,
        clocks_mhz=[first.clock_mhz, last.clock_mhz],
        temperatures_c=[first.temperature_c, last.temperature_c],
        outlasts_s=outlasts_s,
    )


def _affordable(subject: Subject, settings: Settings) -> bool:
    """Whether one more call for the cross-check leaves time for samples."""
    return subject.expected_s < settings.max_time_s / 40.0


def _warm_up(subject: Subject, settings: Settings, started_s: float) -> None:
    """Call for at least 20 ms, until two blocks in a row agree, at most a quarter of the time."""
    most_s = max(_WARM_UP_MOST * settings.max_time_s, min(WARM_UP_S, settings.max_time_s / 2.0))
    before: float | None = None
    while True:
        block: list[float] = []
        block_ends_s = time.perf_counter() + _WARM_UP_BLOCK_S
        while not block or time.perf_counter() < block_ends_s:
            block += subject.sample(20)
        now = median(block)
        spent_s = time.perf_counter() - started_s
        steady = before is not None and abs(now - before) <= 2.0 * settings.precision * before
        if spent_s >= most_s or (spent_s >= WARM_UP_S and steady):
            return
        before = now


def _frameworks_loaded() -> frozenset[str]:
    return frozenset(name for name in _FRAMEWORKS if name in sys.modules)


# --- One measurement, judged ---------------------------------------------------------------------------------------


def _measurement(
    name: str,
    device: ReportDevice,
    subject: Subject,
    run: _Run,
    region: Region,
    settings: Settings,
    imported: frozenset[str],
) -> Measurement:
    clocks = tuple(clock for clock in run.clocks_mhz if clock is not None)
    seen = look(
        run.samples_s,
        precision=settings.precision,
        resolution_s=subject.timer.resolution_s / subject.plan.batch,
        clocks_mhz=clocks,
    )
    own = [Reason(code=finding.code, detail=finding.detail) for finding in seen.findings]
    own += _of_the_call(subject, run, seen)
    if imported:
        own.append(
            Reason(
                code="framework_imported",
                detail=f"{', '.join(sorted(imported))} was first imported inside the region. Import it before.",
            )
        )
    verdict, reasons = judged(region.report, [reason for reason in own if reason.code != "imprecise"])
    reasons += tuple(reason for reason in own if reason.code == "imprecise")
    if subject.check_error:
        reasons += (Reason(code="check_failed", detail=subject.check_error),)
    summary = seen.summary
    temperatures = tuple(value for value in run.temperatures_c if value is not None)
    return Measurement(
        label=name,
        device=device,
        verdict=verdict,
        reasons=reasons,
        valid=not subject.check_error,
        settled=seen.settled,
        precision=settings.precision,
        median_s=summary.median_s,
        mean_s=summary.mean_s,
        min_s=summary.min_s,
        stdev_s=summary.stdev_s,
        ci95_s=summary.ci95_s,
        ci99_s=summary.ci99_s,
        n=summary.n,
        n_effective=summary.n_effective,
        outlier_share=summary.outlier_share,
        mean_over_min=summary.mean_over_min,
        samples_s=tuple(run.samples_s),
        batch=subject.plan.batch,
        timer=subject.timer_name,
        cache=subject.plan.cache,
        clock_mhz=clocks or None,
        temperature_c=temperatures or None,
        warm_up_s=run.warm_up_s,
        notes=tuple(subject.notes),
        region=region.report,
    )


def _of_the_call(subject: Subject, run: _Run, seen: Look) -> list[Reason]:
    """What the call itself did that makes its number doubtful."""
    found: list[Reason] = []
    sample_s = seen.summary.median_s * subject.plan.batch
    if subject.timer.can_flush and sample_s <= _NOTHING_BELOW * subject.timer.empty_s:
        found.append(
            Reason(
                code="nothing_launched",
                detail=f"The timer saw {sample_s * 1e6:.3g} µs, an empty sample reads "
                f"{subject.timer.empty_s * 1e6:.3g} µs: the call launched nothing on its stream. Launch on the "
                f"current stream, or time by timer='host'.",
            )
        )
    if run.outlasts_s > max(_OTHER_STREAM_S, _OTHER_STREAM_SHARE * seen.summary.median_s):
        found.append(
            Reason(
                code="other_stream",
                detail=f"The device worked {run.outlasts_s * 1e6:.3g} µs longer than the timer saw: the call uses "
                f"another stream. Have the current stream wait for it, or time by timer='host'.",
            )
        )
    return found


def judged(report: RegionReport | None, own: Sequence[Reason]) -> tuple[Verdict, tuple[Reason, ...]]:
    """The region's verdict, made at least `suspect` by reasons of the samples' own."""
    if report is None:
        inside = Reason(
            code="inside_region",
            detail="Measured inside a region that is still held: its report has the verdict when it ends.",
        )
        return "unknown", (inside, *own)
    verdict: Verdict = "suspect" if own and report.verdict == "clean" else report.verdict
    return verdict, (*report.reasons, *own)
