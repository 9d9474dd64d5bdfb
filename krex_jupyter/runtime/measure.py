"""`measure` and `compare`: from a function to a number with its verdict.

Held time is what everyone else pays, so a region holds only what must be exclusive:

    outside   resolve the device, choose the timer, first call (JIT, allocation), check, batch or graph
    inside    warm up by time → clock → sample, look, sample, look … → clock
    outside   check the last result, judge, describe

A measurement is one region. A comparison is a few short ones, each with blocks in which every candidate is
visited once, in random order; it ends with the first look at which all pairs are decided, or at its time.

What a candidate does wrong is reported for it; the region is released whatever happens.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from krex_jupyter.devices.names import resolve_here
from krex_jupyter.errors import KrexError
from krex_jupyter.protocol import DeviceInfo, Queued, Reason, RegionReport, ReportDevice, Verdict

from . import client
from .readings import Readings
from .region import Region, exclusive
from .results import Candidate, Comparison, Measurement, PairRelation, Ranked
from .statistics import FIRST_LOOK, Block, Look, Pair, look, median, next_look, rank
from .statistics import compare as compare_blocks
from .synchronize import synchronise
from .timers import Cache, Call, GraphRefused, Plan, Timer, choose, current_device_uuid, plan

MOST_SAMPLES = 10_000
"""More are never taken: the median would not get better, and a look at them takes 20 ms."""
WARM_UP_S = 0.02
"""Shortest warm-up: clocks ramp within it on the GPUs seen so far."""
_WARM_UP_BLOCK_S = 5e-3
_WARM_UP_MOST = 0.25
"""Longest warm-up as a share of ``max_time``."""
_OVER_TIME = 4.0
"""A call that takes so many times ``max_time`` is refused. Not 1: others' work stretches a call outside regions."""
_LEASE_SPARE_S = 2.0
_OTHER_STREAM_S = 50e-6
_OTHER_STREAM_SHARE = 0.05
_NOTHING_BELOW = 1.5
"""Times an empty sample: what reads no more launched nothing that the timer sees."""
_REGION_S = 1.0
"""A comparison's regions are about so short, so that others get their turn between them."""
_MOST_LOOKS = 5
_VISIT_S = 1e-3
_VISIT_SAMPLES = (3, 20)
_FRAMEWORKS = ("torch", "cupy", "numba", "jax", "tensorflow", "triton")
_SEVERITY: dict[Verdict, int] = {"clean": 0, "suspect": 1, "unknown": 2, "contended": 3, "revoked": 4}

Check: TypeAlias = Callable[[Any], Any]


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
    settings = _settings(precision=precision, max_time=max_time, cache=cache)
    name = label if label is not None else _name_of(fn)
    info, device_id = _resolve(device)
    subject = _prepare(fn, args, kwargs, setup, check, info, timer, settings)
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
    lease_s = max_time + 4.0 * subject.expected_s + _LEASE_SPARE_S
    held = exclusive(device, label=name, max_hold=lease_s, on_queued=on_queued)
    with held as region, _without_garbage_collection():
        run = _sample(subject, readings, settings)
    subject.check_again()
    return _measurement(name, reported, subject, run, region, settings, _frameworks_loaded() - loaded)


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
    settings = _settings(precision=precision, max_time=max_time, cache=cache)
    if not isinstance(candidates, Mapping):
        raise TypeError(
            f"compare takes functions by name, {{'naive': f, …}}, not {type(candidates).__name__}"
        )
    if not candidates:
        raise ValueError("compare needs at least one candidate, {'naive': f, 'tiled': g}")
    if not (isinstance(margin, int | float) and 0.0 < margin < 1.0):
        raise ValueError(f"margin must be a fraction between 0 and 1, not {margin!r}")
    info, device_id = _resolve(device)
    contest = _Contest(info)
    for name, fn in candidates.items():
        contest.prepare(str(name), fn, args, kwargs, setup, check, timer, settings)
    reported = ReportDevice(id=device_id, uuid=info.uuid, name=info.name, vendor=info.vendor)
    reports, inside = _interleave(contest, device, label or "compare", settings, margin)
    contest.check_again()
    return _comparison(contest, reported, reports, inside, margin)


# --- Preparing, outside the region ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Settings:
    precision: float
    max_time_s: float
    cache: Cache


def _settings(*, precision: float, max_time: float, cache: str) -> _Settings:
    if isinstance(precision, bool) or not isinstance(precision, int | float) or not 0.0 < precision < 1.0:
        raise ValueError(
            f"precision must be a fraction between 0 and 1, such as 0.005 for 0.5%, not {precision!r}"
        )
    if isinstance(max_time, bool) or not isinstance(max_time, int | float) or not 0.0 < max_time < math.inf:
        raise ValueError(f"max_time must be a number of seconds above 0, not {max_time!r}")
    if cache not in ("cold", "warm"):
        raise ValueError(f"cache must be 'cold' or 'warm', not {cache!r}")
    return _Settings(float(precision), float(max_time), cast("Cache", cache))


def _resolve(device: str | None) -> tuple[DeviceInfo, str]:
    """The device, and what the user calls it."""
    if device is not None and not isinstance(device, str):
        raise TypeError(f"device must be one device, such as 'cuda:0' or 'cpu', not {device!r}")
    info = resolve_here(device, client.join().devices)
    kind = {"nvidia": "cuda", "amd": "hip", "cpu": "cpu"}[info.vendor]
    return info, device or (kind if info.index is None else f"{kind}:{info.index}")


@dataclass(slots=True)
class _Subject:
    """A function that is ready to be timed."""

    call: Call
    timed: Call
    """What is timed: the call, or a launch of a graph that holds a batch of them."""
    timer: Timer
    plan: Plan
    setup: Call | None
    check: Check | None
    expected_s: float
    """Rough seconds per call, from outside the region: others may have stretched it."""
    graph_batch: int = 1
    """Calls in the graph; 1 where there is none."""
    check_error: str = ""
    notes: list[str] = field(default_factory=list)

    def sample(self, count: int) -> list[float]:
        """Up to ``count`` samples of seconds per call."""
        loops = 1 if self.graph_batch > 1 else self.plan.batch
        taken = self.timer.sample(
            self.timed,
            count,
            batch=loops,
            cache=self.plan.cache,
            setup=self.setup,
            expected_s=self.expected_s * self.graph_batch,
        )
        return [sample_s / self.graph_batch for sample_s in taken]

    def check_again(self) -> None:
        """Check the result that the function has now; a function may be right once and wrong later."""
        if self.check is None or self.check_error:
            return
        try:
            if self.setup is not None:
                self.setup()
            result = self.call()
        except Exception as error:  # noqa: BLE001 (its numbers are there already, and stay)
            self.check_error = f"Called once more after the region, to check its result, it raised {type(error).__name__}: {error}"
            return
        self.check_error = _checked(self.check, result)


def _prepare(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    setup: Callable[[], Any] | None,
    check: Check | None,
    info: DeviceInfo,
    timer_name: str,
    settings: _Settings,
) -> _Subject:
    for what, value in (("fn", fn), ("setup", setup), ("check", check)):
        if not callable(value) and (value is not None or what == "fn"):
            raise TypeError(f"{what} must be callable, not {type(value).__name__}")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a tuple of positional arguments, not {type(args).__name__}: args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of keyword arguments, not {type(kwargs).__name__}")
    named = dict(kwargs or {})
    call: Call = functools.partial(fn, *args, **named) if args or named else fn
    timer = choose(timer_name, info, [*args, *named.values()], [fn])
    timer.prepare()
    _refuse_another_device(info)

    before = None if setup is not None else _fingerprint([*args, *named.values()])
    result, expected_s = _once(timer, call, setup)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(
            f"{_name_of(fn)} is asynchronous: calling it only makes a coroutine. Measure a function that waits for it."
        )
    if inspect.isgenerator(result):
        raise TypeError(
            f"{_name_of(fn)} is a generator function: calling it runs nothing. Measure a function that exhausts it."
        )
    check_error = "" if check is None else _checked(check, result)
    notes = []
    if before is not None and _fingerprint([*args, *named.values()]) != before:
        notes.append(
            "The function changes its inputs, so that each call works on what the last one left. Use setup= to "
            "restore them (untimed)."
        )
    if not check_error:
        # The first call compiled and allocated; only the second says how long one takes.
        _, second_s = _once(timer, call, setup)
        expected_s = min(expected_s, second_s)
        if expected_s > _OVER_TIME * settings.max_time_s:
            raise KrexError(
                f"One call of {_name_of(fn)} takes about {expected_s:.3g} s and max_time is {settings.max_time_s:g} s: "
                f"nothing could be said. Time less work, or give it max_time={math.ceil(FIRST_LOOK * expected_s)} "
                f"({FIRST_LOOK} calls)."
            )
        if expected_s < WARM_UP_S:
            expected_s = min(timer.sample(call, 5, batch=1, cache="warm", setup=setup, expected_s=expected_s))
    planned = plan(
        timer, expected_s, precision=settings.precision, cache=settings.cache, has_setup=setup is not None
    )
    subject = _Subject(
        call=call,
        timed=call,
        timer=timer,
        plan=planned,
        setup=setup,
        check=check,
        expected_s=max(expected_s, 1e-9),
        check_error=check_error,
        notes=[*notes, *planned.notes],
    )
    if planned.wants_graph and not check_error:
        try:
            subject.timed = timer.graph(call, planned.batch)
            subject.graph_batch = planned.batch
        except GraphRefused as refused:
            subject.notes.append(
                f"No graph ({refused}): launched one by one, so that below about 10 µs this is the time of launching."
            )
    return subject


def _refuse_another_device(info: DeviceInfo) -> None:
    """Raise `KrexError` where the framework's current device is another one that the coordinator knows."""
    if info.vendor != "nvidia":
        return
    current = current_device_uuid()
    for other in client.join().devices:
        if other.uuid == current != info.uuid:
            raise KrexError(
                f"The region would be on {info.name} ({info.uuid}), but this thread's current CUDA device is "
                f"{other.name} ({current}). Make it current first (torch.cuda.set_device, cupy.cuda.Device(n).use()), "
                f"or name the other one: device={current!r}."
            )


def _once(timer: Timer, call: Call, setup: Call | None) -> tuple[Any, float]:
    if setup is not None:
        setup()
    return timer.once(call)


def _checked(check: Check, result: Any) -> str:
    """Why the check failed; empty where it passed. None counts as passed: a check may consist of assertions."""
    try:
        passed = check(result)
        failed = passed is not None and not bool(passed)
    except Exception as error:  # noqa: BLE001 (whatever the user's check raises is its verdict)
        return f"The check raised {type(error).__name__}: {error}"
    return "The check of the result returned a false value." if failed else ""


def _fingerprint(objects: Sequence[object]) -> list[str]:
    """A few values of each array or list, to see whether a call changes its inputs."""
    return [_few_of(value) for value in objects]


def _few_of(value: Any) -> str:
    try:
        if isinstance(value, list | bytearray):
            return repr([id(item) for item in value[:: max(len(value) // 64, 1)]])
        if hasattr(value, "reshape") and hasattr(value, "tolist"):
            flat = value.detach().reshape(-1) if hasattr(value, "detach") else value.reshape(-1)
            return repr(flat[:: max(len(flat) // 64, 1)].tolist())
    except Exception:  # noqa: BLE001 (arrays of many kinds; one that cannot be read is not compared)
        return ""
    return ""


def _name_of(fn: object) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", type(fn).__name__)).replace("<locals>.", "")


def _frameworks_loaded() -> frozenset[str]:
    return frozenset(name for name in _FRAMEWORKS if name in sys.modules)


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


def _sample(subject: _Subject, readings: Readings, settings: _Settings) -> _Run:
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


def _affordable(subject: _Subject, settings: _Settings) -> bool:
    """Whether one more call for the cross-check leaves time for samples."""
    return subject.expected_s < settings.max_time_s / 40.0


def _warm_up(subject: _Subject, settings: _Settings, started_s: float) -> None:
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


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """As `timeit` does: a collection is not the function's own time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- One measurement, judged ---------------------------------------------------------------------------------------


def _measurement(
    name: str,
    device: ReportDevice,
    subject: _Subject,
    run: _Run,
    region: Region,
    settings: _Settings,
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
    verdict, reasons = _judged(region.report, [reason for reason in own if reason.code != "imprecise"])
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
        timer=_timer_name(subject),
        cache=subject.plan.cache,
        clock_mhz=clocks or None,
        temperature_c=temperatures or None,
        warm_up_s=run.warm_up_s,
        notes=tuple(subject.notes),
        region=region.report,
    )


def _timer_name(subject: _Subject) -> str:
    if subject.graph_batch > 1:
        return f"{subject.timer.name}, graph"
    return subject.timer.name + (", batch" if subject.plan.batch > 1 else "")


def _of_the_call(subject: _Subject, run: _Run, seen: Look) -> list[Reason]:
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


def _judged(report: RegionReport | None, own: Sequence[Reason]) -> tuple[Verdict, tuple[Reason, ...]]:
    """The region's verdict, made at least `suspect` by reasons of the samples' own."""
    if report is None:
        inside = Reason(
            code="inside_region",
            detail="Measured inside a region that is still held: its report has the verdict when it ends.",
        )
        return "unknown", (inside, *own)
    verdict: Verdict = "suspect" if own and report.verdict == "clean" else report.verdict
    return verdict, (*report.reasons, *own)


# --- Comparing -----------------------------------------------------------------------------------------------------


class _Contest:
    """The candidates of a comparison: who still takes part, and what was seen of each."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.subjects: dict[str, _Subject] = {}
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
        settings: _Settings,
    ) -> None:
        """Call the candidate for the first time; what goes wrong is kept as its error."""
        self.names.append(name)
        self.samples[name] = 0
        if self.context_broken_by:
            self._blame_context(name)
            return
        try:
            subject = _prepare(fn, args, kwargs, setup, check, self.info, timer, settings)
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
    candidates: _Contest, device: str | None, label: str, settings: _Settings, margin: float
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
        lease_s = _REGION_S + 4.0 * block_s + _LEASE_SPARE_S
        with exclusive(device, label=label, max_hold=lease_s) as region, _without_garbage_collection():
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
    candidates: _Contest, count: int, rng: random.Random, settings: _Settings, started_s: float, most_s: float
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


def _visit_samples(subject: _Subject) -> int:
    sample_s = subject.expected_s * subject.plan.batch
    if sample_s > 10.0 * _VISIT_S:
        return 1
    return min(max(math.ceil(_VISIT_S / sample_s), _VISIT_SAMPLES[0]), _VISIT_SAMPLES[1])


def _visit_cost_s(subject: _Subject) -> float:
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
        _, (held,) = _judged(None, [])
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
        timer="" if subject is None else _timer_name(subject),
        cache="warm" if subject is None else subject.plan.cache,
        notes=() if subject is None else tuple(subject.notes),
    )
