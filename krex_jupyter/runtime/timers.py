"""How a call is timed: by the host's clock or by the device's, in batches where one call is too short.

`choose` finds the timer from the objects that the call works on, else from the stream that is current in a
loaded framework; its `name` goes with every result. There is no fall-back from one kind of timer to another: where
the right one cannot be had, `choose` raises and says what to do. No framework is ever imported here, so that none
is imported for the first time inside a region.

Device events are recorded on the framework's current stream. Work that the call puts on another stream escapes
them, so `outlasts` compares the end event with a device-wide synchronise; and a call that launches nothing reads
as long as an empty pair of events (`empty_s`). Short calls are captured in a graph where the framework can, else
batched: then a sample is the mean of its calls, and the cache is warm, because nothing can be flushed in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

from krex_jupyter.errors import KrexError
from krex_jupyter.protocol import DeviceInfo

from .statistics import median
from .synchronize import mapped_libcuda, synchronise

Call: TypeAlias = Callable[[], Any]
Cache: TypeAlias = Literal["cold", "warm"]
FRAMEWORKS = ("torch", "cupy", "numba")
"""Those with device events, in the order they are asked where the call's objects do not tell."""

GRAPH_BELOW_S = 50e-6
"""Shorter calls are launched from a graph or in a batch: launching from Python takes 5-20 µs a call."""
_ENOUGH_IN_FLIGHT_S = 5e-3
"""Calls are queued ahead of the device for at most so long, so that `max_time` is kept."""
_MOST_IN_FLIGHT = 32
_MOST_BATCH = 1 << 20
_EVENT_RESOLUTION_S = 0.5e-6
"""As documented for CUDA events; `prepare` finds the step that this device has."""
_CALIBRATIONS = 24
_REFILL_COUNTS_BELOW_S = 2e-3
_FLUSH_OF_CACHE = 2
"""The flush writes so many times the L2: a partitioned L2 keeps lines in either half."""


class Timer(Protocol):
    """Takes samples of a call. All methods are called in the thread that measures."""

    name: str
    """What a result says."""
    resolution_s: float
    empty_s: float
    """What an empty sample reads: a call that reads no more did nothing that this timer sees."""
    can_flush: bool
    """False: there is no cache that it can flush; results say "warm"."""

    def prepare(self) -> None:
        """Allocate and calibrate, outside a region."""
        ...

    def once(self, call: Call) -> tuple[Any, float]:
        """The call's result, and roughly how long it took on the host, its device work included."""
        ...

    def sample(
        self, call: Call, count: int, *, batch: int, cache: Cache, setup: Call | None, expected_s: float
    ) -> Sequence[float]:
        """Up to ``count`` samples, seconds per call, at least one; fewer where calls are long."""
        ...

    def outlasts(self, call: Call) -> float:
        """Seconds of device work that the call leaves running after this timer says that it has ended."""
        ...

    def graph(self, call: Call, batch: int) -> Call:
        """A call that launches ``batch`` calls at once; raises `GraphRefused` where that cannot be."""
        ...

    def synchronise(self) -> None:
        """Wait for the device; raises what the framework raises for a failed kernel."""
        ...


class GraphRefused(KrexError):
    """The call cannot be captured in a graph; the message says why."""


def choose(
    timer: str, info: DeviceInfo, call_objects: Sequence[object], functions: Sequence[Callable[..., Any]]
) -> Timer:
    """The timer for a call on a device.

    Args:
        timer: ``auto``; ``host``; ``events`` (of whatever framework is found), or a framework's name: ``torch``,
            ``cupy``, ``numba``.
        info: the device.
        call_objects: what the call works on: arguments, looked through for arrays.
        functions: what is called: closures, defaults and the globals they use are looked at after the arguments.

    Raises:
        ValueError: no such timer.
        KrexError: no framework that can time on this device is loaded, or the one named is not, or only in part.
    """
    allowed = ("auto", "host", "events", *FRAMEWORKS)
    if timer not in allowed:
        raise ValueError(f"timer must be one of {', '.join(allowed)}, not {timer!r}")
    if info.vendor == "cpu":
        if timer not in ("auto", "host"):
            raise KrexError(
                f"timer={timer!r} reads a GPU's events, and the device is the cpu. Use timer='host', or name the GPU: "
                f"device='cuda:0'."
            )
        return HostTimer()
    if timer == "host":
        if info.vendor != "nvidia":
            raise KrexError(
                f"timer='host' cannot wait for {info.name}: a device-wide synchronise is there for NVIDIA only. Use "
                f"PyTorch's or CuPy's events: timer='torch' or timer='cupy'."
            )
        return HostTimer(info.uuid)
    if timer in FRAMEWORKS:
        return _events_of(timer)
    for found in framework_of(call_objects), _framework_of_functions(functions), _framework_in_use():
        if found:
            return _events_of(found)
    raise KrexError(
        f"No framework that can time on {info.name} is in use in this process ({', '.join(FRAMEWORKS)}), so the call "
        f"cannot use it. Import and use one first, name the cpu (device='cpu'), or time by the host clock around a "
        f"device-wide synchronise: timer='host'."
    )


def current_device_uuid() -> str:
    """UUID of the CUDA device whose context is current in this thread; empty where there is none.

    Frameworks make their device's primary context current when they are used, so this is where calls go.
    """
    library = mapped_libcuda()
    if library is None:
        return ""
    device, octets = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if library.cuCtxGetDevice(ctypes.byref(device)) or library.cuDeviceGetUuid_v2(octets, device):
        return ""
    return f"GPU-{uuid.UUID(bytes=bytes(octets))}"


def framework_of(objects: Sequence[object], depth: int = 3) -> str:
    """The framework whose device arrays are among ``objects``, also inside lists, tuples and dicts; else empty."""
    for value in objects:
        module = type(value).__module__
        root = module.partition(".")[0]
        if root == "torch" and bool(getattr(value, "is_cuda", False)):
            return "torch"
        if root == "cupy" and hasattr(value, "__cuda_array_interface__"):
            return "cupy"
        if root in ("numba", "numba_cuda") and hasattr(value, "__cuda_array_interface__"):
            return "numba"
        if root == "torch" and hasattr(value, "parameters") and depth:
            # A module: its parameters say where it works.
            with contextlib.suppress(TypeError):
                if found := framework_of(list(value.parameters())[:1], 0):
                    return found
        if depth and isinstance(value, Mapping):
            if found := framework_of(list(value.values())[:100], depth - 1):
                return found
        elif depth and isinstance(value, list | tuple) and (found := framework_of(value[:100], depth - 1)):
            return found
    return ""


def _framework_of_functions(functions: Sequence[Callable[..., Any]]) -> str:
    """The framework of what functions close over, have as defaults or use as globals."""
    for function in functions:
        objects: list[object] = []
        while isinstance(function, functools.partial):
            objects += [*function.args, *function.keywords.values()]
            function = function.func
        owner = getattr(function, "__self__", None)
        if owner is not None:
            objects.append(owner)
        function = getattr(function, "__func__", function)
        objects += [*(getattr(function, "__defaults__", None) or ())]
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):
                objects.append(cell.cell_contents)
        code = getattr(function, "__code__", None)
        names = getattr(function, "__globals__", {})
        if code is not None:
            objects += [names[name] for name in code.co_names if name in names]
        if found := framework_of(objects):
            return found
    return ""


def _framework_in_use() -> str:
    """A loaded framework that has a context on a device, torch first."""
    torch = sys.modules.get("torch")
    if torch is not None:
        initialised = getattr(getattr(torch, "cuda", None), "is_initialized", None)
        if initialised is not None and initialised():
            return "torch"
    for name, module in (("cupy", "cupy.cuda"), ("numba", "numba.cuda")):
        if module in sys.modules:
            return name
    return ""


def _events_of(framework: str) -> Timer:
    needed = {"torch": "torch.cuda", "cupy": "cupy.cuda", "numba": "numba.cuda"}[framework]
    if needed not in sys.modules:
        raise KrexError(
            f"timer: {framework} is not loaded in this process (or only in part: {needed} is missing). Import it "
            f"before you measure, never inside a region."
        )
    try:
        return {"torch": TorchTimer, "cupy": CupyTimer, "numba": NumbaTimer}[framework]()
    except (AttributeError, ImportError) as error:
        raise KrexError(
            f"timer: {framework} is loaded but has no usable events ({type(error).__name__}: {error}). Reinstall it "
            f"with CUDA support, or use timer='host'."
        ) from error


# --- The host's clock ----------------------------------------------------------------------------------------------


class HostTimer:
    """`time.perf_counter_ns` around the call; on a GPU with a device-wide synchronise at both ends."""

    can_flush = False

    def __init__(self, device_uuid: str = "") -> None:
        self._uuids = (device_uuid,) if device_uuid else ()
        self.name = "host clock" if not device_uuid else "host clock + device-wide synchronise"
        self.resolution_s = max(time.get_clock_info("perf_counter").resolution, 1e-9)
        self.empty_s = 0.0

    def prepare(self) -> None:
        """As `Timer.prepare`."""
        self.empty_s = median([self._time(_nothing, 1) for _ in range(_CALIBRATIONS)])

    def once(self, call: Call) -> tuple[Any, float]:
        """As `Timer.once`."""
        self.synchronise()
        started_ns = time.perf_counter_ns()
        result = call()
        self.synchronise()
        return result, (time.perf_counter_ns() - started_ns) / 1e9

    def sample(
        self, call: Call, count: int, *, batch: int, cache: Cache, setup: Call | None, expected_s: float
    ) -> Sequence[float]:
        """As `Timer.sample`."""
        taken: list[float] = []
        give_up_s = time.perf_counter() + _ENOUGH_IN_FLIGHT_S
        while len(taken) < count:
            if setup is not None:
                setup()
            taken.append(self._time(call, batch))
            if time.perf_counter() >= give_up_s:
                break
        return taken

    def outlasts(self, call: Call) -> float:
        """Zero: its own end is the device-wide synchronise."""
        return 0.0

    def graph(self, call: Call, batch: int) -> Call:
        """As `Timer.graph`."""
        raise GraphRefused("the host clock times no graphs")

    def synchronise(self) -> None:
        """As `Timer.synchronise`."""
        done = synchronise(self._uuids)
        if done.error:
            raise KrexError(f"The device failed: {done.error}.")

    def _time(self, call: Call, batch: int) -> float:
        if self._uuids:
            self.synchronise()
        if batch == 1:
            started_ns = time.perf_counter_ns()
            call()
        else:
            started_ns = time.perf_counter_ns()
            for _ in range(batch):
                call()
        if self._uuids:
            self.synchronise()
        return (time.perf_counter_ns() - started_ns) / batch / 1e9


# --- The device's events -------------------------------------------------------------------------------------------


class _EventTimer:
    """What all frameworks share; one subclass each says how it spells stream, event and flush."""

    can_flush = True
    framework = ""

    def __init__(self) -> None:
        self.resolution_s = _EVENT_RESOLUTION_S
        self.empty_s = _EVENT_RESOLUTION_S
        self.name = f"device events ({self.framework})"
        self._idle_s = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._flush_buffer: Any = None

    # Per framework:

    def _event(self) -> Any:
        raise NotImplementedError

    def _record(self, event: Any) -> None:
        """On the current stream."""
        raise NotImplementedError

    def _wait(self, event: Any) -> None:
        raise NotImplementedError

    def _elapsed_s(self, start: Any, end: Any) -> float:
        raise NotImplementedError

    def _cache_bytes(self) -> int:
        raise NotImplementedError

    def _allocate(self, size_bytes: int) -> Any:
        raise NotImplementedError

    def _flush(self, buffer: Any) -> None:
        """Overwrite the buffer, on the current stream."""
        raise NotImplementedError

    def synchronise(self) -> None:
        """As `Timer.synchronise`."""
        raise NotImplementedError

    def graph(self, call: Call, batch: int) -> Call:
        """As `Timer.graph`."""
        raise GraphRefused(f"{self.framework} captures no graphs")

    # The same for all:

    def prepare(self) -> None:
        """As `Timer.prepare`."""
        self._events = [(self._event(), self._event()) for _ in range(_MOST_IN_FLIGHT)]
        self._flush_buffer = self._allocate(max(self._cache_bytes(), 1 << 20) * _FLUSH_OF_CACHE)
        self._flush(self._flush_buffer)
        empty, idle = [], []
        for start, end in (self._events * 2)[:_CALIBRATIONS]:
            self.synchronise()
            self._record(start)
            self._record(end)
            self._wait(end)
            waited_ns = time.perf_counter_ns()
            self.synchronise()
            idle.append((time.perf_counter_ns() - waited_ns) / 1e9)
            empty.append(self._elapsed_s(start, end))
        self.empty_s = max(median(empty), 0.0)
        seen = sorted(set(empty))
        steps = [right - left for left, right in pairwise(seen) if right - left > 1e-9]
        self.resolution_s = min(steps, default=_EVENT_RESOLUTION_S)
        self._idle_s = median(idle)

    def once(self, call: Call) -> tuple[Any, float]:
        """As `Timer.once`."""
        self.synchronise()
        started_ns = time.perf_counter_ns()
        result = call()
        self.synchronise()
        return result, (time.perf_counter_ns() - started_ns) / 1e9

    def sample(
        self, call: Call, count: int, *, batch: int, cache: Cache, setup: Call | None, expected_s: float
    ) -> Sequence[float]:
        """As `Timer.sample`."""
        in_flight = max(int(_ENOUGH_IN_FLIGHT_S / max(expected_s * batch, 1e-7)), 1)
        pairs = self._events[: min(count, in_flight, _MOST_IN_FLIGHT)]
        for start, end in pairs:
            if setup is not None:
                setup()
            # Also where the cache is to be warm: while the device writes the buffer (20-60 us) the host gets ahead
            # of it, and the launch's latency stays out of the sample. A call then warms the cache again; against a
            # long one the refill of the L2 (12 us on an H200) does not count.
            self._flush(self._flush_buffer)
            if cache == "warm" and expected_s < _REFILL_COUNTS_BELOW_S and setup is None:
                call()
            self._record(start)
            for _ in range(batch):
                call()
            self._record(end)
        self._wait(pairs[-1][1])
        return [self._elapsed_s(start, end) / batch for start, end in pairs]

    def outlasts(self, call: Call) -> float:
        """As `Timer.outlasts`."""
        start, end = self._events[0]
        self.synchronise()
        self._record(start)
        call()
        self._record(end)
        self._wait(end)
        waited_ns = time.perf_counter_ns()
        self.synchronise()
        return max((time.perf_counter_ns() - waited_ns) / 1e9 - self._idle_s, 0.0)


class TorchTimer(_EventTimer):
    """`torch.cuda.Event` on PyTorch's current stream; also Triton's kernels, and ROCm under the same names."""

    framework = "torch"

    def __init__(self) -> None:
        super().__init__()
        self._cuda: Any = sys.modules["torch"].cuda
        if not self._cuda.is_available():
            raise AttributeError("torch.cuda.is_available() is False")
        self._cuda.current_stream()

    def _event(self) -> Any:
        return self._cuda.Event(enable_timing=True)

    def _record(self, event: Any) -> None:
        event.record()

    def _wait(self, event: Any) -> None:
        event.synchronize()

    def _elapsed_s(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def _cache_bytes(self) -> int:
        properties = self._cuda.get_device_properties(self._cuda.current_device())
        return int(getattr(properties, "L2_cache_size", 64 << 20))

    def _allocate(self, size_bytes: int) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(size_bytes // 4, dtype=torch.int32, device="cuda")

    def _flush(self, buffer: Any) -> None:
        buffer.zero_()

    def synchronise(self) -> None:
        """As `Timer.synchronise`."""
        self._cuda.synchronize()

    def graph(self, call: Call, batch: int) -> Call:
        """As `Timer.graph`."""
        # A capture that fails leaves PyTorch's allocator and random generators in capture: calls that synchronise,
        # the usual cause, are found by a trial first.
        mode = self._cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                # PyTorch warns that the mode is a prototype and misses some calls; the capture finds those.
                warnings.simplefilter("ignore", UserWarning)
                self._cuda.set_sync_debug_mode("error")
            call()
        except RuntimeError as error:
            raise GraphRefused(f"it synchronises: {_first_line(error)}") from error
        finally:
            self._cuda.set_sync_debug_mode(mode)
        captured = self._cuda.CUDAGraph()
        before = self._cuda.current_stream()
        side = self._cuda.Stream()
        side.wait_stream(before)
        try:
            with self._cuda.stream(side):
                call()
            before.wait_stream(side)
            with self._cuda.graph(captured, stream=side):
                for _ in range(batch):
                    call()
        except RuntimeError as error:
            # PyTorch does not put the stream back when the end of a capture fails.
            self._cuda.set_stream(before)
            self._cuda.synchronize()
            raise GraphRefused(f"PyTorch could not capture it: {_first_line(error)}") from error
        return captured.replay  # type: ignore[no-any-return]  # bound method of an untyped class


class CupyTimer(_EventTimer):
    """`cupy.cuda.Event` on CuPy's current stream."""

    framework = "cupy"

    def __init__(self) -> None:
        super().__init__()
        self._cupy: Any = sys.modules["cupy"]
        self._cuda: Any = self._cupy.cuda
        self._cuda.get_current_stream()

    def _event(self) -> Any:
        return self._cuda.Event()

    def _record(self, event: Any) -> None:
        event.record(self._cuda.get_current_stream())

    def _wait(self, event: Any) -> None:
        event.synchronize()

    def _elapsed_s(self, start: Any, end: Any) -> float:
        return float(self._cuda.get_elapsed_time(start, end)) / 1e3

    def _cache_bytes(self) -> int:
        return int(self._cuda.Device().attributes.get("L2CacheSize", 64 << 20))

    def _allocate(self, size_bytes: int) -> Any:
        return self._cuda.alloc(size_bytes), size_bytes

    def _flush(self, buffer: Any) -> None:
        memory, size_bytes = buffer
        memory.memset_async(0, size_bytes, self._cuda.get_current_stream())

    def synchronise(self) -> None:
        """As `Timer.synchronise`."""
        self._cuda.Device().synchronize()

    def graph(self, call: Call, batch: int) -> Call:
        """As `Timer.graph`."""
        side = self._cuda.Stream(non_blocking=True)
        # A replay writes where the captured calls allocated. From a pool of its own, kept with the graph, that
        # memory is neither handed to anybody else nor freed meanwhile.
        pool = self._cuda.MemoryPool()
        self._cuda.Device().synchronize()
        try:
            with side, self._cuda.using_allocator(pool.malloc):
                call()
                side.synchronize()
                side.begin_capture()
                try:
                    for _ in range(batch):
                        call()
                finally:
                    captured = side.end_capture()
        except RuntimeError as error:
            # CuPy's own errors of the runtime and of the driver are RuntimeErrors too.
            raise GraphRefused(f"CuPy could not capture it: {_first_line(error)}") from error

        def launch(_kept: Any = pool) -> None:
            captured.launch(self._cuda.get_current_stream())

        return launch


class NumbaTimer(_EventTimer):
    """`numba.cuda.event` on Numba's default stream. A call that launches on a stream of its own escapes it."""

    framework = "numba"

    def __init__(self) -> None:
        super().__init__()
        self._cuda: Any = sys.modules["numba.cuda"]
        self._cuda.current_context()

    def _event(self) -> Any:
        return self._cuda.event()

    def _record(self, event: Any) -> None:
        event.record(self._cuda.default_stream())

    def _wait(self, event: Any) -> None:
        event.synchronize()

    def _elapsed_s(self, start: Any, end: Any) -> float:
        return float(self._cuda.event_elapsed_time(start, end)) / 1e3

    def _cache_bytes(self) -> int:
        return int(getattr(self._cuda.get_current_device(), "L2_CACHE_SIZE", 64 << 20))

    def _allocate(self, size_bytes: int) -> Any:
        return self._cuda.device_array(size_bytes // 4, dtype="int32"), self._cuda.device_array(
            size_bytes // 4, dtype="int32"
        )

    def _flush(self, buffer: Any) -> None:
        written, read = buffer
        written.copy_to_device(read, stream=self._cuda.default_stream())

    def synchronise(self) -> None:
        """As `Timer.synchronise`."""
        self._cuda.synchronize()


# --- Sizes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """How one call is to be sampled."""

    batch: int
    cache: Cache
    notes: tuple[str, ...]
    """What a reader of the result has to know of it."""
    wants_graph: bool


def plan(timer: Timer, expected_s: float, *, precision: float, cache: Cache, has_setup: bool) -> Plan:
    """Batch size and cache for calls of about ``expected_s``: a sample lasts resolution ÷ precision or longer.

    With ``setup`` there is no batch: it has to run before each call.
    """
    least_s = timer.resolution_s / precision
    if not timer.can_flush:
        # Reading the host's clock twice is part of each sample.
        least_s = max(least_s, 2.0 * timer.empty_s / precision)
    short = timer.can_flush and expected_s < GRAPH_BELOW_S
    if short:
        least_s = max(least_s, 2.0 * GRAPH_BELOW_S)
    notes: list[str] = []
    batch = 1
    if expected_s < least_s:
        batch = min(max(int(least_s / max(expected_s, 1e-8)) + 1, 2), _MOST_BATCH)
    if batch > 1 and has_setup:
        notes.append(
            f"One call takes {expected_s * 1e6:.3g} µs, too short for this timer at {100 * precision:g}%, and `setup` "
            f"forbids to time several at once: expect steps."
        )
        batch, short = 1, False
    if cache == "cold" and not timer.can_flush:
        cache = "warm"
    if cache == "cold" and batch > 1:
        cache = "warm"
        notes.append(
            f"Warm cache: {batch} calls of {expected_s * 1e6:.3g} µs are timed at once, nothing can be flushed between."
        )
    return Plan(batch=batch, cache=cache, notes=tuple(notes), wants_graph=short and batch > 1)


def _nothing() -> None:
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
