"""The guardian: the only process that locks, freezes and thaws, and the one that undoes unasked.

It is started by the coordinator and speaks with it over one socket. Here are its regions from `Enter` to `Leave`,
their leases, and the loop; what is done to a process, and in which order, is `gates.py`; to whom, `plan.py`.

What ends a region without being asked: its lease is over, its owner is gone (both by descriptors held here), the
coordinator is gone or late. So the guardian's main thread never waits for long: driver calls run on workers, and
the freezer's bounded waits show a heartbeat.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from krex_jupyter.identity import open_same, read_stat
from krex_jupyter.protocol import (
    HEARTBEAT_S,
    LATE_S,
    Audit,
    Audited,
    Enter,
    Entered,
    EntryCosts,
    Forget,
    Gate,
    GuardianAudit,
    Heartbeat,
    Leave,
    Left,
    Message,
    Ready,
    SiblingReport,
    Spare,
    Spared,
    StartLease,
    ToGuardian,
    Undone,
    Waits,
    Warned,
    Watch,
)
from krex_jupyter.wire import Assembler, WireError, close_all, guardian_side, receive_packet
from krex_jupyter.workers import Workers

from .cpus import keep_off, restore
from .driver_lock import DriverLock, load, meaning
from .freezer import resume, wait_running
from .gates import LOCK_S, RC_GONE, RC_NO_CONTEXT, RC_NOT_READY, RC_OK, RC_STOPPED, Gated, Gates
from .journal import Journal
from .plan import ProcessView, Request, Root, Step, plan
from .processes import ProcessHandle
from .scanner import Scanner

_JOURNAL_WAIT_S = 10.0
_REPLAY_UNLOCK_S = 3.0
_OWED_S = 0.2
"""How often to look whether a process that could not be unlocked, because somebody had stopped it, runs again."""
_SCAN_BUSY_S = 1.0
_SCAN_IDLE_S = 5.0
_BUSY_FOR_S = 60.0
_CHAIN_FOR_S = 1.0
"""How long an owner's chain of ancestors is taken as known."""
_MAX_CHAINS = 1000
_WAITER_SHARE = 0.02
_WAITER_FLOOR_S = 0.005
"""A waiter that used more than this much CPU, and more than this share of a core, since it began to wait is frozen
like anybody else. The floor is what going to sleep itself takes."""
_WAITER_OBSERVED_S = 0.02
"""Over a shorter time CPU use says little: then no thread of the waiter may be runnable, either."""


@dataclass(eq=False, slots=True)
class _Participant:
    """A watched process."""

    watch: Watch
    handle: ProcessHandle
    waits_since_s: float = float("inf")
    waits_cpu_ns: int = 0


@dataclass(eq=False, slots=True)
class _Region:
    """A region from its `Enter` to its end."""

    enter: Enter
    owner_pidfd: int
    started_s: float
    steps: dict[int, Step] = field(default_factory=dict)
    pending: int = 0
    """Driver calls that must return before the region can go on."""
    entered: bool = False
    lease_ends_s: float = float("inf")
    lock_s: float = 0.0
    reports: dict[int, SiblingReport] = field(default_factory=dict)
    late: list[SiblingReport] = field(default_factory=list)
    baseline_ns: dict[int, dict[int, int]] = field(default_factory=dict)
    """CPU time per thread of every process that stands still, read once it stood."""
    observed_ns: dict[int, int] = field(default_factory=dict)
    spared: list[int] = field(default_factory=list)

    @property
    def freezes(self) -> bool:
        return self.enter.cpu_policy == "freeze"


class Guardian:
    """Regions and reactions; `run` is the loop around them."""

    def __init__(self, link: socket.socket, journal: Journal, driver: DriverLock) -> None:
        self._link = link
        self._journal = journal
        self._codec = guardian_side()
        self._assembler = Assembler(1 << 24)
        self._selector = selectors.DefaultSelector()
        self._workers = Workers()
        self._scanner = Scanner()
        self._gates = Gates(journal, driver, self._workers, self._scanner, self._warn, self._beat)
        self._participants: dict[int, _Participant] = {}
        self._regions: dict[str, _Region] = {}
        self._chains: dict[int, tuple[float, dict[int, ProcessView]]] = {}
        self._next_scan_s = 0.0
        self._last_region_s = float("-inf")
        self._heard_s = time.monotonic()
        self._beat_s = 0.0
        self._beats = 0
        self._leaving = False

    # --- Loop ------------------------------------------------------------------------------------------------

    def run(self, replayed: int) -> None:
        """Serve until the coordinator is gone; then undo everything."""
        self._selector.register(self._link, selectors.EVENT_READ, self._on_link)
        self._selector.register(self._workers.fd, selectors.EVENT_READ, self._workers.run_posted)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        for process in self._journal.outstanding().locked:
            pidfd = open_same(process)
            if pidfd is not None:
                self._gates.owe_unlock(ProcessHandle(process.pid, pidfd))
        self._send(Ready(pid=os.getpid(), replayed=replayed))
        try:
            while not self._leaving:
                ready = self._selector.select(self._wait_s())
                for key, _ in ready:
                    key.data()
                self._on_time()
                if not ready and self._scanner.scanning:
                    self._scanner.advance()
        finally:
            self._undo_everything()

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._leaving = True
        # Python resumes the selector's wait after a handler that raises nothing, so it has to be woken.
        self._workers.post(lambda: None)

    def _wait_s(self) -> float:
        if self._scanner.scanning:
            return 0.0
        now_s = time.monotonic()
        times_s = [now_s + (_OWED_S if self._gates.owes_unlocks else 5.0)]
        if self._participants:
            times_s.append(max(self._next_scan_s, now_s + HEARTBEAT_S if self._measuring() else 0.0))
        if self._regions:
            times_s += [self._beat_s + HEARTBEAT_S, self._heard_s + LATE_S]
            times_s += [region.lease_ends_s for region in self._regions.values()]
        return max(min(times_s) - now_s, 0.0)

    def _on_time(self) -> None:
        now_s = time.monotonic()
        if self._regions:
            self._beat()
            self._gates.give_up_on_silent()
            if now_s - self._heard_s > LATE_S:
                # Its messages may lie unread here because this process itself was held up.
                self._on_link()
            if now_s - self._heard_s > LATE_S:
                late_s = now_s - self._heard_s
                self._heard_s = now_s
                for region in list(self._regions.values()):
                    self._undo(
                        region, "coordinator_late", f"the coordinator was not heard for {late_s:.1f} s"
                    )
            for region in list(self._regions.values()):
                if region.lease_ends_s <= now_s:
                    self._undo(
                        region, "max_hold", f"it was held longer than max_hold={region.enter.max_hold_s:g} s"
                    )
        if self._gates.owes_unlocks:
            self._gates.unlock_what_runs()
        if self._participants and now_s >= self._next_scan_s and not self._measuring():
            self._scanner.start()
            busy = now_s - self._last_region_s < _BUSY_FOR_S
            self._next_scan_s = now_s + (_SCAN_BUSY_S if busy else _SCAN_IDLE_S)

    def _measuring(self) -> bool:
        """A freezing region is held: a scan would take CPU time from the very core that it keeps free."""
        return any(region.freezes for region in self._regions.values())

    def _beat(self) -> None:
        """Show the coordinator that this process runs; also called from within waits."""
        now_s = time.monotonic()
        if now_s - self._beat_s >= HEARTBEAT_S:
            self._beat_s = now_s
            self._beats += 1
            self._send(Heartbeat(count=self._beats))

    def _warn(self, detail: str) -> None:
        self._send(Warned(detail=detail))

    def _send(self, message: Message) -> None:
        for packet in self._codec.packets(message):
            try:
                self._link.send(packet)
            except BlockingIOError:
                # The coordinator does not read: it is stopped, which the clock notices.
                return
            except OSError:
                self._leaving = True
                return

    def _on_link(self) -> None:
        while not self._leaving:
            try:
                packet, fds = receive_packet(self._link, descriptors=True)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet, fds = b"", []
            if not packet:
                self._leaving = True
                return
            self._heard_s = time.monotonic()
            body = self._assembler.feed(packet)
            if body is None:
                close_all(fds)
            else:
                self._handle(self._codec.decode(body), fds)

    def _handle(self, message: ToGuardian, fds: list[int]) -> None:
        match message:
            case Watch():
                self._watch(message, fds)
            case Waits():
                self._note_waiting(message)
            case Forget():
                self._forget(message)
            case Enter():
                self._enter(message)
            case StartLease():
                region = self._regions.get(message.region_id)
                if region is not None and region.enter.max_hold_s > 0:
                    region.lease_ends_s = time.monotonic() + region.enter.max_hold_s
            case Audit():
                self._audit(message.region_id)
            case Leave():
                region = self._regions.get(message.region_id)
                if region is not None:
                    self._drop(region)
                self._send(Left(region_id=message.region_id))
            case Spare():
                self._spare(message)
            case Heartbeat():
                pass

    # --- Participants ------------------------------------------------------------------------------------------

    def _watch(self, watch: Watch, fds: list[int]) -> None:
        if len(fds) != 1:
            close_all(fds)
            raise WireError("a participant comes with exactly one pidfd")
        pid = watch.process.pid
        try:
            handle = ProcessHandle(pid, fds[0])
        except ProcessLookupError:
            return
        if handle.process != watch.process:
            handle.close()
            return
        self._participants[pid] = _Participant(watch, handle)
        self._scanner.add_root(handle)
        if watch.cores:
            # Once, and never per region: `cpus.py` says why.
            keep_off(pid, watch.cores)
            keep_off(os.getpid(), watch.cores)
        self._next_scan_s = min(self._next_scan_s, time.monotonic() + 2 * HEARTBEAT_S)
        for region in self._regions.values():
            if region.entered and region.freezes:
                self._gate_late(region, watch, handle)

    def _gate_late(self, region: _Region, watch: Watch, handle: ProcessHandle) -> None:
        """Who appears while others stand frozen waits like them: its start-up would disturb the region."""
        view = handle.view(gpu=False)
        if view is None or watch.process == region.enter.owner:
            return
        processes = self._chain(region.enter.owner.pid) | self._shells_of(view) | {view.pid: view}
        request = self._request(region.enter, driver_lock=False)
        steps = plan(request, [Root(pid=view.pid, uid=watch.uid)], processes)
        region.steps.update({step.pid: step for step in steps})
        self._freeze(region, [step for step in steps if step.freeze == "yes"])
        for step in steps:
            self._take_baseline(region, step)
            region.late.append(region.reports.get(step.pid) or self._report(region, step))

    def _note_waiting(self, message: Waits) -> None:
        participant = self._participants.get(message.process.pid)
        if participant is not None:
            participant.waits_since_s = time.monotonic()
            participant.waits_cpu_ns = sum(participant.handle.cpu_ns().values())

    def _truly_waits(self, participant: _Participant) -> bool:
        """Whether a process that is blocked in our client really uses no CPU."""
        waited_s = time.monotonic() - participant.waits_since_s
        if waited_s < _WAITER_OBSERVED_S and participant.handle.threads_in("RD"):
            return False
        used_s = (sum(participant.handle.cpu_ns().values()) - participant.waits_cpu_ns) / 1e9
        return used_s <= max(_WAITER_SHARE * waited_s, _WAITER_FLOOR_S)

    def _forget(self, message: Forget) -> None:
        participant = self._participants.get(message.process.pid)
        if participant is None or participant.watch.process != message.process:
            return
        self._gates.free(self._gates.of_root(message.process.pid))
        self._give_back_cores(participant)
        del self._participants[message.process.pid]
        self._scanner.remove_root(message.process.pid)

    def _give_back_cores(self, participant: _Participant) -> None:
        if participant.watch.cores and participant.handle.stat() is not None:
            restore(participant.watch.process.pid, participant.watch.cores)

    # --- Entering ------------------------------------------------------------------------------------------------

    def _enter(self, enter: Enter) -> None:
        self._last_region_s = time.monotonic()
        participant = self._participants.get(enter.owner.pid)
        known = participant is not None and participant.watch.process == enter.owner
        owner_pidfd = (
            os.dup(participant.handle.pidfd) if participant is not None and known else open_same(enter.owner)
        )
        if owner_pidfd is None:
            self._refuse(enter.region_id, f"its owner (pid {enter.owner.pid}) is gone")
            return
        region = _Region(enter, owner_pidfd, time.monotonic())
        self._regions[enter.region_id] = region
        self._selector.register(owner_pidfd, selectors.EVENT_READ, lambda: self._owner_gone(region))
        self._beat()
        # The owner may stand gated for the region before: it must run before anything is granted to it.
        # One pending for that, and one for this method itself, so that nothing goes on before the plan is made.
        region.pending = 2
        self._gates.free(self._gates.of_root(enter.owner.pid), then=lambda: self._one_less(region))
        try:
            self._lock(region, self._plan(enter))
            if enter.vendor != "cpu" and self._scanner.discover_all():
                # Born since the last scan, and looked for while the others' locks are under way. Where nothing is
                # locked, freezing finds the newborn.
                self._lock(region, self._plan(enter))
        except OSError as error:
            self._fail_entry(region, error)
            return
        self._one_less(region)

    def _plan(self, enter: Enter) -> tuple[Step, ...]:
        roots: list[Root] = []
        for sibling in enter.siblings:
            participant = self._participants.get(sibling.process.pid)
            if participant is None or participant.watch.process != sibling.process:
                continue
            roots.append(
                Root(
                    pid=sibling.process.pid,
                    uid=participant.watch.uid,
                    holds_region=sibling.holds_region,
                    waiting=sibling.waiting and self._truly_waits(participant),
                    counts=sibling.counts,
                    contexts=None if sibling.contexts is None else frozenset(sibling.contexts),
                )
            )
        processes = self._chain(enter.owner.pid)
        for pid, handle in list(self._scanner.handles.items()):
            view = handle.view(gpu=enter.vendor != "cpu", stopping=enter.cpu_policy == "freeze")
            if view is None:
                self._scanner.forget_gone(pid)
                continue
            gated = self._gates.get(pid)
            if gated is not None and gated.frozen:
                view = view.running()
            processes[pid] = view
            for shell_pid, shell in self._shells_of(view).items():
                processes.setdefault(shell_pid, shell)
        return plan(self._request(enter, driver_lock=enter.driver_lock), roots, processes)

    def _request(self, enter: Enter, *, driver_lock: bool) -> Request:
        watched = (p.watch.process.pid for p in self._participants.values() if p.watch.protected)
        return Request(
            owner=enter.owner.pid,
            devices=enter.devices,
            vendor=enter.vendor,
            cpu_policy=enter.cpu_policy,
            driver_lock=driver_lock,
            protected=frozenset({os.getpid(), os.getppid(), *watched}),
            peers=frozenset(enter.peers),
        )

    def _chain(self, pid: int) -> dict[int, ProcessView]:
        """``pid`` and its ancestors; only who is whose parent matters of them."""
        now_s = time.monotonic()
        made_s, known = self._chains.get(pid, (float("-inf"), {}))
        if now_s - made_s < _CHAIN_FOR_S:
            return dict(known)
        asked = pid
        chain: dict[int, ProcessView] = {}
        while pid > 1 and pid not in chain:
            stat = read_stat(pid)
            if stat is None:
                break
            chain[pid] = ProcessView(pid=pid, parent=stat.parent, session=stat.session, uids=())
            pid = stat.parent
        if len(self._chains) > _MAX_CHAINS:
            self._chains.clear()
        self._chains[asked] = (now_s, dict(chain))
        return chain

    def _shells_of(self, view: ProcessView) -> dict[int, ProcessView]:
        """The ancestors of a process in a terminal's foreground, up to its session's leader; empty for others."""
        shells: dict[int, ProcessView] = {}
        if not view.foreground or view.session == view.pid:
            return shells
        pid = view.parent
        while pid > 1 and pid not in shells:
            shell = self._look_at(pid)
            if shell is None or shell.session != view.session:
                break
            shells[pid] = shell
            pid = shell.parent
        leader = None if view.session in shells else self._look_at(view.session)
        return shells if leader is None else {**shells, leader.pid: leader}

    def _look_at(self, pid: int) -> ProcessView | None:
        """A process that nobody follows, as of now."""
        try:
            handle = ProcessHandle.open(pid)
        except ProcessLookupError:
            return None
        view = handle.view(gpu=False)
        handle.close()
        gated = self._gates.get(pid)
        return view.running() if view is not None and gated is not None and gated.frozen else view

    def _lock(self, region: _Region, steps: tuple[Step, ...]) -> None:
        """Take up the steps that are new to the region, and begin to lock those that are to be locked."""
        wanted: list[Gated] = []
        for step in steps:
            if step.pid in region.steps:
                continue
            region.steps[step.pid] = step
            gated = self._gates.hold(step.pid, region.enter.region_id) if step.lock else None
            if gated is None:
                continue
            if gated.locked:
                region.reports[step.pid] = self._report(region, step, drain_s=0.0)
            else:
                wanted.append(gated)
        if wanted:
            region.pending += len(wanted)
            self._gates.lock(
                wanted,
                region.enter.region_id,
                lambda gated, rc, drain_s: self._on_lock(region, gated, rc, drain_s),
            )

    def _on_lock(self, region: _Region, gated: Gated, rc: int, drain_s: float) -> None:
        if self._regions.get(region.enter.region_id) is region:
            region.lock_s = time.monotonic() - region.started_s
            step = region.steps[gated.handle.pid]
            if rc == RC_OK:
                region.reports[step.pid] = self._report(region, step, drain_s=drain_s)
            else:
                self._lock_refused(region, gated, step, rc)
        self._one_less(region)

    def _lock_refused(self, region: _Region, gated: Gated, step: Step, rc: int) -> None:
        pid = step.pid
        if rc == RC_STOPPED:
            # Whoever stopped it may continue it, and nobody else: so it is not frozen, either.
            step = region.steps[pid] = replace(step, gate="observe", lock=False, freeze="no")
        will_freeze = step.freeze == "yes" or (step.freeze == "without_context" and rc == RC_NO_CONTEXT)
        if not will_freeze:
            self._gates.drop(gated, region.enter.region_id)
        if rc == RC_GONE:
            region.steps.pop(pid, None)
            return
        if rc == RC_NO_CONTEXT:
            # Nothing of it can be in flight; whether it is frozen for that is the step's to say.
            if step.freeze == "no":
                region.reports[pid] = SiblingReport(pid=pid, label=self._label(step), gate="observe")
            return
        if rc == RC_STOPPED:
            error = "it was stopped by somebody else when it was to be locked"
        elif rc == RC_NOT_READY:
            error = f"its submitted work was not done within {LOCK_S:g} s"
        else:
            error = meaning(rc)
        region.reports[pid] = SiblingReport(pid=pid, label=self._label(step), gate="observe", error=error)

    def _one_less(self, region: _Region) -> None:
        """Something that the entry waits for is done."""
        region.pending -= 1
        if region.pending or region.entered or self._regions.get(region.enter.region_id) is not region:
            return
        started_s = time.monotonic()
        to_freeze = [
            step
            for step in region.steps.values()
            if step.freeze == "yes" or (step.freeze == "without_context" and step.pid not in region.reports)
        ]
        # Another region may be about to lock one of them, and a stopped process would not answer.
        region.pending = self._gates.after_locks(
            [step.pid for step in to_freeze], lambda *_: self._one_less(region)
        )
        if region.pending:
            return
        try:
            verify_s = self._freeze(region, to_freeze)
        except OSError as error:
            self._fail_entry(region, error)
            return
        for step in list(region.steps.values()):
            self._take_baseline(region, step)
            region.reports.setdefault(step.pid, self._report(region, step))
        region.entered = True
        self._send(
            Entered(
                region_id=region.enter.region_id,
                siblings=tuple(region.reports.values()),
                costs=EntryCosts(
                    lock_s=region.lock_s,
                    freeze_s=time.monotonic() - started_s - verify_s,
                    verify_s=verify_s,
                ),
            )
        )

    def _freeze(self, region: _Region, steps: list[Step]) -> float:
        """Freeze what ``steps`` name and what it bears; returns the seconds spent on proving it."""
        region_id = region.enter.region_id
        wanted: list[Gated] = []
        for step in steps:
            gated = self._gates.hold(step.pid, region_id)
            if gated is None:
                region.steps.pop(step.pid, None)
            else:
                wanted.append(gated)
        if not wanted:
            return 0.0

        def adopt(handle: ProcessHandle) -> bool:
            """A child born after the plan was made follows its participant, by the same rules."""
            root = self._scanner.member_of.get(handle.pid, 0)
            participant = self._participants.get(root)
            view = handle.view(gpu=False)
            if participant is None or view is None:
                return False
            root_view = ProcessView(pid=root, parent=0, session=root, uids=view.uids)
            child = replace(view, parent=root)
            planned = plan(
                self._request(region.enter, driver_lock=False),
                [Root(pid=root, uid=participant.watch.uid)],
                {root: root_view, child.pid: child},
            )
            for step in planned:
                if step.pid == handle.pid:
                    region.steps[step.pid] = step
                    return step.freeze == "yes"
            return False

        shells = [step.pid for step in steps if step.first]
        refused, verify_s = self._gates.freeze(wanted, region_id, adopt, shells)
        for gated, why in refused:
            pid = gated.handle.pid
            step = region.steps[pid]
            if not gated.locked:
                self._gates.drop(gated, region_id)
            region.reports[pid] = SiblingReport(pid=pid, label=self._label(step), gate="observe", error=why)
        unfrozen = {gated.handle.pid for gated, _ in refused}
        for step in list(region.steps.values()):
            known = self._gates.get(step.pid)
            if step.pid in unfrozen or known is None or not known.frozen:
                continue
            before = region.reports.get(step.pid)
            if before is None or not before.error:
                region.reports[step.pid] = self._report(
                    region, step, drain_s=None if before is None else before.drain_s
                )
            else:
                # It stands still, but what it had submitted was not seen to end.
                region.reports[step.pid] = SiblingReport(
                    pid=step.pid, label=before.label, gate="observe", frozen=True, error=before.error
                )
        return verify_s

    def _take_baseline(self, region: _Region, step: Step) -> None:
        gated = self._gates.get(step.pid)
        handle = self._scanner.handles.get(step.pid)
        if gated is not None and gated.frozen and region.enter.region_id in gated.regions:
            region.baseline_ns[step.pid] = gated.handle.cpu_ns()
        elif handle is not None and (region.freezes or step.gate == "observe"):
            region.observed_ns[step.pid] = sum(handle.cpu_ns().values())

    def _fail_entry(self, region: _Region, error: OSError) -> None:
        self._drop(region)
        self._refuse(
            region.enter.region_id,
            f"the journal cannot be written ({error}); nothing may be gated without it",
        )

    def _refuse(self, region_id: str, why: str) -> None:
        self._send(Entered(region_id=region_id, siblings=(), costs=EntryCosts(), error=why))

    def _report(self, region: _Region, step: Step, drain_s: float | None = None) -> SiblingReport:
        gated = self._gates.get(step.pid)
        # What only another region gates may go on at any moment.
        ours = gated is not None and region.enter.region_id in gated.regions
        locked = gated is not None and ours and gated.locked
        frozen = gated is not None and ours and gated.frozen
        gate: Gate = "driver-lock" if locked else "freeze" if frozen else "observe"
        return SiblingReport(
            pid=step.pid,
            label=self._label(step),
            gate=gate,
            frozen=frozen,
            drain_s=drain_s if locked else None,
            error=step.reason if gate == "observe" else "",
        )

    def _label(self, step: Step) -> str:
        participant = self._participants.get(step.root)
        return participant.watch.label if participant is not None else ""

    # --- Leaving and undoing ---------------------------------------------------------------------------------------

    def _audit(self, region_id: str) -> None:
        """Read what the siblings did while they should have done nothing, and answer."""
        region = self._regions.get(region_id)
        if region is None:
            self._send(Audited(region_id=region_id, audit=GuardianAudit()))
            return
        locked = [
            gated
            for pid, report in region.reports.items()
            if report.gate == "driver-lock"
            and not report.frozen
            and pid not in region.spared
            and (gated := self._gates.get(pid)) is not None
        ]

        def answer(unlocked: list[int]) -> None:
            self._send(Audited(region_id=region_id, audit=self._seen(region, unlocked)))

        self._gates.find_unlocked(locked, answer)

    def _seen(self, region: _Region, unlocked: list[int]) -> GuardianAudit:
        """The audit, given which of the locked processes are not locked any more."""
        ran: list[tuple[int, float]] = []
        unreadable: list[int] = []
        threads = 0
        for pid, before in region.baseline_ns.items():
            if pid in region.spared:
                continue
            gated = self._gates.get(pid)
            now = {} if gated is None else gated.handle.cpu_ns()
            threads += len(now)
            if not now and read_stat(pid) is not None:
                unreadable.append(pid)
            used_ns = sum(spent - before.get(tid, 0) for tid, spent in now.items())
            if used_ns:
                ran.append((pid, used_ns / 1e9))
        observed: dict[int, float] = {}
        for pid, before_ns in region.observed_ns.items():
            handle = self._scanner.handles.get(pid)
            if handle is not None:
                observed[pid] = max(sum(handle.cpu_ns().values()) - before_ns, 0) / 1e9
        return GuardianAudit(
            frozen_threads=threads,
            ran=tuple(ran),
            unreadable=tuple(unreadable),
            unlocked=tuple(unlocked),
            observed_cpu_s=observed,
            released_for_signal=tuple(region.spared),
            joined_late=tuple(region.late),
        )

    def _owner_gone(self, region: _Region) -> None:
        if self._regions.get(region.enter.region_id) is region:
            self._undo(region, "owner_died", f"its owner (pid {region.enter.owner.pid}) is gone")

    def _undo(
        self, region: _Region, code: Literal["max_hold", "owner_died", "coordinator_late"], detail: str
    ) -> None:
        """End a region unasked."""
        self._drop(region)
        self._send(Undone(region_id=region.enter.region_id, code=code, detail=detail))
        if not region.entered:
            self._refuse(region.enter.region_id, detail)

    def _drop(self, region: _Region) -> None:
        """Nothing is gated for ``region`` any more, and it is forgotten."""
        if self._regions.pop(region.enter.region_id, None) is None:
            return
        self._selector.unregister(region.owner_pidfd)
        os.close(region.owner_pidfd)
        self._gates.release(region.enter.region_id)

    def _spare(self, message: Spare) -> None:
        wanted = self._gates.of_root(message.pid)
        regions = sorted({region_id for gated in wanted for region_id in gated.regions})
        for region_id in regions:
            region = self._regions.get(region_id)
            if region is not None:
                region.spared += [gated.handle.pid for gated in wanted if region_id in gated.regions]
        self._gates.free(wanted, then=lambda: self._send(Spared(pid=message.pid, regions=tuple(regions))))

    def _undo_everything(self) -> None:
        """Thaw at once, then wait, bounded, for the unlocks."""
        for region in list(self._regions.values()):
            self._drop(region)
        for participant in self._participants.values():
            self._give_back_cores(participant)
        give_up_s = time.monotonic() + _REPLAY_UNLOCK_S
        while not self._gates.empty and time.monotonic() < give_up_s:
            with selectors.DefaultSelector() as selector:
                selector.register(self._workers.fd, selectors.EVENT_READ)
                selector.select(0.1)
            self._workers.run_posted()


def replay(journal: Journal, driver: DriverLock) -> int:
    """Set free what a previous guardian left gated; returns how many processes that were.

    All are continued first. Unlocking talks to the driver and can hang, so it is waited for only so long.
    """
    left = journal.outstanding()
    frozen = [
        ProcessHandle(process.pid, fd) for process in left.frozen if (fd := open_same(process)) is not None
    ]
    locked = [
        ProcessHandle(process.pid, fd) for process in left.locked if (fd := open_same(process)) is not None
    ]
    for handle in frozen:
        resume(handle)
    wait_running(frozen, 1.0)
    # What stands still now was stopped by somebody else. It cannot be unlocked, and stays in the journal for it.
    left_locked = [
        handle.process for handle in locked if (stat := handle.stat()) is not None and stat.stopped
    ]

    def unlock() -> None:
        for handle in locked:
            if handle.process not in left_locked and driver.state(handle.pid) == (RC_OK, 1):
                driver.unlock(handle.pid)

    if locked:
        thread = threading.Thread(target=unlock, daemon=True)
        thread.start()
        thread.join(_REPLAY_UNLOCK_S)
        if thread.is_alive():
            # Leave the journal as it is: whoever comes next, or `krex thaw`, tries again.
            return len({handle.pid for handle in [*frozen, *locked]})
    journal.clear()
    if left_locked:
        journal.write("lock", "intent", left_locked)
    count = len({handle.pid for handle in [*frozen, *locked]})
    for handle in [*frozen, *locked]:
        handle.close()
    return count


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="krex-guardian")
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--driver", default="", help="'module:Class:argument' in place of libcuda, for tests")
    arguments = parser.parse_args()
    link = socket.socket(fileno=arguments.link_fd)
    link.setblocking(False)
    journal = Journal(arguments.journal)
    give_up_s = time.monotonic() + _JOURNAL_WAIT_S
    while not journal.try_lock():
        if time.monotonic() > give_up_s:
            sys.exit(f"another guardian still holds {arguments.journal} after {_JOURNAL_WAIT_S:g} s")
        time.sleep(0.005)
    driver = load(arguments.driver)
    with contextlib.suppress(KeyboardInterrupt):
        Guardian(link, journal, driver).run(replay(journal, driver))
    # Worker threads may hang in driver calls; nothing is left to clean up.
    os._exit(0)


if __name__ == "__main__":
    main()
