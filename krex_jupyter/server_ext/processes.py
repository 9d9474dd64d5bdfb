"""Processes held by pidfd, so that nobody else's process is ever meant by mistake.

Its one responsibility is identity: a pid may be reused, a pidfd is not. What is read from `/proc` for a pid is
only believed while its pidfd says that the process still lives. Nothing here waits, and nothing signals a
process whose pidfd is not held.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from krex_jupyter.identity import has_ended, peer_pidfd, pid_of, read_stat
from krex_jupyter.locate import peer_credentials


@dataclass(frozen=True)
class Process:
    """A process and the descriptor that is its identity. The holder closes it, once."""

    pid: int
    fd: int

    @classmethod
    def open(cls, pid: int) -> Process | None:
        """The process that has this pid now; None where there is none."""
        try:
            return cls(pid, os.pidfd_open(pid))
        except OSError:
            return None

    def duplicate(self) -> Process:
        """The same process with a descriptor of its own."""
        return Process(self.pid, os.dup(self.fd))

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)

    @property
    def has_exited(self) -> bool:
        """Whether it ended (a zombie has ended)."""
        return has_ended(self.fd)

    @property
    def state(self) -> str:
        """The letter of `/proc/PID/stat` (``T`` is stopped); empty once it ended."""
        stat = read_stat(self.pid)
        return "" if stat is None or self.has_exited else stat.state

    @property
    def parent_pid(self) -> int:
        """Pid of its parent; 0 once it ended."""
        stat = read_stat(self.pid)
        return 0 if stat is None or self.has_exited else stat.parent

    @property
    def uids(self) -> frozenset[int]:
        """Its real, effective and saved uid; empty once it ended."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return frozenset()
        line = next((line for line in status.splitlines() if line.startswith("Uid:")), "Uid:")
        return frozenset() if self.has_exited else frozenset(int(uid) for uid in line.split()[1:4])

    @property
    def command(self) -> tuple[str, ...]:
        """Its command line; empty once it ended or where it may not be read."""
        try:
            raw = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return ()
        return () if self.has_exited else tuple(os.fsdecode(part) for part in raw.split(b"\0") if part)

    def environment(self, name: str) -> str:
        """What it was started with under ``name``; empty where there is no such thing or it may not be read."""
        try:
            entries = Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return ""
        prefix = os.fsencode(name) + b"="
        value = next((entry[len(prefix) :] for entry in entries if entry.startswith(prefix)), b"")
        return "" if self.has_exited else os.fsdecode(value)

    def send(self, signum: signal.Signals) -> bool:
        """Send a signal; False where the process has ended or is not ours to signal."""
        try:
            signal.pidfd_send_signal(self.fd, signum)
        except OSError:
            return False
        return True


def peer_process(connection: socket.socket) -> Process | None:
    """The process that listens at the other end, by pidfd; None where it ended or the kernel cannot tell.

    Below Linux 6.5 the pid of the credentials is opened instead, and could have been reused since.
    """
    fd = peer_pidfd(connection)
    if fd is None:
        pid, _ = peer_credentials(connection)
        return Process.open(pid) if pid > 0 else None
    process = Process(pid_of(fd), fd)
    if process.pid <= 0:
        process.close()
        return None
    return process
