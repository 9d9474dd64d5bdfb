"""The coordinator's reactions: to its clients, its guardian, the clock and the death of processes.

One thread, one selector. Decisions about turns are `queue.py`'s, about verdicts `verdict.py`'s, about gates the
guardian's; this module carries a region from request to report:

    queued → entering → granted → held → leaving → (gone)
                 └──────────┴───────┴→ revoked → (gone, once its owner released it or ended)

A region with nobody to gate does not pass through the guardian. At a hand-off the next region enters before the
last one leaves, so that siblings of both stay gated. The owner is answered before its siblings go on: with busy
siblings that is the difference between a fraction of a millisecond and tens of them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from krex_jupyter.identity import has_ended, pid_of, read_stat, reference
from krex_jupyter.protocol import (
    HEARTBEAT_S,
    LATE_S,
    PROTOCOL_VERSION,
    Acquire,
    Audit,
    Audited,
    Cancel,
    Confirm,
    DeviceEvidence,
    Done,
    End,
    Enter,
    Entered,
    Event,
    Failed,
    Forget,
    FromGuardian,
    GetHistory,
    GetReport,
    GetStatus,
    Goodbye,
    Granted,
    Heartbeat,
    Hello,
    History,
    Leave,
    Left,
    Message,
    Ping,
    Pong,
    ProcessRef,
    Queued,
    Ready,
    RegionReport,
    Register,
    Release,
    Released,
    Revoked,
    SiblingRequest,
    Spare,
    Spared,
    StartLease,
    Subscribe,
    ToCoordinator,
    Undone,
    Ungate,
    Waits,
    Warned,
    Watch,
    Welcome,
)
from krex_jupyter.wire import WireError, close_all
from krex_jupyter.workers import Workers

from . import history as history_module
from .admission import Host, bad_request, effective_policy, refusal
from .device_locks import DeviceLocks
from .device_watch import DeviceWatch, Look
from .guardian_link import GuardianLink
from .peers import Connection, Participant, PeerRefused, new_codec
from .picture import Picture
from .queue import Arbiter, Ticket
from .regions import Region
from .settings import Settings
from .timers import Timers

if TYPE_CHECKING:
    import socket

    from krex_jupyter.devices import Devices

_log = logging.getLogger("krex.coordinator")

_ENTER_BOUND_S = 14.0
"""Longest entry: twice the guardian's bounds for locking, freezing and verifying, and some. Lateness of its
heartbeat is noticed long before."""
_EVIDENCE_BOUND_S = 0.5
_REFRESH_S = 1.0
_REFRESH_IDLE_S = 10.0
_DYING_S = 0.01
_ANSWER_TAKEN_S = 0.002
"""How long siblings are held back for an owner that does not say that it has its report."""
_ANNOUNCE_S = 0.25
_RECENT = 50
_SPARE_BOUND_S = 0.8
_STATUS_EVENT_S = 0.1
_WRITE_HISTORY_S = 0.5
_SWITCH_INTERVAL_S = 0.0005
"""How long another thread of this process may keep the interpreter from the one that grants (default 5 ms)."""
_MIN_CORES_TO_ISOLATE = 8
_MESSAGES_PER_TURN = 8
"""Messages of one connection that are handled in a row, however many it has sent."""


class Coordinator:
    """State and reactions; `run` is the loop."""

    def __init__(
        self,
        *,
        socket_path: Path,
        settings: Settings,
        devices: Devices,
        guardian: GuardianLink,
        history_files: list[Path],
        lock_directory: Path,
        driver_lock: bool,
        reserved_cores: dict[str, tuple[int, ...]],
        system: bool,
    ) -> None:
        self._settings = settings
        self._thresholds = settings.thresholds()
        self._devices = devices
        self._guardian = guardian
        self._device_locks = DeviceLocks(lock_directory, f"pid {os.getpid()} at {socket_path}")
        self._driver_lock = driver_lock
        self._reserved_cores = reserved_cores
        self._system = system
        self._arbiter = Arbiter(settings.limits())
        self._selector = selectors.DefaultSelector()
        self._timers = Timers()
        self._workers = Workers()
        self._watch = DeviceWatch(devices, self._workers)
        self._history = history_module.History(
            history_files, lambda text: self._workers.post(lambda: self._notice(text))
        )
        self._codec = new_codec()
        self._connections: set[Connection] = set()
        self._participants: dict[str, Participant] = {}
        self._regions: dict[str, Region] = {}
        self._of_connection: dict[Connection, Region] = {}
        self._answered: dict[str, Region] = {}
        """Regions whose owner was sent its report and has not said yet that it has it."""
        self._spares: dict[int, list[tuple[Connection, int]]] = {}
        self._recent: deque[RegionReport] = deque(maxlen=_RECENT)
        self._notices: deque[str] = deque(maxlen=20)
        self._host = Host(
            devices=devices.infos,
            reserved_cores=reserved_cores,
            foreign_allowed=not system if settings.allow_foreign is None else settings.allow_foreign,
        )
        self._picture = Picture(
            socket=str(socket_path),
            system=system,
            settings=settings,
            devices=devices,
            guardian=guardian,
            arbiter=self._arbiter,
            regions=self._regions,
            participants=self._participants,
            recent=self._recent,
            notices=self._notices,
        )
        self._unwritten: list[RegionReport] = []
        self._started_s = time.monotonic()
        self._beat_s = 0.0
        self._beats = 0
        self._last_region_s = float("-inf")
        self._empty_since_s = time.monotonic()
        self._stuck_timer_on = False
        self._status_due = False
        self._pump_s = float("inf")
        self._leaving = False

    # --- Loop ------------------------------------------------------------------------------------------------

    def run(self, listener: socket.socket) -> None:
        """Serve until told to leave, or until nobody takes part for ``idle_exit_s``."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._selector.register(listener, selectors.EVENT_READ, lambda _: self._on_accept(listener))
        self._selector.register(self._workers.fd, selectors.EVENT_READ, lambda _: self._workers.run_posted())
        self._register_guardian()
        self._refresh()
        try:
            while not self._leaving:
                for key, mask in self._selector.select(self._wait_s()):
                    key.data(mask)
                self._on_time()
        finally:
            self._close(listener)

    def leave(self) -> None:
        """End the loop (a signal handler calls this)."""
        self._leaving = True
        # Python resumes the selector's wait after a handler that raises nothing, so it has to be woken.
        self._workers.post(lambda: None)

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        times_s = [self._timers.next_s(), self._pump_s]
        if self._guarded():
            times_s += [self._beat_s + HEARTBEAT_S, self._guardian.heard_s + LATE_S]
        if self._settings.idle_exit_s and not self._anybody():
            times_s.append(self._empty_since_s + self._settings.idle_exit_s)
        return min(max(min(times_s) - now_s, 0.0), 3600.0)

    def _on_time(self) -> None:
        now_s = time.monotonic()
        self._timers.run_due(now_s)
        if self._guarded():
            if now_s - self._beat_s >= HEARTBEAT_S:
                self._beat_s = now_s
                self._beats += 1
                self._guardian.send(Heartbeat(count=self._beats))
            if now_s - self._guardian.heard_s > LATE_S and self._guardian.ready:
                self._on_guardian()  # Its messages may lie unread because this process was held up.
                if now_s - self._guardian.heard_s > LATE_S:
                    self._guardian_lost(
                        f"the guardian was not heard for {now_s - self._guardian.heard_s:.1f} s"
                    )
        if now_s >= self._pump_s:
            self._pump()
        idle_s = now_s - self._empty_since_s
        if self._settings.idle_exit_s and not self._anybody() and idle_s >= self._settings.idle_exit_s:
            self._leaving = True

    def _anybody(self) -> bool:
        """Somebody takes part of its own accord."""
        return any(not participant.foreign for participant in self._participants.values())

    def _guarded(self) -> bool:
        return any(region.guarded and region.occupies for region in self._regions.values())

    def _close(self, listener: socket.socket) -> None:
        listener.close()
        self._guardian.dismiss()
        for connection in list(self._connections):
            connection.send(Goodbye())
            connection.close()
        self._write_history()
        self._history.close()

    # --- Connections -------------------------------------------------------------------------------------------

    def _on_accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors: the waiting peer stays in the backlog; others are served meanwhile.
                self._notice(f"a connection could not be accepted: {error}")
                return
            try:
                connection = Connection(accepted, self._codec)
            except PeerRefused as error:
                _log.warning("refused a connection: %s", error)
                continue
            self._connections.add(connection)
            self._selector.register(
                connection, selectors.EVENT_READ, functools.partial(self._on_ready, connection)
            )
            self._selector.register(
                connection.peer.pidfd,
                selectors.EVENT_READ,
                functools.partial(self._on_peer_ended, connection),
            )

    def _on_peer_ended(self, connection: Connection, _mask: int) -> None:
        self._drop_connection(connection)

    def _on_ready(self, connection: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if not mask & selectors.EVENT_READ:
            return
        # Only so many before others have their turn: the selector reports what is left at once.
        for _ in range(_MESSAGES_PER_TURN):
            if connection.closed:
                return
            try:
                received = connection.receive()
            except BlockingIOError:
                return
            except WireError as error:
                self._send(connection, Failed(request_id=0, code="bad_request", detail=f"{error}"))
                self._drop_connection(connection)
                return
            if received is None:
                self._drop_connection(connection)
                return
            message, fds = received
            try:
                self._handle(connection, message, fds)
            finally:
                close_all(fds)

    def _send(self, connection: Connection, message: Message) -> None:
        connection.send(message)
        if connection.wants_to_write:
            self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        if connection.closed:
            return
        if not connection.flush():
            _log.warning("pid %d does not read what it asked for; disconnected", connection.peer.process.pid)
            self._drop_connection(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events, self._selector.get_key(connection).data)

    def _drop_connection(self, connection: Connection) -> None:
        """A connection ended: closed by its peer, with its process, or by us."""
        if connection not in self._connections:
            return
        # A dying process closes its sockets a moment before it counts as ended.
        died = has_ended(
            connection.peer.pidfd, within_s=_DYING_S if connection in self._of_connection else 0.0
        )
        self._connections.discard(connection)
        self._selector.unregister(connection)
        self._selector.unregister(connection.peer.pidfd)
        connection.close()
        region = self._of_connection.pop(connection, None)
        if region is not None:
            code, what = ("owner_died", "ended") if died else ("connection_lost", "closed its connection")
            self._owner_left(region, code, f"its owner (pid {connection.peer.process.pid}) {what}")
        participant = connection.participant
        if participant is not None:
            participant.connections.discard(connection)
            if died or (not participant.connections and not participant.registered):
                self._remove_participant(participant)
            elif not participant.connections:
                participant.joined = False
        self._status_changed()

    def _handle(self, connection: Connection, message: ToCoordinator, fds: list[int]) -> None:
        if isinstance(message, Hello):
            self._on_hello(connection, message)
            return
        if connection.hello is None:
            self._send(
                connection, Failed(request_id=0, code="bad_request", detail="the first message must be hello")
            )
            self._drop_connection(connection)
            return
        match message:
            case Acquire():
                self._on_acquire(connection, message)
            case Confirm():
                self._on_confirm(connection, message)
            case Release():
                self._on_release(connection, message)
            case Cancel():
                self._on_cancel(connection, message)
            case End():
                self._on_end(connection, message)
            case Register():
                self._on_register(connection, message, fds)
            case Ungate():
                self._on_ungate(connection, message)
            case GetStatus():
                self._send_status(connection, message.request_id, message.recent)
            case GetHistory():
                self._write_history()
                self._history.find(
                    message, self._only_uid(connection), self._answer_history(connection, message.request_id)
                )
            case GetReport():
                self._on_get_report(connection, message)
            case Subscribe():
                connection.subscribed = True
                self._send_status(connection, message.request_id, _RECENT)
            case Ping():
                self._send(connection, Pong(request_id=message.request_id))

    def _on_hello(self, connection: Connection, hello: Hello) -> None:
        if hello.version > PROTOCOL_VERSION:
            _log.info(
                "pid %d speaks protocol %d, this is %d",
                connection.peer.process.pid,
                hello.version,
                PROTOCOL_VERSION,
            )
        connection.hello = hello
        if hello.role != "viewer":
            participant = self._participant(
                connection.peer.process, connection.peer.uid, connection.peer.pidfd
            )
            participant.connections.add(connection)
            participant.protected |= hello.role == "server"
            participant.joined = True
            # What its server says of a kernel is worth more than what the kernel says of itself.
            for name in ("label", "kernel_id", "notebook"):
                known, said = getattr(participant, name), getattr(hello, name)
                setattr(participant, name, (known or said) if participant.registered else (said or known))
            connection.participant = participant
            if len(participant.connections) == 1:
                self._tell_guardian(participant)
                self._guard_late(participant)
        self._send(
            connection,
            Welcome(
                version=PROTOCOL_VERSION,
                coordinator_pid=os.getpid(),
                guardian_pid=self._guardian.pid,
                system=self._system,
                devices=self._devices.infos,
                timeout_s=self._settings.timeout_s,
                max_hold_s=self._settings.max_hold_s,
            ),
        )
        self._status_changed()

    # --- Participants ------------------------------------------------------------------------------------------

    def _participant(self, process: ProcessRef, uid: int, pidfd: int) -> Participant:
        key = f"{process.pid}:{process.start_ticks}:{process.inode}"
        participant = self._participants.get(key)
        if participant is None:
            participant = Participant(process, uid, os.dup(pidfd))
            self._participants[key] = participant
            self._selector.register(
                participant.pidfd, selectors.EVENT_READ, lambda _: self._remove_participant(participant)
            )
            self._event("registered", participant)
        return participant

    def _tell_guardian(self, participant: Participant) -> None:
        self._guardian.send(
            Watch(
                process=participant.process,
                uid=participant.uid,
                label=participant.label,
                protected=participant.protected,
                cores=() if participant.protected else self._all_reserved(),
            ),
            fds=(participant.pidfd,),
        )

    def _all_reserved(self) -> tuple[int, ...]:
        return tuple(sorted({core for cores in self._reserved_cores.values() for core in cores}))

    def _guard_late(self, participant: Participant) -> None:
        """Bring regions that had nobody to gate to the guardian, now that there is somebody."""
        for region in self._regions.values():
            if (
                region.phase in ("granted", "held")
                and not region.guarded
                and region.cpu_policy != "share"
                and region.participant is not participant
                and not participant.protected
            ):
                region.guarded = True
                self._send_enter(region, self._siblings_of(region))
                self._guardian.send(StartLease(region_id=region.region_id))

    def _remove_participant(self, participant: Participant) -> None:
        """Its process ended, or it left."""
        if self._participants.pop(participant.key, None) is None:
            return
        self._selector.unregister(participant.pidfd)
        self._guardian.send(Forget(process=participant.process))
        for connection in list(participant.connections):
            self._drop_connection(connection)
        os.close(participant.pidfd)
        self._event("gone", participant)
        if not self._anybody():
            self._empty_since_s = time.monotonic()

    def _counts(self, participant: Participant, region: Region) -> bool:
        """Whether a process is a sibling of a region, or only observed."""
        if participant.foreign and not participant.joined:
            return region.acquire.foreign == "gate"
        rule = self._settings.participants
        return participant.joined or rule == "all" or (rule == "gpu" and participant.gpu_library is True)

    def _on_register(self, connection: Connection, message: Register, fds: list[int]) -> None:
        pid = pid_of(fds[0]) if len(fds) == 1 else 0
        process = reference(pid, fds[0]) if pid > 0 else None
        owner = _uid_of(pid) if pid > 0 else -1
        problem = ""
        if len(fds) != 1:
            problem = "exactly one pidfd must come with it"
        elif process is None:
            problem = "the process is gone"
        elif connection.peer.uid not in (0, owner):
            problem = f"process {pid} belongs to uid {owner}, not to the caller"
        if problem or process is None:
            self._send(
                connection,
                Failed(
                    request_id=message.request_id, code="bad_request", detail=f"not registered: {problem}"
                ),
            )
            return
        participant = self._participant(process, owner, fds[0])
        participant.registered = True
        participant.label = message.label or participant.label
        participant.kernel_id = message.kernel_id or participant.kernel_id
        participant.notebook = message.notebook or participant.notebook
        self._tell_guardian(participant)
        self._guard_late(participant)
        self._send(connection, Done(request_id=message.request_id))
        self._status_changed()

    def _on_ungate(self, connection: Connection, message: Ungate) -> None:
        participant = next((p for p in self._participants.values() if p.process.pid == message.pid), None)
        if participant is None or not self._guarded():
            self._send(connection, Done(request_id=message.request_id))
            return
        if connection.peer.uid not in (0, participant.uid):
            self._send(
                connection,
                Failed(
                    request_id=message.request_id,
                    code="not_permitted",
                    detail=f"process {message.pid} belongs to uid {participant.uid}",
                ),
            )
            return
        waiting = self._spares.setdefault(message.pid, [])
        waiting.append((connection, message.request_id))
        self._guardian.send(Spare(pid=message.pid, why=message.why))
        self._timers.at(
            time.monotonic() + _SPARE_BOUND_S, lambda: self._on_spared(Spared(pid=message.pid, regions=()))
        )

    def _on_spared(self, message: Spared) -> None:
        for connection, request_id in self._spares.pop(message.pid, []):
            self._send(connection, Done(request_id=request_id))

    # --- Asking and waiting --------------------------------------------------------------------------------------

    def _on_acquire(self, connection: Connection, acquire: Acquire) -> None:
        participant = connection.participant
        if participant is None:
            self._send(connection, bad_request(acquire, "a viewer cannot hold regions"))
            return
        if connection in self._of_connection:
            self._send(
                connection, bad_request(acquire, "this connection has a region already; open another one")
            )
            return
        problem = refusal(acquire, self._host)
        if problem is not None:
            self._send(connection, problem)
            return
        now_s = time.monotonic()
        infos = tuple(self._devices.info_of(name) for name in acquire.devices)
        policy = effective_policy(acquire, self._host)
        wanted_s = self._settings.max_hold_s if acquire.max_hold_s is None else acquire.max_hold_s
        timeout_s = self._settings.timeout_s if acquire.timeout_s is None else acquire.timeout_s
        ticket = Ticket(
            region_id=uuid.uuid4().hex[:12],
            participant=participant.key,
            devices=tuple(info.uuid for info in infos),
            freezes=policy == "freeze",
            submitted_s=now_s,
            deadline_s=now_s + max(timeout_s, 0.0),
        )
        region = Region(
            ticket=ticket,
            acquire=acquire,
            connection=connection,
            participant=participant,
            devices=infos,
            cpu_policy=policy,
            max_hold_s=min(wanted_s, self._settings.longest_hold_s) if wanted_s else 0.0,
        )
        self._regions[ticket.region_id] = region
        self._of_connection[connection] = region
        self._arbiter.submit(ticket)
        self._pump()
        if region.phase == "queued":
            self._guardian.send(Waits(process=participant.process))
            self._event("queued", participant, region)

    def _pump(self) -> None:
        """Let time-outs pass and start what may start."""
        now_s = time.monotonic()
        gated = self._gated_participants()
        self._start_what_may(now_s, gated)
        # Starting comes first: a time-out of 0 means "now or not at all".
        late = self._arbiter.expired(now_s)
        for ticket in late:
            region = self._regions[ticket.region_id]
            waited_s = now_s - ticket.submitted_s
            self._fail(region, "wait_timeout", f"waited {waited_s:.1f} s. {self._picture.waits_for(region)}")
        if late:
            # Whoever gave up may have kept others waiting, and nothing else would wake us for them.
            self._start_what_may(now_s, gated)
        wake_s = self._arbiter.wake_s(now_s, gated)
        self._pump_s = float("inf") if wake_s is None else wake_s
        self._announce()
        self._device_locks.give_back(lambda name: self._arbiter.holder(name) is None)
        self._status_changed()

    def _start_what_may(self, now_s: float, gated: set[str]) -> None:
        if self._guardian.ready:
            while (ticket := self._arbiter.start_next(now_s, gated)) is not None:
                self._start(self._regions[ticket.region_id], now_s)

    def _gated_participants(self) -> set[str]:
        """Participants that a held region locks or freezes, unless that region is about to hand over."""
        gated: set[str] = set()
        pids: set[int] = set()
        for region in self._regions.values():
            if region.phase in ("entering", "granted", "held"):
                pids |= {sibling.pid for sibling in region.all_siblings if sibling.gate != "observe"}
        if pids:
            gated = {
                key for key, participant in self._participants.items() if participant.process.pid in pids
            }
        return gated

    def _announce(self) -> None:
        """Tell those who wait where they stand, where that has changed."""
        now_s = time.monotonic()
        positions = self._arbiter.positions()
        for region_id, position in positions.items():
            region = self._regions[region_id]
            holder = self._picture.holder_of(region)
            news = (position, holder.region_id if holder is not None else "")
            if news == region.announced:
                continue
            if now_s - region.announced_s < _ANNOUNCE_S:
                self._pump_s = min(self._pump_s, region.announced_s + _ANNOUNCE_S)
                continue
            region.announced = news
            region.announced_s = now_s
            self._send(
                region.connection,
                Queued(
                    request_id=region.acquire.request_id,
                    region_id=region_id,
                    position=position,
                    waits_for=self._picture.waits_for(region),
                    eta_s=self._picture.eta_s(region, position),
                ),
            )

    def _fail(self, region: Region, code: str, detail: str) -> None:
        """A request comes to nothing."""
        self._regions.pop(region.region_id, None)
        self._of_connection.pop(region.connection, None)
        self._send(region.connection, Failed(request_id=region.acquire.request_id, code=code, detail=detail))  # type: ignore[arg-type]
        self._event("left", region.participant, region, detail)

    def _on_cancel(self, connection: Connection, message: Cancel) -> None:
        region = self._of_connection.get(connection)
        if region is None or region.acquire.request_id != message.request_id:
            self._send(
                connection,
                Failed(request_id=message.request_id, code="cancelled", detail="nothing was waiting"),
            )
            return
        self._fail(region, "cancelled", "cancelled by its caller")
        self._give_up(region)

    def _give_up(self, region: Region) -> None:
        """Take back whatever a region has that will not go on."""
        if region.phase == "queued":
            self._arbiter.withdraw(region.region_id)
        else:
            self._end_holding(region)
        self._pump()

    def _on_end(self, connection: Connection, message: End) -> None:
        region = self._regions.get(message.region_id)
        if region is None:
            self._send(
                connection,
                Failed(
                    request_id=message.request_id,
                    code="not_found",
                    detail=f"no region {message.region_id} is queued or held",
                ),
            )
            return
        if connection.peer.uid not in (0, region.participant.uid):
            self._send(
                connection,
                Failed(
                    request_id=message.request_id,
                    code="not_permitted",
                    detail="the region belongs to somebody else",
                ),
            )
            return
        if region.phase == "queued":
            self._fail(region, "ended", "it was taken out of the queue on its owner's behalf")
            self._give_up(region)
        elif region.phase != "revoked":
            self._revoke(region, "ended", "it was ended on its owner's behalf")
        self._send(connection, Done(request_id=message.request_id))

    # --- Entering ------------------------------------------------------------------------------------------------

    def _start(self, region: Region, now_s: float) -> None:
        """A ticket's turn has come: gate its siblings, or grant at once where there is nobody to gate."""
        region.phase = "entering"
        region.entering_s = now_s
        region.epoch = self._arbiter.epoch
        self._last_region_s = now_s
        for info in region.devices:
            other = self._device_locks.take(info.uuid)
            if other:
                self._fail(
                    region,
                    "other_coordinator",
                    f"{info.uuid} is held through another coordinator ({other}). "
                    f"Use that one: unset KREX_SOCKET, or set it to the same path everywhere.",
                )
                self._arbiter.finish(region.region_id, now_s)
                return
        if region.cpu_policy == "isolate":
            region.cores = tuple(
                sorted(core for info in region.devices for core in self._reserved_cores.get(info.uuid, ()))
            )
        for info in region.devices:
            if info.vendor != "cpu":
                look = self._watch.last.get(info.uuid)
                region.processes_before[info.uuid] = None if look is None else look.pids
        if region.acquire.foreign == "gate":
            self._adopt_foreign(region)
        siblings = self._siblings_of(region)
        nothing_to_gate = region.vendor == "cpu" and region.cpu_policy == "share"
        if not siblings or nothing_to_gate:
            self._grant(region, now_s)
            return
        region.guarded = True
        self._send_enter(region, siblings)
        self._timers.at(
            now_s + _ENTER_BOUND_S,
            lambda: self._guardian_lost("an entry took too long") if region.phase == "entering" else None,
        )

    def _send_enter(self, region: Region, siblings: tuple[SiblingRequest, ...]) -> None:
        self._beat_s = time.monotonic()
        self._guardian.heard_s = max(self._guardian.heard_s, self._beat_s)
        self._guardian.send(
            Enter(
                region_id=region.region_id,
                epoch=region.epoch,
                owner=region.participant.process,
                devices=region.ticket.devices,
                vendor=region.vendor,
                cpu_policy=region.cpu_policy,
                foreign=region.acquire.foreign,
                peers=region.acquire.peers,
                siblings=siblings,
                max_hold_s=region.max_hold_s,
                driver_lock=self._driver_lock,
            )
        )

    def _adopt_foreign(self, region: Region) -> None:
        """Have processes that never took part, but use a device of the region, gated for it like the others."""
        known = {participant.process.pid for participant in self._participants.values()}
        for pid in sorted({pid for pids in region.processes_before.values() for pid in pids or ()} - known):
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                continue
            process = reference(pid, pidfd)
            if process is not None and not _descends_from(pid, region.participant.process.pid):
                participant = self._participant(process, _uid_of(pid), pidfd)
                participant.foreign = True
                participant.label = participant.label or f"pid {pid}, not in KREX"
                self._tell_guardian(participant)
                who = region.participant.label or f"pid {region.participant.process.pid}"
                self._notice(f"process {pid}, which never took part in KREX, is gated for regions of {who}")
            os.close(pidfd)

    def _siblings_of(self, region: Region) -> tuple[SiblingRequest, ...]:
        holding = {r.participant.key for r in self._regions.values() if r.occupies}
        waiting = {r.participant.key for r in self._regions.values() if r.phase == "queued"}
        return tuple(
            SiblingRequest(
                process=participant.process,
                holds_region=key in holding and not self._is_handing_over(participant),
                waiting=key in waiting,
                counts=self._counts(participant, region),
                contexts=participant.contexts,
            )
            for key, participant in self._participants.items()
            if key != region.participant.key and not participant.protected
        )

    def _is_handing_over(self, participant: Participant) -> bool:
        return all(
            r.phase == "leaving"
            for r in self._regions.values()
            if r.participant is participant and r.occupies
        )

    def _on_entered(self, message: Entered) -> None:
        region = self._regions.get(message.region_id)
        if region is not None and region.phase in ("granted", "held", "leaving") and not message.error:
            # Somebody appeared during a region that had nobody to gate until then.
            region.late += message.siblings
            frozen = any(sibling.frozen for sibling in message.siblings)
            self._arbiter.note_gated(region.region_id, time.monotonic(), frozen=frozen)
            self._watch_for_stuck_owner()
        if region is None or region.phase != "entering":
            return
        if message.error:
            self._fail(region, "not_exclusive", f"the siblings could not be gated: {message.error}")
            self._end_holding(region)
            self._pump()
            return
        region.siblings = message.siblings
        region.enter_costs = message.costs
        now_s = time.monotonic()
        if any(sibling.gate != "observe" for sibling in message.siblings):
            self._arbiter.note_gated(region.region_id, now_s, frozen=region.frozen)
        self._grant(region, now_s)

    def _grant(self, region: Region, now_s: float) -> None:
        region.phase = "granted"
        region.granted_s = now_s
        region.started_at = time.time()
        self._send(
            region.connection,
            Granted(
                request_id=region.acquire.request_id,
                region_id=region.region_id,
                epoch=region.epoch,
                started_at=region.started_at,
                wait_s=region.entering_s - region.ticket.submitted_s,
                enter_s=now_s - region.entering_s,
                max_hold_s=region.max_hold_s,
                cpu_policy=region.cpu_policy,
                cores=region.cores,
                reserved=self._all_reserved(),
                siblings=region.siblings,
            ),
        )

        def unconfirmed() -> None:
            if region.phase == "granted" and self._regions.get(region.region_id) is region:
                self._fail(region, "ended", f"its grant was not taken within {self._settings.confirm_s:g} s")
                self._give_up(region)

        self._timers.at(now_s + self._settings.confirm_s, unconfirmed)

    def _on_confirm(self, connection: Connection, message: Confirm) -> None:
        self._let_go(message.region_id)
        region = self._of_connection.get(connection)
        if region is None or region.region_id != message.region_id or region.phase != "granted":
            return
        region.phase = "held"
        if region.guarded:
            self._guardian.send(StartLease(region_id=region.region_id))
            self._watch_for_stuck_owner()
        if region.max_hold_s:
            self._timers.at(
                time.monotonic() + region.max_hold_s + (0.1 if region.guarded else 0.0),
                lambda: self._lease_over(region),
            )
        self._timers.at(time.monotonic() + self._settings.notice_s, self._status_changed)
        self._event("granted", region.participant, region)

    def _lease_over(self, region: Region) -> None:
        if region.phase == "held" and self._regions.get(region.region_id) is region:
            self._revoke(region, "max_hold", f"it was held longer than max_hold={region.max_hold_s:g} s")

    def _watch_for_stuck_owner(self) -> None:
        if self._settings.stuck_s and not self._stuck_timer_on:
            self._stuck_timer_on = True
            self._timers.at(time.monotonic() + self._settings.stuck_s / 4, self._check_stuck_owners)

    def _check_stuck_owners(self) -> None:
        """An owner that waits for a sibling it froze would wait for ever."""
        self._stuck_timer_on = False
        now_s = time.monotonic()
        for region in list(self._regions.values()):
            if region.phase != "held" or not region.frozen:
                continue
            self._watch_for_stuck_owner()
            spent = _cpu_ticks(region.participant.process.pid)
            if spent != region.cpu_seen[0]:
                region.cpu_seen = (spent, now_s)
            elif now_s - region.cpu_seen[1] >= self._settings.stuck_s and not self._device_is_busy(region):
                self._revoke(
                    region,
                    "owner_stuck",
                    f"its owner used no CPU for {self._settings.stuck_s:g} s while siblings stood frozen; it may be "
                    f"waiting for one of them (name it in peers=)",
                )

    def _device_is_busy(self, region: Region) -> bool:
        """Whether a GPU of the region works, or may: an owner may sleep while its kernel runs."""
        return region.vendor != "cpu"

    # --- Leaving -------------------------------------------------------------------------------------------------

    def _on_release(self, connection: Connection, message: Release) -> None:
        region = self._of_connection.get(connection)
        if region is None or region.region_id != message.region_id:
            self._send(
                connection,
                Failed(
                    request_id=message.request_id,
                    code="not_found",
                    detail=f"this connection holds no region {message.region_id}",
                ),
            )
            return
        if region.phase not in ("granted", "held", "revoked"):
            still = (
                "is being released" if region.phase == "leaving" else "is not held yet; cancel its request"
            )
            self._send(
                connection,
                Failed(
                    request_id=message.request_id,
                    code="bad_request",
                    detail=f"region {message.region_id} {still}",
                ),
            )
            return
        region.released_s = time.monotonic()
        region.release_request = message.request_id
        region.owner = message.owner
        if region.phase in ("granted", "held"):
            region.phase = "leaving"
            if region.guarded:
                region.due.add("audit")
                self._guardian.send(Audit(region_id=region.region_id))
            for info in region.devices:
                if info.vendor != "cpu":
                    region.due.add(info.uuid)
                    self._watch.look(info.uuid, functools.partial(self._on_look, region, info.uuid))
        if region.due:
            self._timers.at(region.released_s + _EVIDENCE_BOUND_S, lambda: self._evidence_late(region))
        else:
            self._answer_release(region)

    def _on_audited(self, message: Audited) -> None:
        region = self._regions.get(message.region_id)
        if region is not None and "audit" in region.due:
            region.audit = message.audit
            self._arrived(region, "audit")

    def _on_look(self, region: Region, uuid: str, look: Look) -> None:
        before = region.processes_before.get(uuid)
        ungated: tuple[int, ...] = ()
        if look.pids is not None:
            gated = {sibling.pid for sibling in region.all_siblings if sibling.gate != "observe"}
            mine = region.participant.process.pid
            ungated = tuple(
                pid for pid in look.pids if pid not in gated and pid != mine and not _descends_from(pid, mine)
            )
        region.evidence[uuid] = DeviceEvidence(
            processes_before=before,
            processes_after=look.pids,
            ungated=ungated,
            error="" if look.pids is not None and before is not None else "the driver did not list them",
        )
        if uuid in region.due:
            self._arrived(region, uuid)
        self._note_contexts()

    def _arrived(self, region: Region, what: str) -> None:
        region.due.discard(what)
        if not region.due and self._regions.get(region.region_id) is region:
            self._answer_release(region)

    def _evidence_late(self, region: Region) -> None:
        if region.due and self._regions.get(region.region_id) is region:
            region.due.clear()
            self._answer_release(region)

    def _answer_release(self, region: Region) -> None:
        """The owner gets its report; only then do its siblings go on."""
        report = region.report(time.monotonic(), self._thresholds)
        self._regions.pop(region.region_id, None)
        self._of_connection.pop(region.connection, None)
        self._send(region.connection, Released(request_id=region.release_request, report=report))
        self._picture.note_held(report.held_s)
        if region.phase == "leaving" and region.guarded:
            self._answered[region.region_id] = region
            self._timers.at(time.monotonic() + _ANSWER_TAKEN_S, lambda: self._let_go(region.region_id))
        elif region.phase == "leaving":
            self._arbiter.finish(region.region_id, time.monotonic())
            self._pump()
        self._record(region, report)

    def _let_go(self, region_id: str) -> None:
        """The owner has its answer: the next region enters, and only then this one leaves.

        So siblings of both stay gated.
        """
        region = self._answered.pop(region_id, None)
        if region is not None:
            self._arbiter.finish(region_id, time.monotonic())
            self._pump()
            self._guardian.send(Leave(region_id=region_id))

    def _record(self, region: Region, report: RegionReport) -> None:
        self._recent.appendleft(report)
        if not self._unwritten:
            # Not at once: the database's thread would compete with the next grant for the interpreter.
            self._timers.at(time.monotonic() + _WRITE_HISTORY_S, self._write_history)
        self._unwritten.append(report)
        self._event("released", region.participant, region, report=report)

    def _write_history(self) -> None:
        for report in self._unwritten:
            self._history.add(report)
        self._unwritten.clear()

    def _end_holding(self, region: Region) -> None:
        """Take devices and gates from a region that has them."""
        if self._arbiter.finish(region.region_id, time.monotonic()) is not None and region.guarded:
            self._guardian.send(Leave(region_id=region.region_id))

    def _revoke(self, region: Region, code: str, detail: str) -> None:
        """Exclusivity ends now; the body runs on, and its release will be answered with `revoked`."""
        if region.phase == "entering":
            self._fail(region, "ended", detail)
            self._end_holding(region)
            self._pump()
            return
        if not region.occupies:
            return
        region.revoked = (code, detail)
        answer_due = region.phase == "leaving"
        region.phase = "revoked"
        region.due.clear()
        self._end_holding(region)
        self._send(region.connection, Revoked(region_id=region.region_id, code=code, detail=detail))
        self._event("revoked", region.participant, region, detail)
        if answer_due:
            self._answer_release(region)
        self._pump()

    def _owner_left(self, region: Region, code: str, detail: str) -> None:
        """The owner's process or connection is gone, whatever the region was doing."""
        if region.phase == "queued":
            self._arbiter.withdraw(region.region_id)
        elif region.phase == "entering":
            self._end_holding(region)
        else:
            if region.revoked is None:
                region.revoked = (code, detail)
            if region.occupies:
                self._end_holding(region)
            self._record(region, region.report(time.monotonic(), self._thresholds))
        self._regions.pop(region.region_id, None)
        self._event("left", region.participant, region, detail)
        self._pump()

    # --- Guardian ------------------------------------------------------------------------------------------------

    def _register_guardian(self) -> None:
        self._selector.register(self._guardian.fileno(), selectors.EVENT_READ, lambda _: self._on_guardian())

    def _on_guardian(self) -> None:
        try:
            for message in self._guardian.messages():
                self.on_guardian_message(message)
        except ConnectionError as error:
            self._guardian_lost(str(error))

    def on_guardian_message(self, message: FromGuardian) -> None:
        """React to one message of the guardian."""
        match message:
            case Ready():
                if message.replayed:
                    self._notice(
                        f"{message.replayed} processes that an earlier guardian had left gated were set free"
                    )
                self._pump()
            case Entered():
                self._on_entered(message)
            case Audited():
                self._on_audited(message)
            case Spared():
                self._on_spared(message)
            case Undone():
                region = self._regions.get(message.region_id)
                if region is not None:
                    self._revoke(region, message.code, message.detail)
            case Warned():
                self._notice(message.detail)
            case Left() | Heartbeat():
                pass

    def _guardian_lost(self, why: str) -> None:
        """Set free what can be set free without it, end it, start another, and say so to those concerned."""
        self._notice(f"{why}; it was replaced")
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._guardian.fileno())
        try:
            self._guardian.recover()
        except OSError as error:
            self._notice(f"no guardian can be started ({error}); regions with siblings wait until one can")
            self._timers.at(time.monotonic() + 1.0, lambda: self._guardian_lost("there is no guardian"))
            return
        self._register_guardian()
        for participant in self._participants.values():
            self._tell_guardian(participant)
        for region in list(self._regions.values()):
            if region.guarded and region.occupies:
                self._revoke(region, "guardian_lost", why)

    # --- Looking and telling ---------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Look at devices and registered kernels, again and again, in the background."""
        idle = time.monotonic() - self._last_region_s > 60.0
        self._timers.at(time.monotonic() + (_REFRESH_IDLE_S if idle else _REFRESH_S), self._refresh)
        measuring = any(region.phase in ("granted", "held") for region in self._regions.values())
        unknown = [
            participant.process.pid
            for participant in self._participants.values()
            if participant.registered and not participant.joined and not participant.gpu_library
        ]
        if measuring or not (unknown or self._watch.has_gpus):
            return

        def arrived(libraries: dict[int, bool]) -> None:
            self._note_contexts()
            for participant in self._participants.values():
                if participant.process.pid in libraries:
                    participant.gpu_library = libraries[participant.process.pid]

        self._watch.refresh(unknown, arrived)

    def _note_contexts(self) -> None:
        """Whose contexts are where, as of the last look at each device."""
        for participant in self._participants.values():
            participant.contexts = self._watch.contexts(participant.process.pid)

    def _notice(self, text: str) -> None:
        _log.warning("%s", text)
        self._notices.append(text)
        self._broadcast(Event(kind="notice", at=time.time(), detail=text))

    def _event(
        self,
        kind: str,
        participant: Participant,
        region: Region | None = None,
        detail: str = "",
        report: RegionReport | None = None,
    ) -> None:
        if not any(connection.subscribed for connection in self._connections):
            return
        self._broadcast(
            Event(
                kind=kind,  # type: ignore[arg-type]  # callers pass literals of it
                at=time.time(),
                region_id="" if region is None else region.region_id,
                pid=participant.process.pid,
                label=participant.label if region is None else region.acquire.label or participant.label,
                notebook=participant.notebook,
                devices=() if region is None else region.ticket.devices,
                detail=detail,
                report=report,
            ),
            participant.uid,
        )

    def _broadcast(self, event: Event, uid: int | None = None) -> None:
        for connection in list(self._connections):
            if connection.subscribed and (uid is None or not self._system or connection.peer.uid in (0, uid)):
                self._send(connection, event)

    def _status_changed(self) -> None:
        """Send subscribers a fresh snapshot, soon and only once for many changes."""
        if self._status_due or not any(connection.subscribed for connection in self._connections):
            return
        self._status_due = True
        self._timers.at(time.monotonic() + _STATUS_EVENT_S, self._broadcast_status)

    def _broadcast_status(self) -> None:
        self._status_due = False
        for connection in list(self._connections):
            if connection.subscribed:
                status = self._picture.status(0, 0, self._only_uid(connection))
                self._send(connection, Event(kind="status", at=time.time(), status=status))

    def _send_status(self, connection: Connection, request_id: int, recent: int) -> None:
        self._send(connection, self._picture.status(request_id, recent, self._only_uid(connection)))

    def _only_uid(self, connection: Connection) -> int | None:
        """Whose records a connection may see: everybody's where there is one user, else its own."""
        return connection.peer.uid if self._system and connection.peer.uid != 0 else None

    def _answer_history(
        self, connection: Connection, request_id: int
    ) -> Callable[[list[RegionReport]], None]:
        def found(reports: list[RegionReport]) -> None:
            self._workers.post(
                lambda: self._send(connection, History(request_id=request_id, reports=tuple(reports)))
            )

        return found

    def _on_get_report(self, connection: Connection, message: GetReport) -> None:
        self._write_history()

        def found(reports: list[RegionReport]) -> None:
            answer: Message
            if reports:
                answer = History(request_id=message.request_id, reports=tuple(reports))
            else:
                answer = Failed(
                    request_id=message.request_id,
                    code="not_found",
                    detail=f"no report of region {message.region_id!r} is on record. See: krex history",
                )
            self._workers.post(lambda: self._send(connection, answer))

        self._history.find_one(message.region_id, self._only_uid(connection), found)


def _uid_of(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1


def _cpu_ticks(pid: int) -> int:
    """User and system time of a process, in clock ticks; -1 where it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return -1
    return int(fields[11]) + int(fields[12])


def _descends_from(pid: int, ancestor: int) -> bool:
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        if pid == ancestor:
            return True
        seen.add(pid)
        stat = read_stat(pid)
        if stat is None:
            return False
        pid = stat.parent
    return False
