from __future__ import annotations

import asyncio

from krex_jupyter.protocol import Event, Status, Unavailable
from krex_jupyter.server_ext.changes import ChangeQueue


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


def test_a_browser_that_keeps_up_gets_a_snapshot_and_then_every_change_in_order() -> None:
    async def scenario() -> None:
        queue = ChangeQueue(4, lambda: status(0.0))
        changes = [event(1), event(2), event(3)]
        for change in changes:
            queue.push(change)
        assert await taken(queue, 4) == [status(0.0), *changes]
        assert queue.dropped == 0

    asyncio.run(scenario())


def test_a_slow_browser_gets_the_state_of_now_instead_of_what_it_missed() -> None:
    async def scenario() -> None:
        now: Status | Unavailable = status(0.0)
        queue = ChangeQueue(3, lambda: now)
        queue.push(event(1))
        queue.push(event(2))
        now = Unavailable(at=1.0, detail="nobody answers")
        queue.push(now)
        assert len(queue) == 1
        queue.push(event(3))
        assert await taken(queue, 2) == [now, event(3)]
        assert queue.dropped == 3

    asyncio.run(scenario())


def test_a_queue_never_grows_past_its_limit() -> None:
    queue = ChangeQueue(8, lambda: status(0.0))
    for number in range(1000):
        queue.push(event(number))
        assert len(queue) <= 8


def test_whoever_waits_is_woken_by_the_next_change() -> None:
    async def scenario() -> None:
        queue = ChangeQueue(4, lambda: status(0.0))
        await queue.pop()
        waiting = asyncio.create_task(queue.pop())
        await asyncio.sleep(0)
        queue.push(event(1))
        assert await asyncio.wait_for(waiting, 1.0) == event(1)

    asyncio.run(scenario())
