"""Threads for calls that may block in the driver, and the way back to the main thread.

A pool of its own rather than `concurrent.futures`: its threads are daemons, and a thread that hangs in a driver
call is replaced instead of waited for, be it by other work or by the exit of the process.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import threading
from collections.abc import Callable


class Workers:
    """Runs work on threads; `post` hands a reaction to whoever calls `run_posted`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable while reactions are waiting."""
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._guard = threading.Lock()
        self._free = 0
        """Threads that are idle, less the work already given to them; `_guard` guards it."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` on some thread, at once."""
        with self._guard:
            self._free -= 1
            spawn = self._free < 0
            if spawn:
                self._free += 1
        self._work.put(work)
        if spawn:
            threading.Thread(target=self._serve, daemon=True, name="krex-worker").start()

    def post(self, reaction: Callable[[], None]) -> None:
        """From any thread: have ``reaction`` run by the thread that calls `run_posted`."""
        self._posted.append(reaction)
        os.eventfd_write(self.fd, 1)

    def run_posted(self) -> None:
        """Run the reactions that are waiting."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while self._posted:
            self._posted.popleft()()

    def _serve(self) -> None:
        while True:
            self._work.get()()
            with self._guard:
                self._free += 1
