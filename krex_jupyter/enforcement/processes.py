"""Reading processes: states, threads, children, CPU time, through descriptors that stay open.

Opening `/proc` files is most of what an entry used to cost (`ENFORCEMENT.md`, Cost), so a `ProcessHandle` keeps
the descriptors of its threads and re-reads them by ``pread``. A vanished process is a normal outcome here: it
reads as None or as an empty set, never as an exception.

Sending signals is `freezer.py`'s; deciding is `plan.py`'s.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from krex_jupyter.identity import STAT_BYTES, Stat, maps_any, parse_stat, read_stat, reference

from .plan import ProcessView

_STATUS_BYTES = 4096


def parse_status(content: bytes) -> tuple[tuple[int, ...], int] | None:
    """((real, effective, saved) uid, pid of its tracer or 0) from `/proc/PID/status`."""
    found: tuple[int, ...] = ()
    tracer = 0
    for line in content.split(b"\n", 12):
        if line.startswith(b"TracerPid:"):
            tracer = int(line[10:])
        elif line.startswith(b"Uid:"):
            found = tuple(int(field) for field in line[4:].split()[:3])
    return (found, tracer) if found else None


def all_pids() -> Iterator[int]:
    """Every pid of this pid namespace, as far as it is visible."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


class _Thread:
    """Open files of one thread."""

    __slots__ = ("children", "schedstat", "stat")

    def __init__(self, pid: int, tid: int) -> None:
        opened: list[int] = []
        try:
            opened.extend(
                os.open(f"/proc/{pid}/task/{tid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                for name in ("stat", "schedstat", "children")
            )
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        self.stat, self.schedstat, self.children = opened

    def close(self) -> None:
        for fd in (self.stat, self.schedstat, self.children):
            with contextlib.suppress(OSError):
                os.close(fd)


class ProcessHandle:
    """A process with its pidfd and the open files of its threads."""

    def __init__(self, pid: int, pidfd: int) -> None:
        """Take over ``pidfd``. Raises `ProcessLookupError` where the process is gone."""
        self.pid = pid
        self.pidfd = pidfd
        self._users = 1
        found = reference(pid, pidfd)
        try:
            if found is None:
                raise ProcessLookupError(f"process {pid} is gone")
            self.process = found
            self._files = [
                os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                for name in ("stat", "status", "task")
            ]
        except OSError as error:
            os.close(pidfd)
            raise ProcessLookupError(f"process {pid} is gone") from error
        self._stat, self._status, self._tasks = self._files
        self._threads: dict[int, _Thread] = {}
        self._uids: tuple[int, ...] = ()
        self._tracer = 0
        self._libcuda = False
        self._libcuda_checked_ns = -1

    @classmethod
    def open(cls, pid: int) -> ProcessHandle:
        """A handle of whatever process has ``pid`` now. Raises `ProcessLookupError` where there is none."""
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError) as error:
            raise ProcessLookupError(f"process {pid} is gone") from error
        return cls(pid, pidfd)

    def share(self) -> ProcessHandle:
        """The same handle for one more user, who closes it too: opening the files is what costs."""
        self._users += 1
        return self

    def close(self) -> None:
        """Close everything, once every user has."""
        self._users -= 1
        if self._users:
            return
        for thread in self._threads.values():
            thread.close()
        self._threads.clear()
        for fd in self._files:
            os.close(fd)
        self._files.clear()
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self._stat = self._status = self._tasks = self.pidfd = -1

    def refresh_threads(self) -> None:
        """Notice threads that came or went; cheap while their number stays the same."""
        try:
            # A task directory has one link per thread, plus two.
            if os.fstat(self._tasks).st_nlink - 2 == len(self._threads):
                return
            tids = {int(name) for name in os.listdir(self._tasks)}
        except OSError:
            tids = set()
        for tid in self._threads.keys() - tids:
            self._threads.pop(tid).close()
        for tid in tids - self._threads.keys():
            with contextlib.suppress(OSError):
                self._threads[tid] = _Thread(self.pid, tid)

    def _read(self, tid: int, fd: int) -> bytes:
        """Content of a thread's file; empty, and the thread forgotten, where the thread is gone."""
        try:
            return os.pread(fd, _STATUS_BYTES, 0)
        except OSError:
            thread = self._threads.pop(tid, None)
            if thread is not None:
                thread.close()
            return b""

    def running_threads(self) -> list[int]:
        """Threads that are not stopped (nor dead) now. Empty means that the whole process stands still."""
        self.refresh_threads()
        if not self._threads:
            # Nothing readable proves nothing: only a process that is gone counts as standing still.
            return [] if read_stat(self.pid) is None else [self.pid]
        return self.threads_in("RSDIWKP")

    def threads_in(self, states: str) -> list[int]:
        """Threads whose state letter is one of ``states`` now."""
        wanted = states.encode()
        found: list[int] = []
        for tid, thread in list(self._threads.items()):
            content = self._read(tid, thread.stat)
            # The state is the letter behind the closing parenthesis of the name.
            at = content.rfind(b")") + 2
            if at > 1 and content[at : at + 1] in wanted:
                found.append(tid)
        return found

    def cpu_ns(self) -> dict[int, int]:
        """Nanoseconds on a CPU so far, per thread."""
        self.refresh_threads()
        spent: dict[int, int] = {}
        for tid, thread in list(self._threads.items()):
            content = self._read(tid, thread.schedstat)
            if content:
                spent[tid] = int(content.split(None, 1)[0])
        return spent

    def children(self) -> list[int]:
        """Pids of its children, of all threads."""
        found: list[int] = []
        for tid, thread in list(self._threads.items()):
            content = self._read(tid, thread.children)
            if content:
                found += [int(pid) for pid in content.split()]
        return found

    def stat(self) -> Stat | None:
        """Its `Stat` now; None where it is gone."""
        try:
            stat = parse_stat(os.pread(self._stat, STAT_BYTES, 0))
        except (OSError, ValueError, IndexError):
            return None
        return None if stat.gone else stat

    def view(self, *, gpu: bool, stopping: bool = True) -> ProcessView | None:
        """What `plan.py` wants to know; None where it is gone.

        Args:
            gpu: look whether libcuda is mapped, too.
            stopping: it may be stopped for what is being planned: then its owner and tracer are read anew;
                else they may be as old as the last such look.
        """
        stat = self.stat()
        if stat is None:
            return None
        if stopping or not self._uids:
            try:
                found = parse_status(os.pread(self._status, _STATUS_BYTES, 0))
            except OSError:
                found = None
            if found is None:
                return None
            self._uids, self._tracer = found
        return ProcessView(
            pid=self.pid,
            parent=stat.parent,
            session=stat.session,
            uids=self._uids,
            stopped=stat.state == "T",
            traced=self._tracer != 0 or stat.state == "t",
            libcuda=gpu and self.libcuda(),
            group=stat.group,
            foreground=stat.terminal != 0 and stat.foreground_group == stat.group,
        )

    def libcuda(self) -> bool:
        """Whether libcuda is mapped; unknown counts as mapped. Reads the maps again only after it ran."""
        if not self._libcuda:
            spent_ns = sum(self.cpu_ns().values())
            if spent_ns != self._libcuda_checked_ns:
                self._libcuda = maps_any(self.pid, b"/libcuda.so") is not False
                self._libcuda_checked_ns = spent_ns
        return self._libcuda
