"""One connection from this Jupyter server to the coordinator of its host, kept up for as long as the server runs.

What it guarantees: nothing here ever blocks the server's loop. The socket is non-blocking and read when the
loop says so; starting a coordinator, which takes a fraction of a second, happens in a thread; every request has
a deadline. When the coordinator dies another one is started, which thaws and unlocks whatever the dead one left
gated (it replays the journal), and the live kernels of this server are registered again.

Dead and stopped are two things: a stopped peer sends no EOF. So an unanswered `Hello` or `Ping` counts as the
end of a coordinator too, and it is ended by pidfd before another one is started, for two of them must not meet.
Two cases only look like a stopped coordinator and must not cost anybody a region: this server's own loop was
blocked by something else, so that the answer lies unread in the socket; or the machine is so busy that the
coordinator is runnable and does not get the processor. Both get more time.

It must never signal a process of another uid, nor one that is not a coordinator or its guardian.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import msgspec

from krex_jupyter import wire
from krex_jupyter.errors import CoordinatorUnavailable, KrexError
from krex_jupyter.locate import Location, location, peer_credentials, short_address
from krex_jupyter.protocol import (
    Event,
    Failed,
    FromCoordinator,
    Hello,
    Message,
    Ping,
    RegionReport,
    Register,
    Status,
    Subscribe,
    ToBrowser,
    Unavailable,
    Welcome,
)

from .processes import Process, peer_process

ANSWER_LIMIT_S = 1.0
"""A `Hello` or `Ping` unanswered for so long means that the coordinator is stopped or hung."""
SLICE_S = 0.1
"""How often a missing answer is looked for. One slice is enough where the coordinator is seen to be stopped while
a region is held: then processes may stand frozen, and a second is all they may stand so."""
STARVED_LIMIT_S = 3.0
"""The same for a coordinator that is runnable: on a busy machine it may only be waiting for a processor."""
GUARDIAN_LIMIT_S = 1.0
"""A guardian undoes everything and ends within this time after its coordinator did; else it is ended."""
EOF_LEAD_S = 0.2
"""The end of a connection is seen a moment before its process has ended."""
CONNECT_LIMIT_S = 1.0
START_LIMIT_S = 5.0
REQUEST_LIMIT_S = 5.0
PING_IDLE_S = 2.0
PING_BUSY_S = 0.2
"""While a region is held or queued: a stopped coordinator should be noticed about as fast as a dead one."""
LATE_LOOP_S = 0.2
"""When a timer of ours fires so much too late, the loop was blocked and says nothing about the coordinator."""
BACKOFF_FIRST_S = 0.2
BACKOFF_MOST_S = 15.0
AT_ONCE_EVERY_S = 2.0
"""A coordinator that is lost is replaced without delay, but not over and over where each dies at once."""

RECENT_REPORTS = 50
"""Reports kept for browsers that come later; what changes are told with carries no old ones."""

_MAX_PACKETS_PER_READ = 64
_MAX_QUEUED_PACKETS = 1024
_OUR_MODULES = ("krex_jupyter.coordinator", "krex_jupyter.enforcement")


class Refused(KrexError):
    """The coordinator answered `Failed`."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.detail)
        self.code = failed.code


Change: TypeAlias = ToBrowser


@dataclass(frozen=True)
class KernelRecord:
    """A kernel of this server, as it is registered with the coordinator."""

    kernel_id: str
    process: Process
    label: str = ""
    notebook: str = ""


class Link:
    """The connection. Made and used in one loop's thread; `close` it there too.

    ``on_change`` is called in that loop with every snapshot, event, and loss of the coordinator.
    """

    def __init__(
        self,
        *,
        on_change: Callable[[Change], None],
        log: logging.Logger | logging.LoggerAdapter[Any],
        label: str = "Jupyter server",
        may_start: bool = True,
        locate: Callable[[], Location] = location,
    ) -> None:
        self._on_change = on_change
        self._log = log
        self._label = label
        self._may_start = may_start
        self._locate = locate
        self.loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._channel: _Channel | None = None
        self._pending: dict[int, asyncio.Future[FromCoordinator]] = {}
        self._kernels: dict[str, KernelRecord] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._usable = asyncio.Event()
        self._busy = asyncio.Event()
        self._coordinator: Process | None = None
        self._guardian: Process | None = None
        self._runner: asyncio.Task[None] | None = None
        self._closing = False
        self._was_usable = False
        # One thread of its own: the default executor belongs to everybody and may be full of slow work.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="krex-start")
        self.problem = (
            "KREX has not reached its coordinator yet; this takes a moment after the server's start."
        )
        self.welcome: Welcome | None = None
        self.status: Status | None = None
        self._recent: deque[RegionReport] = deque(maxlen=RECENT_REPORTS)
        self.lost_coordinator = False
        """The last coordinator that was connected ended without our doing, and no other answers yet."""

    # --- What others use ---------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a coordinator answers now."""
        return self._usable.is_set()

    @property
    def snapshot(self) -> Status | None:
        """The whole state as of the last change, recent reports included; None while nobody is connected."""
        if self.status is None or not self.connected:
            return None
        return msgspec.structs.replace(self.status, recent=tuple(self._recent))

    @property
    def kernels(self) -> dict[str, KernelRecord]:
        """The live kernels registered here, by kernel id."""
        return dict(self._kernels)

    def start(self) -> None:
        """Begin to connect, in the background."""
        if self._runner is None:
            self._runner = self.loop.create_task(self._run(), name="krex-link")
            self._runner.add_done_callback(self._report_defect)

    def next_request_id(self) -> int:
        """A number that no other request of this connection has."""
        return next(self._ids)

    async def ask(
        self, message: Any, *, fds: Sequence[int] = (), timeout_s: float = REQUEST_LIMIT_S
    ) -> FromCoordinator:
        """The answer to a request.

        Raises:
            CoordinatorUnavailable: nobody is connected, or no answer came within ``timeout_s`` seconds.
            Refused: the coordinator said no, and why.
        """
        if not self.connected:
            raise CoordinatorUnavailable(self.problem)
        return await self._ask(message, fds=fds, timeout_s=timeout_s)

    async def wait_connected(self, timeout_s: float) -> bool:
        """Whether a coordinator answers, now or within ``timeout_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._usable.wait()
        return self.connected

    def register(self, record: KernelRecord) -> None:
        """Register a kernel now and after every reconnection, until it ends. Takes over its descriptor."""
        known = self._kernels.get(record.kernel_id)
        if known is not None and known.process.pid == record.process.pid and not known.process.has_exited:
            record.process.close()
            record = KernelRecord(record.kernel_id, known.process, record.label, record.notebook)
            if record == known:
                return
        else:
            if known is not None:
                self._drop_kernel(known)
            self.loop.add_reader(record.process.fd, self._drop_kernel, record)
        self._kernels[record.kernel_id] = record
        if self.connected:
            self._spawn(self._send_registration(record))

    async def close(self) -> None:
        """Close the connection and give everything back; the coordinator goes on without us."""
        self._closing = True
        tasks = [*self._tasks, *([self._runner] if self._runner is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._disconnect("this server is closing")
        for record in list(self._kernels.values()):
            self._drop_kernel(record)
        self._starter.shutdown(wait=False, cancel_futures=True)

    # --- Connecting ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        at_once_s = float("-inf")
        while True:
            self._was_usable = False
            try:
                await self._session()
            except (KrexError, wire.WireError, OSError) as error:
                self._lost(str(error))
            if self._was_usable and self.loop.time() - at_once_s >= AT_ONCE_EVERY_S:
                # After a good connection the next attempt is made at once: something may be frozen.
                at_once_s = self.loop.time()
                backoff_s = BACKOFF_FIRST_S
                continue
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_MOST_S)

    async def _session(self) -> None:
        """Connect, and stay until the connection is lost; always ends by raising why."""
        lost: asyncio.Future[None] = self.loop.create_future()
        place = await self.loop.run_in_executor(self._starter, self._locate)
        connection = await self._connect_or_start(place)
        _, uid = peer_credentials(connection)
        if uid not in {0, os.getuid()}:
            connection.close()
            raise CoordinatorUnavailable(
                f"{place.socket} is answered by uid {uid}, neither root nor this user: it is not trusted. "
                f"Remove that socket, or set KREX_SOCKET to a path in a directory of yours."
            )
        self._coordinator = peer_process(connection)

        def on_lost(why: str) -> None:
            self._fail_pending(why)
            if not lost.done():
                lost.set_exception(CoordinatorUnavailable(why))

        self._channel = _Channel(connection, self.loop, self._receive, on_lost)
        try:
            await self._greet(place)
            if self._coordinator is not None:
                # Its end shows here even where a forked child of it keeps the connection open.
                self.loop.add_reader(self._coordinator.fd, self._channel.lose, "its process ended")
            watcher = self.loop.create_task(self._watch(), name="krex-ping")
            try:
                await asyncio.wait({watcher, lost}, return_when=asyncio.FIRST_COMPLETED)
                if lost.done():
                    await lost
                await watcher
            finally:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
        finally:
            if lost.done() and not lost.cancelled():
                lost.exception()
            await self._after_session()

    async def _connect_or_start(self, place: Location) -> socket.socket:
        try:
            return await _connect(place)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if not place.startable:
                raise CoordinatorUnavailable(
                    f"The system's coordinator at {place.socket} does not answer. "
                    f"Ask the administrator, or see: systemctl status krex.service"
                ) from error
            if not self._may_start:
                raise CoordinatorUnavailable(
                    f"No coordinator runs at {place.socket}, and this server is configured not to start one. "
                    f"Run `krex serve`, or set KrexExtension.start_coordinator to True."
                ) from error
        except OSError as error:
            raise CoordinatorUnavailable(
                f"The coordinator's socket {place.socket} cannot be used: {error.strerror or error}. "
                f"Make its directory accessible to this user, or set KREX_SOCKET to a path in one that is."
            ) from error
        self._log.info("KREX starts a coordinator at %s", place.socket)
        await self.loop.run_in_executor(self._starter, _start_coordinator, place)
        return await _connect(place)

    async def _greet(self, place: Location) -> None:
        channel = self._channel
        assert channel is not None  # noqa: S101 - set by the only caller
        welcome: asyncio.Future[FromCoordinator] = self.loop.create_future()
        self._pending[_WELCOME] = welcome
        channel.send(Hello(role="server", label=self._label))
        await self._answered(welcome, "its greeting")
        answer = welcome.result()
        if isinstance(answer, Failed):
            raise Refused(answer)
        self.welcome = cast("Welcome", answer)
        self._identify_coordinator(self.welcome)
        self._hold_guardian(self.welcome.guardian_pid)
        status = await self._ask(Subscribe(request_id=self.next_request_id()))
        self.problem = ""
        self.lost_coordinator = False
        self._was_usable = True
        self._usable.set()
        self._log.info("KREX is coordinated by process %d at %s", self.welcome.coordinator_pid, place.socket)
        for record in list(self._kernels.values()):
            self._spawn(self._send_registration(record))
        if isinstance(status, Status):
            self._take(status)

    def _identify_coordinator(self, welcome: Welcome) -> None:
        """Hold the process that answered. Behind a socket of systemd's the listener is pid 1, not the coordinator."""
        held = self._coordinator
        if held is not None and held.pid == welcome.coordinator_pid:
            return
        claimed = Process.open(welcome.coordinator_pid)
        if claimed is not None and not _is_ours(claimed):
            claimed.close()
            claimed = None
        if held is not None:
            held.close()
        self._coordinator = claimed

    def _hold_guardian(self, pid: int | None) -> None:
        held = self._guardian
        if held is not None and (held.pid != pid or held.has_exited):
            held.close()
            held = None
        if held is None and pid is not None:
            held = Process.open(pid)
            if held is not None and not _is_ours(held):
                held.close()
                held = None
        self._guardian = held

    # --- While connected -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Ping until a ping stays unanswered; raises `CoordinatorUnavailable` then."""
        while True:
            if self._busy.is_set():
                await asyncio.sleep(PING_BUSY_S)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PING_IDLE_S):
                        await self._busy.wait()
            request_id = self.next_request_id()
            answer: asyncio.Future[FromCoordinator] = self.loop.create_future()
            self._pending[request_id] = answer
            assert self._channel is not None  # noqa: S101 - this task ends before the channel does
            self._channel.send(Ping(request_id=request_id))
            await self._answered(answer, "a ping")

    async def _answered(self, answer: asyncio.Future[FromCoordinator], what: str) -> None:
        """Return once ``answer`` is there; end the coordinator and raise where it does not come."""
        slices = 0
        while True:
            began_s = self.loop.time()
            await asyncio.wait({answer}, timeout=SLICE_S)
            if not answer.done() and self._channel is not None:
                self._channel.drain()
            if answer.done():
                await answer
                return
            if self.loop.time() - began_s > SLICE_S + LATE_LOOP_S:
                continue
            slices += 1
            state = self._coordinator.state if self._coordinator is not None else ""
            if slices * SLICE_S < self._patience_s(state) - SLICE_S / 2:
                continue
            await self._end_coordinator()
            raise CoordinatorUnavailable(
                f"The coordinator left {what} unanswered for {slices * SLICE_S:.1f} s"
                f"{' (it is stopped)' if state == 'T' else ''}. This server ends it and starts another "
                f"where it may; if this message stays, ask the administrator to restart krex.service."
            )

    def _patience_s(self, state: str) -> float:
        """How long an answer may be missing from a coordinator in this state of `/proc/PID/stat`."""
        if state == "R":
            return STARVED_LIMIT_S
        return SLICE_S if state == "T" and self._busy.is_set() else ANSWER_LIMIT_S

    async def _end_coordinator(self) -> None:
        process = self._coordinator
        if process is None or not _may_end(process):
            return
        self._log.warning("KREX ends its coordinator, process %d, which does not answer", process.pid)
        process.send(signal.SIGKILL)
        await self._exited(process, CONNECT_LIMIT_S)

    async def _after_session(self) -> None:
        """Forget the connection, and see to it that a stopped guardian does not keep the journal's lock."""
        guardian, self._guardian = self._guardian, None
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            self.loop.remove_reader(coordinator.fd)
        self._disconnect("the connection to the coordinator ended")
        try:
            coordinator_ended = (
                not self._closing and coordinator is not None and await self._exited(coordinator, EOF_LEAD_S)
            )
            self.lost_coordinator = self._was_usable and coordinator_ended
            if guardian is not None and coordinator_ended:
                ended = guardian.state != "T" and await self._exited(guardian, GUARDIAN_LIMIT_S)
                if not ended and _may_end(guardian):
                    self._log.warning(
                        "KREX ends the guardian, process %d, which outlived its coordinator", guardian.pid
                    )
                    guardian.send(signal.SIGKILL)
                    await self._exited(guardian, GUARDIAN_LIMIT_S)
        finally:
            for process in (guardian, coordinator):
                if process is not None:
                    process.close()

    async def _exited(self, process: Process, timeout_s: float) -> bool:
        """Whether the process ended, now or within ``timeout_s`` seconds."""
        if process.has_exited:
            return True
        ended = asyncio.Event()
        own = process.duplicate()
        self.loop.add_reader(own.fd, ended.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await ended.wait()
        finally:
            self.loop.remove_reader(own.fd)
            own.close()
        return ended.is_set()

    async def _ask(
        self, message: Any, *, fds: Sequence[int] = (), timeout_s: float = REQUEST_LIMIT_S
    ) -> FromCoordinator:
        channel = self._channel
        if channel is None:
            raise CoordinatorUnavailable(self.problem)
        request_id: int = message.request_id
        future: asyncio.Future[FromCoordinator] = self.loop.create_future()
        self._pending[request_id] = future
        try:
            channel.send(message, fds)
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            raise CoordinatorUnavailable(
                f"The coordinator did not answer {type(message).__name__} within {timeout_s:g} s. Try again; "
                f"it is replaced automatically where it hangs."
            ) from None
        finally:
            self._pending.pop(request_id, None)
        if isinstance(answer, Failed):
            raise Refused(answer)
        return answer

    async def _send_registration(self, record: KernelRecord) -> None:
        if record.process.has_exited:
            return
        message = Register(
            request_id=self.next_request_id(),
            label=record.label,
            kernel_id=record.kernel_id,
            notebook=record.notebook,
        )
        try:
            await self._ask(message, fds=(record.process.fd,))
        except Refused as refused:
            self._log.warning(
                "KREX could not register kernel %s (process %d): %s",
                record.kernel_id,
                record.process.pid,
                refused,
            )
        except CoordinatorUnavailable as error:
            # Every reconnection registers all kernels again.
            self._log.debug("KREX registers kernel %s later: %s", record.kernel_id, error)

    def _receive(self, message: FromCoordinator) -> None:
        if isinstance(message, Event):
            self._take(message)
            return
        request_id = _WELCOME if isinstance(message, Welcome) else getattr(message, "request_id", None)
        if isinstance(message, Failed) and request_id not in self._pending and _WELCOME in self._pending:
            request_id = _WELCOME
        future = self._pending.pop(request_id, None) if request_id is not None else None
        if future is not None and not future.done():
            future.set_result(message)

    def _take(self, change: Status | Event) -> None:
        status = change if isinstance(change, Status) else change.status
        if isinstance(change, Event) and change.report is not None:
            self._recent.appendleft(change.report)
        if isinstance(change, Status):
            self._recent = deque(change.recent, maxlen=RECENT_REPORTS)
        if status is not None:
            self.status = status
            if any(device.holder is not None or device.queue for device in status.devices):
                self._busy.set()
            else:
                self._busy.clear()
            self._hold_guardian(status.guardian_pid)
        elif isinstance(change, Event) and change.kind in {"queued", "granted"}:
            # The snapshot that shows it comes a moment later, or never where the coordinator is stopped now.
            self._busy.set()
        self._on_change(change)

    def _drop_kernel(self, record: KernelRecord) -> None:
        current = self._kernels.get(record.kernel_id)
        if current is None or current.process.fd != record.process.fd:
            return
        del self._kernels[record.kernel_id]
        self.loop.remove_reader(record.process.fd)
        record.process.close()

    def _lost(self, why: str) -> None:
        if why != self.problem:
            self._log.warning(
                "KREX: %s Kernels and notebooks work without it; exclusive regions do not.", why
            )
        self.problem = why
        self._on_change(Unavailable(at=time.time(), detail=why))

    def _disconnect(self, why: str) -> None:
        self._usable.clear()
        self.welcome = None
        self.status = None
        self._busy.clear()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        self._fail_pending(f"No answer: {why}.")

    def _fail_pending(self, why: str) -> None:
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(CoordinatorUnavailable(why))
                # Whoever waits sees it; nobody may be waiting any more.
                future.exception()

    def _report_defect(self, runner: asyncio.Task[None]) -> None:
        if not runner.cancelled() and (error := runner.exception()) is not None:
            self.problem = (
                f"KREX's connection to its coordinator failed unexpectedly: {error!r}. Restart this server."
            )
            self._log.error("%s", self.problem, exc_info=error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# The link of this process, for the provisioner: Jupyter makes provisioners and hands them no extension.
_active: Link | None = None


def active_link() -> Link | None:
    """The link of the extension loaded in this process; None where none is."""
    return _active


def set_active_link(link: Link | None) -> None:
    """Make a link the one that provisioners of this process use."""
    global _active
    _active = link


_WELCOME = -1
"""Stands for the request id that `Hello` does not have."""


class _Channel:
    """A connected socket on the loop: messages out, messages in. Never blocks; says once when it is lost."""

    def __init__(
        self,
        connection: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[FromCoordinator], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._loop = loop
        self._on_message = on_message
        self._on_lost = on_lost
        self._codec = wire.client_side()
        self._assembler = wire.Assembler(wire.MAX_ANSWER_BYTES)
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._closed = False
        loop.add_reader(connection.fileno(), self._readable)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send, or queue where the socket's buffer is full. Descriptors travel with the first packet."""
        if self._closed:
            raise CoordinatorUnavailable("The connection to the coordinator was just lost. Try again.")
        packets = self._codec.packets(message)
        if len(self._queue) + len(packets) > _MAX_QUEUED_PACKETS:
            raise CoordinatorUnavailable("The coordinator takes no messages at the moment. Try again.")
        for index, packet in enumerate(packets):
            # Duplicates, for the sender may close its own before the buffer has room.
            self._queue.append((packet, [os.dup(fd) for fd in fds] if index == 0 else []))
        self._writable()

    def drain(self) -> None:
        """Read what is there, although the loop has not said so yet."""
        if not self._closed:
            self._readable()

    def close(self) -> None:
        """Close; queued messages are dropped."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        while self._queue:
            wire.close_all(self._queue.popleft()[1])
        self._connection.close()

    def _writable(self) -> None:
        while self._queue:
            packet, fds = self._queue[0]
            try:
                if fds:
                    socket.send_fds(self._connection, [packet], fds)
                else:
                    self._connection.send(packet)
            except BlockingIOError:
                self._loop.add_writer(self._connection.fileno(), self._writable)
                return
            except OSError as error:
                self.lose(error.strerror or str(error))
                return
            self._queue.popleft()
            wire.close_all(fds)
        self._loop.remove_writer(self._connection.fileno())

    def _readable(self) -> None:
        # Bounded: the loop serves browsers and kernels between two rounds.
        for _ in range(_MAX_PACKETS_PER_READ):
            if self._closed:
                return
            try:
                packet, _ = wire.receive_packet(self._connection)
                if not packet:
                    self.lose("it closed the connection")
                    return
                body = self._assembler.feed(packet)
                message = self._codec.decode(body) if body is not None else None
            except BlockingIOError:
                return
            except (OSError, wire.WireError) as error:
                self.lose(str(error))
                return
            if message is not None:
                self._on_message(message)

    def lose(self, why: str) -> None:
        """The connection is of no use any more: close, and tell."""
        self.close()
        self._on_lost(f"The connection to the coordinator was lost ({why}); this server makes a new one.")


async def _connect(place: Location) -> socket.socket:
    """A connected non-blocking socket; raises OSError, or `CoordinatorUnavailable` after `CONNECT_LIMIT_S`."""
    connection = socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    try:
        deadline_s = time.monotonic() + CONNECT_LIMIT_S
        # Nothing tells when the backlog has room.
        while (outcome := _try_connect(connection, place)) == errno.EAGAIN and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    except BaseException:
        connection.close()
        raise
    if outcome == 0:
        return connection
    connection.close()
    if outcome == errno.EAGAIN:
        raise CoordinatorUnavailable(
            f"The coordinator at {place.socket} accepts no connections (its backlog is full). "
            f"If it stays so, find its process with `ss -xlp` and end it."
        )
    raise OSError(outcome, os.strerror(outcome), str(place.socket))


def _try_connect(connection: socket.socket, place: Location) -> int:
    """0, or the error number; EAGAIN means that the backlog is full: a stopped coordinator, or a rush of clients."""
    with short_address(place.socket) as address:
        return connection.connect_ex(address)


def _start_coordinator(place: Location) -> None:
    # Imported here: most servers find a coordinator running and never need the launcher.
    from krex_jupyter.launch import start_coordinator

    start_coordinator(place, timeout_s=START_LIMIT_S)


def _is_ours(process: Process) -> bool:
    """Whether it may be a coordinator or guardian at all: of root or of this user, and alive."""
    uids = process.uids
    return bool(uids) and uids <= {0, os.getuid()}


def _may_end(process: Process) -> bool:
    """Only what is certainly a coordinator or guardian of this very uid is ever ended."""
    return (
        process.pid not in {1, os.getpid()}
        and process.uids == {os.getuid()}
        and any(part.startswith(_OUR_MODULES) for part in process.command)
    )
