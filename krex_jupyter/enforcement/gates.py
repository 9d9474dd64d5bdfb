"""Doing and undoing: which processes are locked or frozen now, and for which regions.

The order per process is forced by two facts about the driver and the kernel:

    lock  →  freeze  →  …  →  thaw  →  unlock

* A lock is answered by the driver's own thread inside the sibling. A stopped process cannot answer, and the call
  then hangs past its time-out. So nothing is locked or unlocked while it stands still.
* The lock returns once the sibling's submitted work is done, and blocks what comes after. Freezing first would
  leave queued kernels running behind a process that looks quiet.

A process stays gated as long as any region gates it (`Gated.regions`). At a hand-off the next region enters
before the last one leaves, so siblings of both are not touched at all and only the owners change places.

Driver calls block, so they run on worker threads; every record belongs to the main thread. Calls for one process
are serialised by its ``turn``, because an unlock may still be under way when the next region wants the lock.

This module knows no leases, owners or messages: that is `guardian.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from krex_jupyter.protocol import ProcessRef
from krex_jupyter.workers import Workers

from .driver_lock import DriverLock, meaning
from .freezer import freeze, resume, wait_running
from .journal import Act, Journal, State
from .processes import ProcessHandle
from .scanner import Scanner

LOCK_S = 5.0
"""Longest wait for a sibling's submitted work to finish."""
FREEZE_S = 0.5
VERIFY_S = 0.2

_SILENT_S = LOCK_S + 1.0
"""A lock call that has not returned by then, whatever its time-out, is not waited for any longer."""
_SLICE_S = 0.4
"""One lock call. An abandoned region waits for the end of a slice only, and its siblings are free within 1 s."""

_LOCKED = 1
"""The driver's state of a locked process."""

RC_OK = 0
RC_NO_CONTEXT = 3
RC_GONE = 304
RC_NOT_AS_EXPECTED = 401
RC_NOT_READY = 600
RC_STOPPED = -1
"""Ours, not the driver's: the process is stopped, so that the call was not made, or cannot return."""

Locked = Callable[["Gated", int, float], None]
"""Called with the process, the driver's answer and the seconds that took."""


@dataclass(eq=False, slots=True)
class Gated:
    """A process that something is, or is about to be, done to."""

    handle: ProcessHandle
    regions: set[str] = field(default_factory=set)
    locked: bool = False
    frozen: bool = False
    shell: int = 0
    """Not 0 for a terminal's shell: stopped before its jobs, and continued after them, so that it never sees one
    stopped. A shell that is another one's job has the larger number."""
    calls: int = 0
    """Driver calls under way or queued."""
    waiting: list[Locked] = field(default_factory=list)
    """Who wants to know when the lock call under way returns."""
    asked_s: float = 0.0
    """When the lock that they wait for was asked for."""
    turn: threading.Lock = field(default_factory=threading.Lock)


class Gates:
    """Every gated process of this guardian."""

    def __init__(
        self,
        journal: Journal,
        driver: DriverLock,
        workers: Workers,
        scanner: Scanner,
        warn: Callable[[str], None],
        beat: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._driver = driver
        self._workers = workers
        self._scanner = scanner
        self._warn = warn
        self._beat = beat
        self._gated: dict[int, Gated] = {}

    @property
    def empty(self) -> bool:
        """Nothing is gated, and no driver call is under way."""
        return not self._gated

    def get(self, pid: int) -> Gated | None:
        """The record of a gated process."""
        return self._gated.get(pid)

    def of_root(self, root: int) -> list[Gated]:
        """Gated members of a participant, itself included."""
        return [
            gated
            for pid, gated in self._gated.items()
            if pid == root or self._scanner.member_of.get(pid) == root
        ]

    def hold(self, pid: int, region_id: str) -> Gated | None:
        """The record of ``pid``, now wanted by the region; None where the process is gone."""
        gated = self._gated.get(pid)
        if gated is None:
            known = self._scanner.handles.get(pid)
            try:
                # Shared, since the scanner may drop it while the process is gated.
                handle = ProcessHandle.open(pid) if known is None else known.share()
            except ProcessLookupError:
                return None
            gated = self._gated[pid] = Gated(handle)
        gated.regions.add(region_id)
        return gated

    # --- Doing -----------------------------------------------------------------------------------------------

    def lock(self, wanted: list[Gated], region_id: str, done: Locked) -> None:
        """Lock processes in parallel; ``done`` is called for each, later, on the main thread.

        Raises `OSError` where the journal cannot be written; then nothing was done.
        """
        self._journal.write("lock", "intent", [gated.handle.process for gated in wanted], region_id)
        # Nothing is locked while it stands still: what another region froze runs for the moment of the lock.
        self._thaw([gated for gated in wanted if gated.frozen])
        for gated in wanted:
            gated.waiting.append(done)
            if len(gated.waiting) == 1:
                gated.asked_s = time.monotonic()
                self._call(gated, self._lock_one)

    def after_locks(self, pids: Iterable[int], done: Locked) -> int:
        """Call ``done`` for each of the processes that is being locked, as `lock` does; returns how many that are."""
        locking = [gated for pid in pids if (gated := self._gated.get(pid)) is not None and gated.waiting]
        for gated in locking:
            gated.waiting.append(done)
        return len(locking)

    def give_up_on_silent(self) -> None:
        """Answer in place of lock calls that hang, because somebody has stopped the process since or otherwise.

        What such a call returns in the end is undone then, unless a region wants it by that time.
        """
        now_s = time.monotonic()
        for gated in [gated for gated in self._gated.values() if gated.waiting]:
            stopped = _is_stopped(gated)
            if stopped or now_s - gated.asked_s > _SILENT_S:
                waiting, gated.waiting = gated.waiting, []
                for done in waiting:
                    done(gated, RC_STOPPED if stopped else RC_NOT_READY, now_s - gated.asked_s)

    def freeze(
        self,
        wanted: list[Gated],
        region_id: str,
        adopt: Callable[[ProcessHandle], bool],
        first: Sequence[int] = (),
    ) -> tuple[list[tuple[Gated, str]], float]:
        """Freeze processes and what they bear meanwhile.

        Returns the refused ones with the reason, and the seconds spent on proving that the others stand still.
        ``adopt`` is asked for every newborn process whether it is to be frozen too. ``first`` are the pids of those
        of ``wanted`` that must stand, in this order, before the others are stopped, and go on after them.

        Raises `OSError` where the journal cannot be written; what was frozen before that is undone by releasing the
        region.
        """

        def announce(handles: list[ProcessHandle]) -> None:
            self._journal.write("freeze", "intent", [handle.process for handle in handles], region_id)
            for handle in handles:
                gated = self.hold(handle.pid, region_id)
                if gated is not None:
                    gated.frozen = True

        def newborn(parents: list[ProcessHandle]) -> list[ProcessHandle]:
            return [handle for handle in self._scanner.discover(parents) if adopt(handle)]

        for gated in wanted:
            if gated.handle.pid in first:
                gated.shell = 1 + first.index(gated.handle.pid)
        running = [gated for gated in wanted if not gated.frozen]
        result = freeze(
            [gated.handle for gated in running if not gated.shell],
            first=[gated.handle for gated in sorted(running, key=_shell) if gated.shell],
            announce=announce,
            newborn=newborn,
            freeze_s=FREEZE_S,
            verify_s=VERIFY_S,
            beat=self._beat,
        )
        refused: list[tuple[Gated, str]] = []
        for handle, why in result.refused:
            held = self.hold(handle.pid, region_id)
            if held is not None:
                held.frozen = False
                refused.append((held, why))
        if refused:
            self._note("freeze", "undone", [gated.handle.process for gated, _ in refused])
        return refused, result.verify_s

    def _lock_one(self, gated: Gated) -> Callable[[], None]:
        """On a worker: lock one process, in slices, until done, refused, late, or wanted by nobody."""
        started_s = time.monotonic()
        rc = RC_NOT_READY
        while rc == RC_NOT_READY and gated.regions:
            left_s = LOCK_S - (time.monotonic() - started_s)
            if left_s <= 0:
                break
            stat = gated.handle.stat()
            if stat is None:
                rc = RC_GONE
            elif stat.stopped:
                rc = RC_STOPPED
            else:
                rc = self._driver.lock(gated.handle.pid, min(left_s, _SLICE_S))
        drain_s = time.monotonic() - started_s
        return lambda: self._on_locked(gated, rc, drain_s)

    def _on_locked(self, gated: Gated, rc: int, drain_s: float) -> None:
        if rc == RC_NOT_READY and drain_s < LOCK_S and gated.regions:
            # It had given up because nobody wanted it any more; meanwhile another region does.
            self._call(gated, self._lock_one)
            return
        if rc == RC_NOT_AS_EXPECTED and gated.locked:
            # An earlier call, which had been given up, came through first.
            rc = RC_OK
        waiting, gated.waiting = gated.waiting, []
        gated.locked = rc == RC_OK
        if rc != RC_OK:
            self._note("lock", "failed", [gated.handle.process])
        for done in waiting:
            done(gated, rc, drain_s)
        if not gated.regions:
            self.free([gated])

    # --- Undoing -----------------------------------------------------------------------------------------------

    def release(self, region_id: str) -> None:
        """The region gates nobody any more; what no other region gates goes on."""
        freed: list[Gated] = []
        for gated in self._gated.values():
            if region_id in gated.regions:
                gated.regions.discard(region_id)
                if not gated.regions:
                    freed.append(gated)
        self.free(freed)

    def drop(self, gated: Gated, region_id: str) -> None:
        """One process is not gated for one region any more."""
        gated.regions.discard(region_id)
        if not gated.regions:
            self.free([gated])

    def free(self, wanted: list[Gated], then: Callable[[], None] = lambda: None) -> None:
        """Thaw, see running, then unlock, whatever regions they were gated for.

        ``then`` is called once they all run freely: at once, or later where a driver call has to return first.
        """
        for gated in wanted:
            gated.regions.clear()
        self._thaw([gated for gated in wanted if gated.frozen])
        # What somebody else has stopped cannot be unlocked now: `unlock_what_runs` does once it goes on.
        locked = [gated for gated in wanted if gated.locked and not _is_stopped(gated)]
        left = len(locked)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                then()

        for gated in locked:
            gated.locked = False
            self._call(gated, lambda gated: self._unlock_one(gated, one_less))
        for gated in wanted:
            self._forget(gated)
        if not locked:
            then()

    def owe_unlock(self, handle: ProcessHandle) -> None:
        """An earlier guardian locked this process and could not unlock it: that is due once it runs."""
        self._gated[handle.pid] = Gated(handle, locked=True)

    def unlock_what_runs(self) -> None:
        """Unlock what nobody gates any more and was stopped by somebody when it was to be unlocked."""
        self.free([g for g in self._gated.values() if self._is_owed(g) and not _is_stopped(g)])

    @property
    def owes_unlocks(self) -> bool:
        """There is something for `unlock_what_runs`, now or later."""
        return any(self._is_owed(gated) for gated in self._gated.values())

    def _is_owed(self, gated: Gated) -> bool:
        return gated.locked and not gated.regions and not gated.calls

    def _thaw(self, frozen: list[Gated]) -> None:
        if not frozen:
            return
        for gated in sorted(frozen, key=lambda gated: (gated.shell > 0, -gated.shell)):
            resume(gated.handle)
            gated.frozen = False
        wait_running([gated.handle for gated in frozen], VERIFY_S)
        self._note("freeze", "undone", [gated.handle.process for gated in frozen])

    def _unlock_one(self, gated: Gated, then: Callable[[], None]) -> Callable[[], None]:
        """On a worker: unlock one process that runs."""
        rc = self._driver.unlock(gated.handle.pid)
        return lambda: self._on_unlocked(gated, rc, then)

    def _on_unlocked(self, gated: Gated, rc: int, then: Callable[[], None]) -> None:
        if rc in (RC_OK, RC_GONE, RC_NOT_AS_EXPECTED, RC_NO_CONTEXT) or gated.handle.stat() is None:
            self._note("lock", "undone", [gated.handle.process])
        else:
            self._warn(f"process {gated.handle.pid} could not be unlocked: {meaning(rc)}. Run: krex thaw")
        then()

    # --- Bookkeeping ---------------------------------------------------------------------------------------------

    def find_unlocked(self, locked: list[Gated], then: Callable[[list[int]], None]) -> None:
        """Ask the driver which of ``locked`` are not locked any more; ``then`` is called once all have answered.

        Like every call of the driver, this one hangs where the process is stopped. What stands still cannot have
        unlocked itself, and a process that is gone disturbs nobody: neither is asked.
        """
        left = len(locked)
        unlocked: list[int] = []

        def one_less() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                then(unlocked)

        def ask(gated: Gated) -> Callable[[], None]:
            stat = gated.handle.stat()
            asked = stat is not None and not stat.stopped
            if asked and self._driver.state(gated.handle.pid) != (RC_OK, _LOCKED):
                unlocked.append(gated.handle.pid)
            return one_less

        for gated in locked:
            self._call(gated, ask)
        if not locked:
            then(unlocked)

    def _call(self, gated: Gated, work: Callable[[Gated], Callable[[], None]]) -> None:
        """Run a driver call for one process on a worker, after those already under way for it."""
        gated.calls += 1

        def on_worker() -> None:
            with gated.turn:
                reaction = work(gated)

            def on_main() -> None:
                gated.calls -= 1
                reaction()
                self._forget(gated)

            self._workers.post(on_main)

        self._workers.submit(on_worker)

    def _forget(self, gated: Gated) -> None:
        """Drop the record of a process that nothing is done to any more."""
        if gated.regions or gated.frozen or gated.locked or gated.calls:
            return
        if self._gated.get(gated.handle.pid) is gated:
            del self._gated[gated.handle.pid]
            gated.handle.close()
        if not self._gated:
            self._journal.clear()

    def _note(self, act: Act, state: State, processes: Iterable[ProcessRef]) -> None:
        """Record what was undone. A failure is harmless: a replay then undoes it once more."""
        try:
            self._journal.write(act, state, processes)
        except OSError as error:
            self._warn(f"the journal cannot be written: {error}")


def _shell(gated: Gated) -> int:
    return gated.shell


def _is_stopped(gated: Gated) -> bool:
    stat = gated.handle.stat()
    return stat is not None and stat.stopped
