"""Speaking with the coordinator from the process that measures.

A `Connection` is one socket, used by one thread or task at a time; a region has one for itself, taken from a
small pool, so that the thread that waits reads its own answer without a reader thread in between. Beside those
the process keeps one *presence* connection: it makes the process a participant, and a thread that sleeps on it
notices when the coordinator dies, or is stopped while a region is held, and starts another, which sets free
whatever was left gated. Outside regions that thread does nothing.

A forked child inherits descriptors but no membership: it starts afresh.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TypeVar

from krex_jupyter.errors import (
    CoordinatorUnavailable,
    DeviceNotFound,
    KrexError,
    NotExclusive,
    RegionRevoked,
    UnsupportedPlatform,
    WaitTimeout,
)
from krex_jupyter.identity import has_ended
from krex_jupyter.launch import start_coordinator
from krex_jupyter.locate import Location, connect, location
from krex_jupyter.protocol import Failed, FromCoordinator, Goodbye, Hello, Message, Ping, Pong, Welcome
from krex_jupyter.wire import MAX_ANSWER_BYTES, Assembler, WireError, client_side, receive_packet

ANSWER_S = 10.0
"""Longest wait for an answer that the coordinator can give at once."""

_HELLO_S = 1.0
"""A coordinator that does not answer a hello within this is stopped: it is ended and replaced."""
_PING_S = 0.25
_PING_LATE_S = 0.4
_ATTENTIVE_S = 5.0
"""How long after a region that gated somebody the thread keeps looking by itself whether there is another."""
_REJOIN_S = 2.0
"""How often a participant without a coordinator looks whether there is one again."""
_ATTEMPTS = 3

M = TypeVar("M", bound=Message)

_numbers = itertools.count(1)
_codec = client_side()


def next_request_id() -> int:
    """A number for a request, unique in this process."""
    return next(_numbers)


class ConnectionLost(CoordinatorUnavailable):
    """The coordinator ended the connection, by its death or on purpose."""


class Connection:
    """One connection, for one thread or task at a time."""

    def __init__(self, connected: socket.socket, where: Location) -> None:
        self.where = where
        self.welcome: Welcome
        self._socket = connected
        self._assembler = Assembler(MAX_ANSWER_BYTES)
        self._pid = os.getpid()

    @classmethod
    def open(cls, hello: Hello, *, start: bool = True, timeout_s: float = 5.0) -> Connection:
        """Connect and say hello; start a coordinator where none answers, and replace one that is stopped.

        Raises:
            CoordinatorUnavailable: none answers within ``timeout_s``, and none was or could be started.
        """
        where = location()
        give_up_s = time.monotonic() + timeout_s
        for attempt in range(_ATTEMPTS):
            try:
                connected = connect(where.socket)
            except OSError as error:
                if not start or attempt == _ATTEMPTS - 1:
                    raise CoordinatorUnavailable(
                        f"No coordinator answers at {where.socket} ({error.strerror or error}). "
                        f"Start one: krex serve"
                    ) from error
                start_coordinator(where, timeout_s=max(give_up_s - time.monotonic(), 0.5))
                continue
            connection = cls(connected, where)
            try:
                connection.send(hello)
                answer = connection.receive(min(_HELLO_S, max(give_up_s - time.monotonic(), 0.1)))
            except TimeoutError:
                connection.close()
                end_stopped_coordinator(written_pid(where))
                continue
            except ConnectionLost:
                connection.close()
                continue
            if isinstance(answer, Welcome):
                connection.welcome = answer
                return connection
            connection.close()
            if isinstance(answer, Failed):
                raise error_of(answer)
        raise CoordinatorUnavailable(
            f"The coordinator at {where.socket} does not answer and could not be replaced within {timeout_s:g} s. "
            f"See {where.directory / 'coordinator.log'}, or run: krex thaw"
        )

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message. Raises `ConnectionLost`."""
        self._check_process()
        for packet in _codec.packets(message):
            try:
                if fds:
                    socket.send_fds(self._socket, [packet], list(fds))
                else:
                    self._socket.send(packet)
            except OSError as error:
                raise ConnectionLost(f"the coordinator at {self.where.socket} is gone") from error

    def receive(self, timeout_s: float | None) -> FromCoordinator:
        """The next message. Interruptible. Raises `TimeoutError`, `ConnectionLost`."""
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while True:
            left_ms = None if give_up_s is None else max(give_up_s - time.monotonic(), 0.0) * 1e3
            if not poller.poll(left_ms):
                raise TimeoutError(f"no answer from the coordinator within {timeout_s:g} s")
            message = self.receive_now()
            if message is not None:
                return message

    def receive_now(self) -> FromCoordinator | None:
        """The next message if one is complete; reads one packet, which must be there. Raises `ConnectionLost`."""
        self._check_process()
        try:
            packet, _ = receive_packet(self._socket)
        except OSError as error:
            raise ConnectionLost(f"the coordinator at {self.where.socket} is gone") from error
        if not packet:
            raise ConnectionLost(f"the coordinator at {self.where.socket} ended the connection")
        try:
            body = self._assembler.feed(packet)
            return None if body is None else _codec.decode(body)
        except WireError as error:
            raise CoordinatorUnavailable(
                f"The coordinator at {self.where.socket} speaks another version of the protocol ({error}). "
                f"End it, so that this one starts: krex serve --stop"
            ) from error

    def ask(self, message: Message, timeout_s: float = ANSWER_S) -> FromCoordinator:
        """Send a request and return its answer, skipping what belongs to no request of ours.

        Raises:
            KrexError: the subclass that belongs to a `Failed`.
            CoordinatorUnavailable: no answer within ``timeout_s``.
        """
        wanted = getattr(message, "request_id", None)
        self.send(message)
        give_up_s = time.monotonic() + timeout_s
        while True:
            try:
                answer = self.receive(max(give_up_s - time.monotonic(), 0.0))
            except TimeoutError as error:
                raise CoordinatorUnavailable(
                    f"The coordinator at {self.where.socket} did not answer within {timeout_s:g} s."
                ) from error
            if getattr(answer, "request_id", None) == wanted:
                if isinstance(answer, Failed):
                    raise error_of(answer)
                return answer

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConnectionLost("this connection belongs to the process that this one was forked from")


def expect(answer: FromCoordinator, kind: type[M]) -> M:
    """``answer``, which the protocol says is of this kind. Raises `CoordinatorUnavailable` where it is not."""
    if not isinstance(answer, kind):
        raise CoordinatorUnavailable(
            f"The coordinator answered with {type(answer).__name__} where {kind.__name__} was due; it is of another "
            f"version. End it, so that this one starts: krex serve --stop"
        )
    return answer


def error_of(failed: Failed) -> KrexError:
    """The exception that belongs to a refusal."""
    kind: type[KrexError] = {
        "wait_timeout": WaitTimeout,
        "device_not_found": DeviceNotFound,
        "unsupported": UnsupportedPlatform,
        "not_exclusive": NotExclusive,
        "other_coordinator": CoordinatorUnavailable,
        "ended": RegionRevoked,
    }.get(failed.code, KrexError)
    # A sentence begins with a capital; a name of code, as in "cpu='isolate' ...", stays as it is.
    first, rest = failed.detail[:1], failed.detail[1:]
    return kind((first if "=" in failed.detail.split(" ", 1)[0] else first.upper()) + rest)


def written_pid(where: Location) -> int:
    """Pid of the coordinator that listens at ``where``, written down by itself; 0 where unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        content = (where.directory / "coordinator.lock").read_text(encoding="ascii")
        return int(content.split()[1])
    return 0


def end_stopped_coordinator(pid: int) -> None:
    """End a coordinator of this user that does not answer, so that another can take its place.

    Its guardian notices and sets everybody free; a guardian that is stopped too holds the journal's lock and is
    ended likewise. Only processes of our own uid, identified by what they run, are touched.
    """
    victims = [pid] if pid > 0 else []
    if pid > 0:
        with contextlib.suppress(OSError):
            children = "".join((task / "children").read_text(encoding="ascii") for task in _tasks(pid))
            victims += [int(child) for child in children.split()]
    for victim in victims:
        with contextlib.suppress(OSError, ValueError):
            pidfd = os.pidfd_open(victim)
            try:
                if _is_ours(victim):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    has_ended(pidfd, within_s=2.0)
            finally:
                os.close(pidfd)


# --- Presence ------------------------------------------------------------------------------------------------------


class _Presence:
    """This process as a participant: the connection that says so and the thread that watches it."""

    def __init__(self) -> None:
        self.hello = Hello(label=_default_label(), notebook=os.environ.get("JPY_SESSION_NAME", ""))
        self.connection: Connection | None = None
        self.held = 0
        """Regions held now; while there are any, a coordinator that dies is replaced at once."""
        self.gating = 0
        """Those of them that gate somebody; while there are any, the coordinator is pinged."""
        self.attentive = False
        """The thread looks at `gating` again and again by itself. Waking it would cost the region that begins."""
        self.guard = threading.RLock()
        self._gated_s = float("-inf")
        """When a region that gates somebody was last seen here."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._leaving = False

    def join(self, hello: Hello | None) -> Welcome:
        """Connect if need be; returns what the coordinator said. Raises `CoordinatorUnavailable`."""
        with self.guard:
            if hello is not None and hello != self.hello:
                self.hello = hello
                if self.connection is not None:
                    # It joined under another name, by a region before: say who it is now.
                    self.connection.send(hello)
            if self.connection is None:
                self.connection = Connection.open(self.hello)
                self.wake()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="krex-presence", daemon=True)
                self._thread.start()
            return self.connection.welcome

    def leave(self) -> None:
        """Close the connection and end the thread."""
        with self.guard:
            self._leaving = True
            self.wake()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)
        with self.guard:
            if self.connection is not None:
                self.connection.close()
                self.connection = None

    def wake(self) -> None:
        """Have the thread look again."""
        os.eventfd_write(self._wake_fd, 1)

    def _watch(self) -> None:
        pinged_s: float | None = None
        next_ping_s = 0.0
        while not self._leaving:
            with self.guard:
                connection = self.connection
            poller = select.poll()
            poller.register(self._wake_fd, select.POLLIN)
            if connection is not None:
                poller.register(connection, select.POLLIN)
            now_s = time.monotonic()
            if self.gating:
                self._gated_s = now_s
            else:
                pinged_s = None
            if not self.gating and now_s - self._gated_s > _ATTENTIVE_S:
                # Nobody stands still because of this process: nothing to do until something arrives.
                wait_s = None
            elif pinged_s is not None:
                wait_s = max(pinged_s + _PING_LATE_S - now_s, 0.0)
            else:
                next_ping_s = next_ping_s if now_s < next_ping_s < now_s + _PING_S else now_s + _PING_S
                wait_s = next_ping_s - now_s
            self.attentive = wait_s is not None
            if not self.attentive and self.gating:
                # A region began just now, and may have seen this thread still attentive.
                continue
            if connection is None:
                wait_s = _REJOIN_S
            ready = {fd for fd, _ in poller.poll(None if wait_s is None else wait_s * 1e3)}
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            if connection is None:
                self._rejoin(start=bool(self.held))
                pinged_s = None
                continue
            try:
                if connection.fileno() in ready:
                    message = connection.receive_now()
                    if isinstance(message, Pong):
                        pinged_s = None
                    elif isinstance(message, Goodbye):
                        # It was told to end: no other is started, unless a region needs one.
                        self._forget(connection)
                elif self.gating and pinged_s is not None and time.monotonic() >= pinged_s + _PING_LATE_S:
                    end_stopped_coordinator(connection.welcome.coordinator_pid)
                    self._replace(connection)
                    pinged_s = None
                elif self.gating and pinged_s is None and time.monotonic() >= next_ping_s:
                    connection.send(Ping(request_id=next_request_id()))
                    pinged_s = time.monotonic()
            except CoordinatorUnavailable:
                self._replace(connection)
                pinged_s = None

    def _replace(self, lost: Connection) -> None:
        """The coordinator died: start another, which sets free what the last one left gated, or find one."""
        self._forget(lost)
        self._rejoin(start=True)

    def _forget(self, lost: Connection) -> None:
        with self.guard:
            lost.close()
            if self.connection is lost:
                self.connection = None

    def _rejoin(self, *, start: bool) -> None:
        """Take part again with whatever coordinator there is; where there is none, the next look may find one."""
        with self.guard:
            if self.connection is None and not self._leaving:
                with contextlib.suppress(KrexError):
                    self.connection = Connection.open(self.hello, start=start)


_presence: _Presence | None = None
_pool: list[Connection] = []
_pool_guard = threading.Lock()


def join(label: str = "", kernel_id: str = "", notebook: str = "") -> Welcome:
    """Make this process a participant: others' regions gate it from now on, and theirs wait for its own.

    Idempotent. Returns what the coordinator says of this host. Raises `CoordinatorUnavailable`.
    """
    hello = None
    if label or kernel_id or notebook:
        hello = Hello(
            label=label or _default_label(),
            kernel_id=kernel_id,
            notebook=notebook or os.environ.get("JPY_SESSION_NAME", ""),
        )
    return presence().join(hello)


def leave() -> None:
    """This process no longer takes part (until its next region)."""
    global _presence
    for connection in _drain_pool():
        connection.close()
    if _presence is not None:
        _presence.leave()
        _presence = None


def presence() -> _Presence:
    """This process's presence, whether it has joined yet or not."""
    global _presence
    with _pool_guard:
        # Two threads may come first at once (an extension that joins in the background, a cell that enters a
        # region); of two presences one would be forgotten, with its connection, and never leave.
        if _presence is None:
            _presence = _Presence()
        return _presence


def take() -> Connection:
    """A participant's connection for one region: pooled or new. Goes back by `give_back`, or is closed.

    Raises `CoordinatorUnavailable`.
    """
    me = presence()
    me.join(None)
    while True:
        with _pool_guard:
            connection = _pool.pop() if _pool else None
        if connection is None:
            return Connection.open(me.hello)
        if _still_open(connection):
            return connection
        connection.close()


def give_back(connection: Connection) -> None:
    """Return a connection that has no region any more."""
    with _pool_guard:
        if connection.fileno() >= 0 and len(_pool) < 8:
            _pool.append(connection)
            return
    connection.close()


def _still_open(connection: Connection) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while poller.poll(0):
        try:
            connection.receive_now()
        except CoordinatorUnavailable:
            return False
    return True


def _drain_pool() -> list[Connection]:
    with _pool_guard:
        drained = _pool[:]
        _pool.clear()
    return drained


def _after_fork_in_child() -> None:
    global _presence, _pool_guard
    _pool_guard = threading.Lock()
    for connection in _pool:
        connection.close()
    _pool.clear()
    if _presence is not None:
        if _presence.connection is not None:
            _presence.connection.close()
        _presence = None


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(leave)


def _default_label() -> str:
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else ""
    return "" if name.startswith("ipykernel") else name


def _tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def _is_ours(pid: int) -> bool:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return Path(f"/proc/{pid}").stat().st_uid == os.getuid() and (
            b"krex_jupyter.coordinator" in command or b"krex_jupyter.enforcement.guardian" in command
        )
    return False
