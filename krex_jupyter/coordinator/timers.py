"""Callbacks at a time, for a loop that owns its clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timers:
    """A heap of callbacks; cancelled ones are skipped when their time comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._cancelled: set[int] = set()
        self._numbers = itertools.count()

    def at(self, time_s: float, callback: Callable[[], None]) -> int:
        """Call ``callback`` from `run_due` once ``time_s`` has come; returns a number for `cancel`."""
        number = next(self._numbers)
        heapq.heappush(self._heap, (time_s, number, callback))
        return number

    def cancel(self, number: int) -> None:
        """Do not call it after all; a timer that has run already may be cancelled too."""
        if any(number == entry[1] for entry in self._heap):
            self._cancelled.add(number)

    def next_s(self) -> float:
        """When the next one is due; infinity where there is none."""
        while self._heap and self._heap[0][1] in self._cancelled:
            self._cancelled.discard(heapq.heappop(self._heap)[1])
        return self._heap[0][0] if self._heap else float("inf")

    def run_due(self, now_s: float) -> None:
        """Call everything that is due."""
        while self.next_s() <= now_s:
            heapq.heappop(self._heap)[2]()
