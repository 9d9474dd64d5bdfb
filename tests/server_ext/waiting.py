"""The one way in which these tests wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest


async def eventually(
    observe: Callable[[], Awaitable[object] | object], what: str, *, within_s: float = 10.0
) -> object:
    """The first truthy observation. Fails with the last one seen."""
    deadline_s = time.monotonic() + within_s
    while True:
        seen = observe()
        if isinstance(seen, Awaitable):
            seen = await seen
        if seen:
            return seen
        if time.monotonic() > deadline_s:
            pytest.fail(f"{what}: not within {within_s} s; last seen {seen!r}")
        await asyncio.sleep(0.02)
