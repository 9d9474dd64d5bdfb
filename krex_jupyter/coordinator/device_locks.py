"""The lock file of each held device, so that two coordinators of one scope never hold one device.

The files stay open, and each is named once: per region only the lock itself is taken and given back, which costs
microseconds.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


class DeviceLocks:
    """Locks that this coordinator holds."""

    def __init__(self, directory: Path, name: str) -> None:
        """``name`` tells others who holds a file that they find locked."""
        self._directory = directory
        self._name = name
        self._files: dict[str, int] = {}
        self._named: set[str] = set()
        """Files that say that this process was the last to take them."""
        self._held: set[str] = set()

    def take(self, uuid: str) -> str:
        """Take a device's lock; an empty string, or who has it. Raises `OSError` where there can be no file."""
        if uuid in self._held:
            return ""
        fd = self._files.get(uuid)
        if fd is None:
            path = self._directory / f"{uuid}.lock"
            fd = self._files[uuid] = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._named.discard(uuid)
            return os.pread(fd, 4096, 0).decode(errors="replace").strip() or "it left no name"
        self._held.add(uuid)
        if uuid not in self._named:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{self._name}\n".encode(), 0)
            self._named.add(uuid)
        return ""

    def give_back(self, idle: Callable[[str], bool]) -> None:
        """Give back the locks of devices that are ``idle``."""
        for uuid in [uuid for uuid in self._held if idle(uuid)]:
            fcntl.flock(self._files[uuid], fcntl.LOCK_UN)
            self._held.discard(uuid)
