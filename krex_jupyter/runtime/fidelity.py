"""The owner's evidence: what its process reads of itself just before and just after its timed part.

The reads that matter most are made closest to the body. A reading that fails is None, never zero.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass

from krex_jupyter.protocol import OwnerEvidence

if sys.platform != "win32":
    # Not there on Windows, where importing the package works all the same.
    import resource

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, slots=True)
class _Reading:
    wall_s: float
    schedstat_ns: tuple[int, int] | None
    involuntary: int
    major_faults: int
    busy_s: float | None
    steal_s: float | None
    own_s: float


class OwnerWatch:
    """Evidence of one region on the thread that creates it: `start`, the body, `stop`."""

    def __init__(self) -> None:
        self._tid = _native_id()
        self._fd = _own_schedstat()
        self._before: _Reading | None = None

    def start(self) -> None:
        """Read; the last thing before the body."""
        self._before = self._read()

    def stop(self, **also: bool | str | int | None) -> OwnerEvidence:
        """Read again; the first thing after the body. ``also``: fields of `OwnerEvidence` known elsewhere."""
        after = self._read()
        before = self._before
        if before is None:
            return OwnerEvidence(**also)  # type: ignore[arg-type]  # the caller's fields are the struct's
        delay_s = cpu_s = None
        if before.schedstat_ns is not None and after.schedstat_ns is not None and _native_id() == self._tid:
            cpu_s = (after.schedstat_ns[0] - before.schedstat_ns[0]) / 1e9
            delay_s = (after.schedstat_ns[1] - before.schedstat_ns[1]) / 1e9
        other_s = None
        if before.busy_s is not None and after.busy_s is not None:
            other_s = max(after.busy_s - before.busy_s - (after.own_s - before.own_s), 0.0)
        steal_s = None
        if before.steal_s is not None and after.steal_s is not None:
            steal_s = after.steal_s - before.steal_s
        return OwnerEvidence(
            run_queue_delay_s=delay_s,
            cpu_time_s=cpu_s,
            wall_s=after.wall_s - before.wall_s,
            involuntary_switches=after.involuntary - before.involuntary,
            major_faults=after.major_faults - before.major_faults,
            other_cpu_s=other_s,
            steal_s=steal_s,
            **also,  # type: ignore[arg-type]  # the caller's fields are the struct's
        )

    def _read(self) -> _Reading:
        busy_s, steal_s = _host_cpu()
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        times = os.times()
        return _Reading(
            busy_s=busy_s,
            steal_s=steal_s,
            own_s=times.user + times.system + times.children_user + times.children_system,
            involuntary=usage.ru_nivcsw,
            major_faults=usage.ru_majflt,
            schedstat_ns=_schedstat(self._fd),
            wall_s=time.monotonic(),
        )


def _native_id() -> int:
    return threading.get_native_id()


class _OpenFile:
    """A descriptor that is closed with the thread it belongs to."""

    def __init__(self, path: str) -> None:
        self.pid = os.getpid()
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.fd = -1

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class _OfThread(threading.local):
    schedstat: _OpenFile | None = None


_of_thread = _OfThread()


def _own_schedstat() -> int:
    """This thread's open `schedstat`; -1 where there is none. Opened once per thread: regions come in numbers."""
    found = _of_thread.schedstat
    if found is None or found.pid != os.getpid():
        # A forked child inherits its parent's file, which is about the parent.
        found = _of_thread.schedstat = _OpenFile(f"/proc/self/task/{_native_id()}/schedstat")
    return found.fd


def _schedstat(fd: int) -> tuple[int, int] | None:
    """(nanoseconds on a CPU, nanoseconds runnable but waiting) of a thread."""
    try:
        running, waiting, _ = os.pread(fd, 128, 0).split()
    except (OSError, ValueError):
        return None
    return int(running), int(waiting)


def _host_cpu() -> tuple[float | None, float | None]:
    """(CPU seconds used on the host, seconds stolen by its hypervisor) since boot, in ticks of 10 ms."""
    global _host_stat_fd
    try:
        if _host_stat_fd < 0:
            _host_stat_fd = os.open("/proc/stat", os.O_RDONLY | os.O_CLOEXEC)
        # The first line is the sum over all CPUs.
        fields = [int(field) for field in os.pread(_host_stat_fd, 256, 0).split(b"\n", 1)[0].split()[1:9]]
        user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    except (OSError, ValueError):
        return None, None
    return (user + nice + system + irq + softirq) / _TICKS_PER_S, steal / _TICKS_PER_S


_host_stat_fd = -1
