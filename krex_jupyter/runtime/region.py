"""`exclusive`: a region from asking to its report, for threads, tasks and decorated functions.

What happens at the door, in this order, and why:

    synchronise own work → ask → (wait) → granted → confirm → pin → read evidence → body
    body → read evidence → unpin → synchronise → release → report

Own work is finished *before* asking, so that nobody waits for it. The evidence is read closest to the body. All
waits can be interrupted: an interrupted wait is cancelled at the coordinator before the interrupt goes on.

Waiting exists twice, for threads and for tasks; what the messages mean exists once (`_Entry`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, cast

from krex_jupyter.devices.names import resolve_here
from krex_jupyter.errors import (
    KrexError,
    NotExclusive,
    RegionRevoked,
    UnsupportedPlatform,
)
from krex_jupyter.protocol import (
    Acquire,
    Cancel,
    Confirm,
    CpuPolicy,
    DeviceInfo,
    EffectiveCpuPolicy,
    Failed,
    Foreign,
    FromCoordinator,
    GetStatus,
    Granted,
    OwnerEvidence,
    Ping,
    Queued,
    Reason,
    RegionReport,
    Release,
    Released,
    ReportDevice,
    SiblingReport,
    Status,
)

from . import client
from .fidelity import OwnerWatch
from .synchronize import Synchronised, refuse_inside_capture, synchronise

P = ParamSpec("P")
R = TypeVar("R")

_SILENCE_S = 2.0
"""A waiter that hears nothing for so long asks whether the coordinator still runs."""
_PONG_S = 1.0
_CANCEL_S = 1.0

_NAMING_VARIABLES = (
    "KREX_DEVICE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
"""What the meaning of a device's name depends on, beside the host's devices."""

INSIDE = "KREX_INSIDE"
"""Environment variable by which `krex run --exclusive` tells its command of the region around it (JSON:
``region_id`` and ``devices``, uuids)."""


class Region:
    """A held region, as its body sees it; afterwards, its `report`."""

    def __init__(
        self, granted: Granted, devices: tuple[ReportDevice, ...], label: str, connection: client.Connection
    ) -> None:
        self.region_id = granted.region_id
        self.epoch = granted.epoch
        self.devices = devices
        """In UUID order."""
        self.device = devices[0]
        self.label = label
        self.cpu_policy: EffectiveCpuPolicy = granted.cpu_policy
        self.wait_s = granted.wait_s
        self.enter_s = granted.enter_s
        self.max_hold_s = granted.max_hold_s
        self.started_at = granted.started_at
        self.siblings: tuple[SiblingReport, ...] = granted.siblings
        self.cores = granted.cores
        self.reserved_cores = granted.reserved
        self.report: RegionReport | None = None
        """What was done and seen; None until the region has ended."""
        self._connection = connection

    @contextlib.contextmanager
    def share(self) -> Iterator[Region]:
        """Let another thread or task of this process work inside this region.

        Without it, a region entered there would queue behind this one, and wait for ever if this one waits for
        the thread or task.
        """
        token = _current.set(_Inside(self, _whoami()))
        try:
            yield self
        finally:
            _current.reset(token)

    def __repr__(self) -> str:
        state = "held" if self.report is None else self.report.verdict
        return f"<Region {self.region_id} on {', '.join(device.id for device in self.devices)}: {state}>"


class _Inside:
    """A region together with the thread or task that is inside it."""

    __slots__ = ("region", "who")

    def __init__(self, region: Region, who: tuple[int, int, int]) -> None:
        self.region = region
        self.who = who


_current: ContextVar[_Inside | None] = ContextVar("krex_region", default=None)


def exclusive(
    device: str | Sequence[str] | None = None,
    *,
    timeout: float | None = None,
    max_hold: float | None = None,
    cpu: CpuPolicy = "auto",
    foreign: Foreign = "observe",
    peers: Sequence[int] = (),
    label: str | None = None,
    strict: bool = False,
    on_queued: Callable[[Queued], None] | None = None,
) -> Exclusive:
    """An exclusive region: ``with``, ``async with``, or a decorator.

    Re-entrant within one thread or task. Work that the region itself starts elsewhere uses `Region.share`.

    Args:
        device: ``"cuda:0"``, ``"hip:0"``, ``"cpu"``, a UUID, or a list of them (all or none); None is
            ``KREX_DEVICE``, else the first GPU, else the cpu.
        timeout: seconds to wait for its turn; 0 tries once; None is the configured default (600).
        max_hold: seconds it may be held before the others go on and its verdict is `revoked`; None is the
            configured default (30); 0 is no limit, only with ``cpu="share"``.
        cpu: how siblings are kept off the CPU: ``freeze`` stops them, ``isolate`` keeps them off reserved cores,
            ``share`` does nothing, ``auto`` is `isolate` where there are enough cores, else `freeze`.
        foreign: ``gate`` also gates processes that never joined, where the configuration allows it.
        peers: pids that are never gated because the region waits for them (workers of Dask or ipyparallel).
        label: a name for status, history and report.
        strict: raise at the end where the verdict is not `clean`. Never hides the body's own exception.
        on_queued: called in the waiting thread or task with the place in the queue, at most 4 times a second.

    Raises (when entered):
        WaitTimeout: the turn did not come in time.
        DeviceNotFound: there is no such device, or this process may not see it.
        CoordinatorUnavailable: no coordinator answers and none could be started.
        UnsupportedPlatform: not on Linux, or the CPU policy is not possible here.
        KrexError: the current stream captures a graph; or a region on other devices is held already.
    """
    return Exclusive(
        devices=(device,) if device is None or isinstance(device, str) else tuple(device),
        timeout_s=timeout,
        max_hold_s=max_hold,
        cpu=cpu,
        foreign=foreign,
        peers=tuple(peers),
        # A lone surrogate (of a file name, say) cannot be sent.
        label=(label or "").encode(errors="replace").decode(),
        strict=strict,
        on_queued=on_queued,
    )


class Exclusive:
    """What `exclusive` returns. One object may be entered again once it was left."""

    def __init__(
        self,
        *,
        devices: tuple[str | None, ...],
        timeout_s: float | None,
        max_hold_s: float | None,
        cpu: CpuPolicy,
        foreign: Foreign,
        peers: tuple[int, ...],
        label: str,
        strict: bool,
        on_queued: Callable[[Queued], None] | None,
    ) -> None:
        if not devices:
            raise ValueError("a region needs at least one device; leave `device` out for the default one")
        for name, value in (("timeout", timeout_s), ("max_hold", max_hold_s)):
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number of seconds, 0 or more, not {value!r}")
        for name, given, allowed in (
            ("cpu", cpu, ("auto", "freeze", "isolate", "share")),
            ("foreign", foreign, ("observe", "gate")),
        ):
            if given not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {given!r}")
        self._devices = devices
        self._timeout_s = timeout_s
        self._max_hold_s = max_hold_s
        self._cpu = cpu
        self._foreign = foreign
        self._peers = peers
        self._label = label
        self._strict = strict
        self._on_queued = on_queued
        self._held: list[_Held | None] = []
        """What each entry of this object took; None for one inside a region that was held already."""

    # --- Threads -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Region:
        inside = self._inside()
        if inside is not None:
            self._held.append(None)
            return inside
        refuse_inside_capture()
        connection = client.take()
        try:
            devices = self._resolve(connection)
            around = _around(connection, devices)
            if around is not None:
                client.give_back(connection)
                self._held.append(None)
                return around
            synchronise(_gpus(devices))
            entry = _Entry(self._acquire(devices), self._on_queued)
            connection, granted = self._wait(connection, entry)
        except BaseException:
            connection.close()
            raise
        return self._begin(connection, granted, devices)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        held = self._held.pop()
        if held is None or held.pid != os.getpid():
            return False
        evidence = held.stop(interrupted=isinstance(error, KeyboardInterrupt))
        try:
            synchronised = synchronise(_gpus(held.infos))
        except BaseException:
            # Interrupted while the device was busy: its work goes on past the region, and the report says so.
            held.finish(self._release(held, evidence, Synchronised(done=False, error="interrupted")))
            raise
        held.finish(self._release(held, evidence, synchronised))
        self._complain(held.region, error)
        return False

    def _wait(self, connection: client.Connection, entry: _Entry) -> tuple[client.Connection, Granted]:
        """Ask and wait; a coordinator that dies meanwhile is replaced and asked again for the rest of the time."""
        while True:
            try:
                connection.send(entry.next_request())
                while (granted := entry.react(self._receive(connection))) is None:
                    pass
                connection.send(Confirm(region_id=granted.region_id))
            except client.ConnectionLost:
                connection.close()
                connection = client.take()
            except BaseException:
                _cancel(connection, entry.acquire.request_id)
                raise
            else:
                return connection, granted

    def _receive(self, connection: client.Connection) -> FromCoordinator:
        """The next message; makes sure that silence is not that of a stopped coordinator."""
        try:
            return connection.receive(_SILENCE_S)
        except TimeoutError:
            connection.send(Ping(request_id=client.next_request_id()))
        try:
            return connection.receive(_PONG_S)
        except TimeoutError:
            client.end_stopped_coordinator(connection.welcome.coordinator_pid)
            raise client.ConnectionLost(f"the coordinator at {connection.where.socket} was stopped") from None

    def _release(self, held: _Held, evidence: OwnerEvidence, synchronised: Synchronised) -> RegionReport:
        connection = held.connection
        message = held.release(evidence, synchronised)
        try:
            answer = connection.ask(message)
            connection.send(Confirm(region_id=message.region_id))
        except KrexError as error:
            connection.close()
            return held.lost(message.owner, error)
        except BaseException:
            connection.close()
            raise
        client.give_back(connection)
        return client.expect(answer, Released).report

    # --- Tasks -------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Region:
        inside = self._inside()
        if inside is not None:
            self._held.append(None)
            return inside
        refuse_inside_capture()
        loop = asyncio.get_running_loop()
        connection = await loop.run_in_executor(None, client.take)
        try:
            devices = self._resolve(connection)
            around = await loop.run_in_executor(None, _around, connection, devices)
            if around is not None:
                client.give_back(connection)
                self._held.append(None)
                return around
            await loop.run_in_executor(None, synchronise, _gpus(devices))
            entry = _Entry(self._acquire(devices), self._on_queued)
            connection, granted = await self._wait_async(connection, entry)
        except BaseException:
            connection.close()
            raise
        return self._begin(connection, granted, devices)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        held = self._held.pop()
        if held is None or held.pid != os.getpid():
            return False
        evidence = held.stop(interrupted=isinstance(error, KeyboardInterrupt | asyncio.CancelledError))
        loop = asyncio.get_running_loop()
        # Shielded: a cancelled task still hands its region back, and only then stops.
        released = asyncio.ensure_future(self._finish_async(held, evidence, loop))
        try:
            held.finish(await asyncio.shield(released))
        except asyncio.CancelledError:
            held.finish(await released)
            raise
        self._complain(held.region, error)
        return False

    async def _finish_async(
        self, held: _Held, evidence: OwnerEvidence, loop: asyncio.AbstractEventLoop
    ) -> RegionReport:
        synchronised = await loop.run_in_executor(None, synchronise, _gpus(held.infos))
        return await loop.run_in_executor(None, self._release, held, evidence, synchronised)

    async def _wait_async(
        self, connection: client.Connection, entry: _Entry
    ) -> tuple[client.Connection, Granted]:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection.send(entry.next_request())
                while (granted := entry.react(await self._receive_async(connection))) is None:
                    pass
                connection.send(Confirm(region_id=granted.region_id))
            except client.ConnectionLost:
                connection.close()
                connection = await loop.run_in_executor(None, client.take)
            except BaseException:
                _cancel(connection, entry.acquire.request_id)
                raise
            else:
                return connection, granted

    async def _receive_async(self, connection: client.Connection) -> FromCoordinator:
        try:
            return await _receive_within(connection, _SILENCE_S)
        except TimeoutError:
            connection.send(Ping(request_id=client.next_request_id()))
        try:
            return await _receive_within(connection, _PONG_S)
        except TimeoutError:
            client.end_stopped_coordinator(connection.welcome.coordinator_pid)
            raise client.ConnectionLost(f"the coordinator at {connection.where.socket} was stopped") from None

    # --- Both --------------------------------------------------------------------------------------------------

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function or a coroutine function: each call is a region of its own."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def in_region_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                async with self._again():
                    return await function(*args, **kwargs)

            return cast("Callable[P, R]", in_region_async)

        @functools.wraps(function)
        def in_region(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._again():
                return function(*args, **kwargs)

        return in_region

    def _again(self) -> Exclusive:
        return Exclusive(
            devices=self._devices,
            timeout_s=self._timeout_s,
            max_hold_s=self._max_hold_s,
            cpu=self._cpu,
            foreign=self._foreign,
            peers=self._peers,
            label=self._label,
            strict=self._strict,
            on_queued=self._on_queued,
        )

    def _inside(self) -> Region | None:
        """The region that this thread or task is inside already, if it covers what is asked for."""
        if sys.platform != "linux":
            raise UnsupportedPlatform(
                f"Exclusive regions need Linux; this is {sys.platform}. Importing and reading reports work here."
            )
        inside = _current.get()
        if inside is None or inside.who != _whoami():
            return None
        region = inside.region
        if self._devices != (None,):
            infos = region._connection.welcome.devices  # noqa: SLF001 (the same module)
            variables = tuple(map(os.environ.get, _NAMING_VARIABLES))
            wanted = {_resolved(name, infos, variables).uuid for name in self._devices}
            held = {device.uuid for device in region.devices}
            if not wanted <= held:
                raise KrexError(
                    f"This thread holds a region on {', '.join(device.id for device in region.devices)} and asks for "
                    f"{', '.join(map(str, self._devices))} inside it; two owners doing that would wait for each "
                    f"other. Name all devices in the outer region: exclusive([...])."
                )
        return region

    def _resolve(self, connection: client.Connection) -> tuple[tuple[str, DeviceInfo], ...]:
        """(what the user calls it, device), in UUID order."""
        found: dict[str, tuple[str, DeviceInfo]] = {}
        for name in self._devices:
            info = _resolved(name, connection.welcome.devices, tuple(map(os.environ.get, _NAMING_VARIABLES)))
            found.setdefault(info.uuid, (name or os.environ.get("KREX_DEVICE") or _name_of(info), info))
        return tuple(found[uuid] for uuid in sorted(found))

    def _acquire(self, devices: tuple[tuple[str, DeviceInfo], ...]) -> Acquire:
        return Acquire(
            request_id=client.next_request_id(),
            devices=_uuids(devices),
            device_ids=tuple(name for name, _ in devices),
            timeout_s=self._timeout_s,
            max_hold_s=self._max_hold_s,
            cpu=self._cpu,
            foreign=self._foreign,
            peers=self._peers,
            label=self._label,
            tid=threading.get_native_id(),
        )

    def _begin(
        self, connection: client.Connection, granted: Granted, devices: tuple[tuple[str, DeviceInfo], ...]
    ) -> Region:
        region = Region(granted, _reported(devices), self._label, connection)
        held = _Held(region, connection, devices)
        self._held.append(held)
        held.begin()
        return region

    def _complain(self, region: Region, error: BaseException | None) -> None:
        report = region.report
        if not self._strict or error is not None or report is None or report.verdict == "clean":
            return
        why = " ".join(reason.detail for reason in report.reasons)
        kind = RegionRevoked if report.verdict == "revoked" else NotExclusive
        raise kind(f"Region {report.region_id} on {report.device.id} is {report.verdict}. {why}")


class _Entry:
    """What the coordinator's messages mean for one request."""

    def __init__(self, acquire: Acquire, on_queued: Callable[[Queued], None] | None) -> None:
        self.acquire = acquire
        self._on_queued = on_queued
        self._asked_s = time.monotonic()
        self._sent = False

    def next_request(self) -> Acquire:
        """The request, with what is left of its time when it has to be sent again."""
        if not self._sent:
            self._sent = True
            return self.acquire
        timeout_s = self.acquire.timeout_s
        left_s = None if timeout_s is None else max(timeout_s - (time.monotonic() - self._asked_s), 0.0)
        fields = {name: getattr(self.acquire, name) for name in self.acquire.__struct_fields__}
        self.acquire = Acquire(**{**fields, "request_id": client.next_request_id(), "timeout_s": left_s})
        return self.acquire

    def react(self, message: FromCoordinator) -> Granted | None:
        """The grant, once it comes; raises what a refusal means."""
        if getattr(message, "request_id", 0) != self.acquire.request_id:
            return None
        if isinstance(message, Queued) and self._on_queued is not None:
            self._on_queued(message)
        if isinstance(message, Failed):
            raise client.error_of(message)
        return message if isinstance(message, Granted) else None


class _Held:
    """A held region's resources, from grant to report."""

    def __init__(
        self, region: Region, connection: client.Connection, infos: tuple[tuple[str, DeviceInfo], ...]
    ) -> None:
        self.region = region
        self.connection = connection
        self.infos = infos
        self.pid = os.getpid()
        self._watch = OwnerWatch()
        self._pinning = contextlib.ExitStack()
        self._pinned: Any = None
        self._token: Token[_Inside | None] | None = None
        self._gates = any(sibling.gate != "observe" for sibling in region.siblings)

    def begin(self) -> None:
        """Pin, then read evidence; nothing of ours runs after this until the body has ended."""
        self._token = _current.set(_Inside(self.region, _whoami()))
        presence = client.presence()
        presence.held += 1
        if self._gates:
            presence.gating += 1
            if not presence.attentive:
                presence.wake()
        if self.region.cores:
            from krex_jupyter.enforcement.cpus import pinned

            self._pinned = self._pinning.enter_context(
                pinned(threading.get_native_id(), self.region.cores, _cpuset(), self.region.reserved_cores)
            )
        self._watch.start()

    def stop(self, *, interrupted: bool) -> OwnerEvidence:
        """Read evidence again, then unpin."""
        evidence = self._watch.stop(interrupted=interrupted)
        self._pinning.close()
        if self._token is not None:
            try:
                _current.reset(self._token)
            except ValueError:
                # Left in another context than entered: generators and some frameworks do that.
                _current.set(None)
        return evidence

    def release(self, evidence: OwnerEvidence, synchronised: Synchronised) -> Release:
        """The message that ends the region."""
        fields = {name: getattr(evidence, name) for name in evidence.__struct_fields__}
        born = self._pinned is not None and bool(self._pinned.threads_born)
        owner = OwnerEvidence(
            **{
                **fields,
                "synchronised": synchronised.done,
                "sync_error": synchronised.error,
                "pin_error": "" if self._pinned is None else self._pinned.error,
                "thread_pool_created": born,
            }
        )
        return Release(request_id=client.next_request_id(), region_id=self.region.region_id, owner=owner)

    def finish(self, report: RegionReport) -> None:
        """The report is there."""
        self.region.report = report
        client.presence().held -= 1
        if self._gates:
            client.presence().gating -= 1

    def lost(self, owner: OwnerEvidence, error: KrexError) -> RegionReport:
        """The report of a region whose coordinator died: exclusivity ended with it."""
        from krex_jupyter.protocol import Evidence

        region = self.region
        return RegionReport(
            region_id=region.region_id,
            epoch=region.epoch,
            device=region.device,
            devices=region.devices,
            label=region.label,
            pid=self.pid,
            uid=os.getuid(),
            started_at=region.started_at,
            wait_s=region.wait_s,
            enter_s=region.enter_s,
            held_s=owner.wall_s or 0.0,
            exit_s=0.0,
            cpu_policy=region.cpu_policy,
            siblings=region.siblings,
            verdict="revoked",
            reasons=(
                Reason(
                    code="revoked",
                    detail=f"Exclusivity ended early (coordinator_lost): {error} Run it again.",
                ),
            ),
            evidence=Evidence(owner=owner),
        )


def _around(connection: client.Connection, devices: tuple[tuple[str, DeviceInfo], ...]) -> Region | None:
    """The region that an ancestor holds around this whole process, if it covers ``devices``.

    Its verdict is the ancestor's to report, so the returned region gets no report of its own.
    """
    told = os.environ.get(INSIDE)
    if not told:
        return None
    try:
        inside = json.loads(told)
        region_id, held = str(inside["region_id"]), set(map(str, inside["devices"]))
    except (ValueError, KeyError, TypeError) as error:
        raise KrexError(
            f"{INSIDE} is set and is not what `krex run` sets it to: unset it. ({error})"
        ) from error
    if not {info.uuid for _, info in devices} <= held:
        return None
    status = client.expect(connection.ask(GetStatus(request_id=client.next_request_id(), recent=0)), Status)
    for device in status.devices:
        holder = device.holder
        if holder is not None and holder.region_id == region_id:
            granted = Granted(
                request_id=0,
                region_id=region_id,
                epoch=holder.epoch,
                started_at=time.time() - holder.held_s,
                wait_s=0.0,
                enter_s=0.0,
                max_hold_s=holder.remaining_s or 0.0,
                cpu_policy=holder.cpu_policy,
            )
            return Region(granted, _reported(devices), holder.label, connection)
    return None


def _cancel(connection: client.Connection, request_id: int) -> None:
    """Leave the queue, or give back a grant that arrived at the wrong moment; bounded, never raises."""
    with contextlib.suppress(KrexError, TimeoutError):
        connection.send(Cancel(request_id=request_id))
        give_up_s = time.monotonic() + _CANCEL_S
        while time.monotonic() < give_up_s:
            answer = connection.receive(give_up_s - time.monotonic())
            if isinstance(answer, Failed) and answer.request_id == request_id:
                return


async def _receive_within(connection: client.Connection, timeout_s: float) -> FromCoordinator:
    """The next message, without blocking the loop. Raises `TimeoutError`, `ConnectionLost`."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + timeout_s
    while True:
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(connection.fileno(), _settle, readable)
        try:
            await asyncio.wait_for(readable, max(give_up_s - loop.time(), 0.0))
        finally:
            loop.remove_reader(connection.fileno())
        message = connection.receive_now()
        if message is not None:
            return message


def _settle(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


@functools.lru_cache(maxsize=64)
def _resolved(
    name: str | None, infos: tuple[DeviceInfo, ...], _variables: tuple[str | None, ...]
) -> DeviceInfo:
    """`resolve_here`, once for each environment that it depends on."""
    return resolve_here(name, infos)


def _whoami() -> tuple[int, int, int]:
    """Process, thread and task that call this."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return os.getpid(), threading.get_ident(), 0 if task is None else id(task)


def _reported(devices: tuple[tuple[str, DeviceInfo], ...]) -> tuple[ReportDevice, ...]:
    return tuple(
        ReportDevice(id=name, uuid=info.uuid, name=info.name, vendor=info.vendor) for name, info in devices
    )


def _uuids(devices: tuple[tuple[str, DeviceInfo], ...]) -> tuple[str, ...]:
    return tuple(info.uuid for _, info in devices)


def _gpus(devices: tuple[tuple[str, DeviceInfo], ...]) -> tuple[str, ...]:
    return tuple(info.uuid for _, info in devices if info.vendor != "cpu")


def _name_of(info: DeviceInfo) -> str:
    kind = {"nvidia": "cuda", "amd": "hip", "cpu": "cpu"}[info.vendor]
    return kind if info.index is None else f"{kind}:{info.index}"


@functools.cache
def _cpuset() -> frozenset[int]:
    from krex_jupyter.enforcement.cpus import full_cpuset

    return full_cpuset()
