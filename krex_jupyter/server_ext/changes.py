"""The queue between the coordinator's changes and one browser: bounded, and never in the way.

A browser that reads slowly, or sleeps, must cost the server no memory and the other browsers no time. When its
queue is full, everything in it is dropped and replaced by a fresh snapshot: a view is made from a snapshot and the
changes after it, so nothing but the in-between is lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from krex_jupyter.protocol import Status, Unavailable

from .connection import Change


class ChangeQueue:
    """Changes for one browser; begins with a snapshot. ``limit`` is the most that wait, past it they become one."""

    def __init__(self, limit: int, snapshot: Callable[[], Status | Unavailable]) -> None:
        self._limit = limit
        self._snapshot = snapshot
        self._changes: deque[Change] = deque([snapshot()])
        self._filled = asyncio.Event()
        self.dropped = 0
        """Changes that were replaced by a snapshot so far."""

    def __len__(self) -> int:
        return len(self._changes)

    def push(self, change: Change) -> None:
        """Add a change, which the snapshot shows already. Never waits."""
        if len(self._changes) >= self._limit:
            self.dropped += len(self._changes)
            self._changes.clear()
            self._changes.append(self._snapshot())
        else:
            self._changes.append(change)
        self._filled.set()

    async def pop(self) -> Change:
        """The next change; waits until there is one."""
        while not self._changes:
            self._filled.clear()
            await self._filled.wait()
        return self._changes.popleft()
