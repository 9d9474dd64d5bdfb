"""Callbacks at a time, for a loop that owns its clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timers:
    """A heap of callbacks; one whose cause is gone when its time comes finds that out by itself."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        """Keeps callbacks of one time in order, so that they are never compared themselves."""

    def at(self, time_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` from `run_due` once ``time_s`` has come."""
        heapq.heappush(self._heap, (time_s, next(self._numbers), callback))

    def next_s(self) -> float:
        """When the next one is due; infinity where there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def run_due(self, now_s: float) -> None:
        """Call everything that is due."""
        while self.next_s() <= now_s:
            heapq.heappop(self._heap)[2]()
