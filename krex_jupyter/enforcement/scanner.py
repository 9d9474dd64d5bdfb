"""Which processes belong to which participant, kept up to date in the background.

Walking the whole process table costs tens of milliseconds, so it never happens at a region's door: the scan runs
once in a while, in slices of about a millisecond between the guardian's messages. What was born since the last
scan is found at the door by walking children (`discover`), which costs little.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from krex_jupyter.identity import read_stat

from .plan import ProcessView, members
from .processes import ProcessHandle, all_pids

_SLICE = 40
"""Processes looked at between two messages: about a millisecond."""


class Scanner:
    """Handles of every member of every root."""

    def __init__(self) -> None:
        self.handles: dict[int, ProcessHandle] = {}
        self.member_of: dict[int, int] = {}
        self._roots: dict[int, None] = {}
        self._scan: Iterator[None] | None = None
        self._last_pid_fd = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        self._known_up_to = b""
        """The last pid given out before every member's children were last looked at."""

    @property
    def scanning(self) -> bool:
        """A scan is under way: call `advance`."""
        return self._scan is not None

    def add_root(self, handle: ProcessHandle) -> None:
        """A participant to follow from now on."""
        known = self.handles.get(handle.pid)
        if known is not None:
            known.close()
        self.handles[handle.pid] = handle
        self.member_of[handle.pid] = handle.pid
        self._roots[handle.pid] = None
        # Its children have not been looked at.
        self._known_up_to = b""

    def remove_root(self, pid: int) -> None:
        """Stop following a participant; members that are no longer anybody's are dropped by the next scan."""
        self._roots.pop(pid, None)
        for member in [member for member, root in self.member_of.items() if root == pid]:
            self._drop(member)

    def start(self) -> None:
        """Begin a scan, unless one is under way."""
        if self._scan is None and self._roots:
            self._scan = self._walk()

    def advance(self) -> None:
        """Do one slice of the scan."""
        if self._scan is not None:
            try:
                next(self._scan)
            except StopIteration:
                self._scan = None

    def discover(self, parents: Iterable[ProcessHandle]) -> list[ProcessHandle]:
        """Children of ``parents`` that were not known yet, with a handle each, as members of the same root."""
        found: list[ProcessHandle] = []
        if self._last_pid() == self._known_up_to:
            return found
        for parent in parents:
            root = self.member_of.get(parent.pid)
            if root is None:
                continue
            for pid in parent.children():
                if pid not in self.handles:
                    handle = self._adopt(pid, root)
                    if handle is not None:
                        found.append(handle)
        return found

    def discover_all(self) -> bool:
        """Follow children down from every known member until nothing new turns up; whether anything did."""
        last_pid = self._last_pid()
        generation: list[ProcessHandle] = list(self.handles.values())
        found = False
        while generation := self.discover(generation):
            found = True
        self._known_up_to = last_pid
        return found

    def forget_gone(self, pid: int) -> None:
        """A member turned out to be gone."""
        if pid not in self._roots:
            self._drop(pid)

    def _adopt(self, pid: int, root: int) -> ProcessHandle | None:
        with contextlib.suppress(ProcessLookupError):
            handle = ProcessHandle.open(pid)
            self.handles[pid] = handle
            self.member_of[pid] = root
            return handle
        return None

    def _drop(self, pid: int) -> None:
        self.member_of.pop(pid, None)
        handle = self.handles.pop(pid, None)
        if handle is not None:
            handle.close()

    def _walk(self) -> Iterator[None]:
        last_pid = self._last_pid()
        views: dict[int, ProcessView] = {}
        for count, pid in enumerate(all_pids()):
            if count % _SLICE == _SLICE - 1:
                yield
            stat = read_stat(pid)
            if stat is not None and not stat.gone:
                views[pid] = ProcessView(pid=pid, parent=stat.parent, session=stat.session, uids=())
        belongs = members(views, self._roots)
        for pid in self.handles.keys() - belongs.keys() - self._roots.keys():
            self._drop(pid)
        for pid, root in belongs.items():
            if pid in self.handles:
                self.member_of[pid] = root
            else:
                self._adopt(pid, root)
        self._known_up_to = last_pid

    def _last_pid(self) -> bytes:
        """The pid given out last: while it stays the same, no process and no thread was born anywhere."""
        return os.pread(self._last_pid_fd, 128, 0).rsplit(None, 1)[-1]
