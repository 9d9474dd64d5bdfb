from __future__ import annotations

import asyncio

from krex_jupyter.protocol import Event, Status
from krex_jupyter.server_ext.changes import ChangeQueue
from krex_jupyter.server_ext.connection import Unavailable


def status(uptime_s: float) -> Status:
    return Status(
        coordinator_pid=1,
        guardian_pid=None,
        system=False,
        socket="/somewhere",
        uptime_s=uptime_s,
        devices=(),
        participants=(),
    )


def event(number: int) -> Event:
    return Event(kind="notice", at=float(number), detail=str(number))


async def taken(queue: ChangeQueue, count: int) -> list[object]:
    return [await asyncio.wait_for(queue.pop(), 1.0) for _ in range(count)]


def test_a_browser_that_keeps_up_gets_every_change_in_order() -> None:
    async def scenario() -> None:
        queue = ChangeQueue(4)
        changes = [status(1.0), event(1), event(2)]
        for change in changes:
            queue.push(change)
        assert await taken(queue, 3) == changes
        assert queue.dropped == 0

    asyncio.run(scenario())


def test_a_slow_browser_gets_the_newest_snapshot_instead_of_what_it_missed() -> None:
    async def scenario() -> None:
        queue = ChangeQueue(4)
        queue.push(status(1.0))
        queue.push(event(1))
        queue.push(status(2.0))
        queue.push(event(2))
        queue.push(event(3))
        assert len(queue) == 1
        assert await taken(queue, 1) == [status(2.0)]
        assert queue.dropped == 4

    asyncio.run(scenario())


def test_a_queue_never_grows_past_its_limit() -> None:
    queue = ChangeQueue(8)
    queue.push(status(0.0))
    for number in range(1000):
        queue.push(event(number))
        assert len(queue) <= 8


def test_losing_the_coordinator_is_a_state_that_survives_coalescing() -> None:
    async def scenario() -> None:
        queue = ChangeQueue(2)
        lost = Unavailable(at=1.0, detail="nobody answers")
        for change in (status(1.0), event(1), lost, event(2), event(3)):
            queue.push(change)
        assert await taken(queue, 1) == [lost]

    asyncio.run(scenario())
