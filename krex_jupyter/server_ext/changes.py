"""The queue between the coordinator's changes and one browser: bounded, and never in the way.

A browser that reads slowly, or sleeps, must cost the server no memory and the other browsers no time. When its
queue is full, everything in it is dropped and replaced by the newest snapshot: a view is made from a snapshot
and the changes after it, so nothing but the in-between is lost.
"""

from __future__ import annotations

import asyncio
from collections import deque

from krex_jupyter.protocol import Status

from .connection import Change, Unavailable


class ChangeQueue:
    """Changes for one browser. ``limit`` is the most that wait; past it they become one snapshot."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changes: deque[Change] = deque()
        self._latest: Status | Unavailable | None = None
        self._filled = asyncio.Event()
        self.dropped = 0
        """Changes that were replaced by a snapshot so far."""

    def __len__(self) -> int:
        return len(self._changes)

    def push(self, change: Change) -> None:
        """Add a change. Never waits."""
        snapshot = snapshot_of(change)
        if snapshot is not None:
            self._latest = snapshot
        if len(self._changes) >= self._limit and self._latest is not None:
            self.dropped += len(self._changes)
            self._changes.clear()
            self._changes.append(self._latest)
        else:
            self._changes.append(change)
        self._filled.set()

    async def pop(self) -> Change:
        """The next change; waits until there is one."""
        while not self._changes:
            self._filled.clear()
            await self._filled.wait()
        return self._changes.popleft()


def snapshot_of(change: Change) -> Status | Unavailable | None:
    """The whole state that a change carries, if it carries one."""
    if isinstance(change, Status | Unavailable):
        return change
    return change.status
