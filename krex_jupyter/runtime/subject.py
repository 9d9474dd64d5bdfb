"""A function made ready to be timed: everything that happens outside the region.

First call (JIT, module load, allocation), check of its result, timer, batch or graph. What cannot be measured is
refused here, before anybody is held up.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from krex_jupyter.devices.names import resolve_here
from krex_jupyter.errors import KrexError
from krex_jupyter.protocol import DeviceInfo

from . import client
from .statistics import FIRST_LOOK
from .timers import Cache, Call, GraphRefused, Plan, Timer, choose, current_device_uuid, plan

WARM_UP_S = 0.02
"""Shortest warm-up: clocks ramp within it on the GPUs seen so far."""
_OVER_TIME = 4.0
"""A call that takes so many times ``max_time`` is refused. Not 1: others' work stretches a call outside regions."""

Check: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked for, checked."""

    precision: float
    max_time_s: float
    cache: Cache


def settings_of(*, precision: float, max_time: float, cache: str) -> Settings:
    """The settings; raises `ValueError` for what cannot be meant."""
    if isinstance(precision, bool) or not isinstance(precision, int | float) or not 0.0 < precision < 1.0:
        raise ValueError(
            f"precision must be a fraction between 0 and 1, such as 0.005 for 0.5%, not {precision!r}"
        )
    if isinstance(max_time, bool) or not isinstance(max_time, int | float) or not 0.0 < max_time < math.inf:
        raise ValueError(f"max_time must be a number of seconds above 0, not {max_time!r}")
    if cache not in ("cold", "warm"):
        raise ValueError(f"cache must be 'cold' or 'warm', not {cache!r}")
    return Settings(float(precision), float(max_time), cast("Cache", cache))


def resolve_device(device: str | None) -> tuple[DeviceInfo, str]:
    """The device, and what the user calls it."""
    if device is not None and not isinstance(device, str):
        raise TypeError(f"device must be one device, such as 'cuda:0' or 'cpu', not {device!r}")
    info = resolve_here(device, client.join().devices)
    kind = {"nvidia": "cuda", "amd": "hip", "cpu": "cpu"}[info.vendor]
    return info, device or (kind if info.index is None else f"{kind}:{info.index}")


@dataclass(slots=True)
class Subject:
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

    @property
    def timer_name(self) -> str:
        """The timer as results name it."""
        if self.graph_batch > 1:
            return f"{self.timer.name}, graph"
        return self.timer.name + (", batch" if self.plan.batch > 1 else "")

    def check_again(self) -> None:
        """Check the result that the function has now; a function may be right once and wrong later."""
        if self.check is None or self.check_error:
            return
        try:
            if self.setup is not None:
                self.setup()
            result = self.call()
        except Exception as error:  # noqa: BLE001 (its numbers are there already, and stay)
            self.check_error = (
                f"Called once more after the region, to check its result, it raised "
                f"{type(error).__name__}: {error}"
            )
            return
        self.check_error = _checked(self.check, result)


def prepare(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    setup: Callable[[], Any] | None,
    check: Check | None,
    info: DeviceInfo,
    timer_name: str,
    settings: Settings,
) -> Subject:
    """Call the function for the first times, and choose how it will be timed.

    A failed check is noted in the subject, with nothing further done. Raises `TypeError` and `ValueError` for
    arguments that cannot be meant, `KrexError` where it cannot be timed, and whatever the function raises.
    """
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
            f"{name_of(fn)} is asynchronous: calling it only makes a coroutine. Measure a function that waits for it."
        )
    if inspect.isgenerator(result):
        raise TypeError(
            f"{name_of(fn)} is a generator function: calling it runs nothing. Measure a function that exhausts it."
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
                f"One call of {name_of(fn)} takes about {expected_s:.3g} s and max_time is {settings.max_time_s:g} s: "
                f"nothing could be said. Time less work, or give it max_time={math.ceil(FIRST_LOOK * expected_s)} "
                f"({FIRST_LOOK} calls)."
            )
        if expected_s < WARM_UP_S:
            expected_s = min(timer.sample(call, 5, batch=1, cache="warm", setup=setup, expected_s=expected_s))
    planned = plan(
        timer, expected_s, precision=settings.precision, cache=settings.cache, has_setup=setup is not None
    )
    subject = Subject(
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


def name_of(fn: object) -> str:
    """What the function calls itself; for messages and labels."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", type(fn).__name__)).replace("<locals>.", "")


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """As `timeit` does: a collection is not the function's own time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
