"""Who a process is, so that it cannot be confused with a later one of the same pid.

With pid reuse forced, most impostors had the same start time (10 ms ticks) and none the same pidfd inode; so the
identity is all three (`protocol.ProcessRef`), and calls that take a raw pid are made while its pidfd is held.
Shared by the coordinator, which learns of processes, and the guardian, which acts on them.
"""

from __future__ import annotations

import os
import select
import socket
from dataclasses import dataclass
from pathlib import Path

from .protocol import ProcessRef

_SO_PEERPIDFD = 77
"""`include/uapi/asm-generic/socket.h`; Linux 6.5. Python 3.11 has no constant for it."""
STAT_BYTES = 1024
"""More than any `/proc/PID/stat` has."""

_STATE = 0
_PARENT = 1
_GROUP = 2
_SESSION = 3
_TERMINAL = 4
_FOREGROUND_GROUP = 5
_START_TICKS = 19


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of `/proc/PID/stat` that matter here."""

    state: str
    parent: int
    group: int
    session: int
    terminal: int
    foreground_group: int
    start_ticks: int

    @property
    def stopped(self) -> bool:
        """Stopped by a signal; a traced stop ('t') counts too."""
        return self.state in "Tt"

    @property
    def gone(self) -> bool:
        """A zombie or dead."""
        return self.state in "ZX"


def parse_stat(content: bytes) -> Stat:
    """`Stat` from the file's content; the command's name may hold spaces and parentheses."""
    fields = content[content.rindex(b")") + 2 :].split()
    return Stat(
        state=fields[_STATE].decode(),
        parent=int(fields[_PARENT]),
        group=int(fields[_GROUP]),
        session=int(fields[_SESSION]),
        terminal=int(fields[_TERMINAL]),
        foreground_group=int(fields[_FOREGROUND_GROUP]),
        start_ticks=int(fields[_START_TICKS]),
    )


def read_stat(pid: int) -> Stat | None:
    """`Stat` of a process; None where it is gone."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except (OSError, ValueError, IndexError):
        return None


def reference(pid: int, pidfd: int) -> ProcessRef | None:
    """The identity of ``pid`` as of now; None where the process behind ``pidfd`` is gone."""
    stat = read_stat(pid)
    if stat is None or stat.gone or pid_of(pidfd) != pid:
        return None
    return ProcessRef(
        pid=pid, start_ticks=stat.start_ticks, inode=os.fstat(pidfd).st_ino if _inodes_unique() else 0
    )


def pid_of(pidfd: int) -> int:
    """The pid behind a pidfd in this pid namespace; 0 or below where there is none (any more)."""
    try:
        content = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii")
    except OSError:
        return -1
    for line in content.splitlines():
        if line.startswith("Pid:"):
            return int(line[4:])
    return -1


def open_same(process: ProcessRef) -> int | None:
    """A pidfd of exactly ``process``; None where it is gone or its pid belongs to somebody else now."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except (OSError, ValueError):
        return None
    found = reference(process.pid, pidfd)
    if found is not None and found.start_ticks == process.start_ticks and found.inode in (process.inode, 0):
        return pidfd
    os.close(pidfd)
    return None


def has_ended(pidfd: int, within_s: float = 0.0) -> bool:
    """Whether the process behind a pidfd has ended (a zombie has), or does so within ``within_s``."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(within_s * 1e3))


def peer_pidfd(connection: socket.socket) -> int | None:
    """A pidfd of the process at the other end, to be closed by the caller; None before Linux 6.5, or once it ended."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return None


def maps_any(pid: int, *names: bytes) -> bool | None:
    """Whether a file whose path contains one of ``names`` is mapped in a process; None where that is unreadable."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return None
    return any(name in maps for name in names)


def _inodes_unique() -> bool:
    """Pidfd inodes identify a process from Linux 6.9 on; below, all share one."""
    major, minor = (int("".join(filter(str.isdigit, part))) for part in os.uname().release.split(".")[:2])
    return (major, minor) >= (6, 9)
