"""Reading what the coordinator knows: `devices`, `status`, `history`, `report`. Never gates, never waits for long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from krex_jupyter.protocol import (
    DeviceInfo,
    GetHistory,
    GetReport,
    GetStatus,
    Hello,
    History,
    RegionReport,
    Status,
)

from .client import Connection, expect, next_request_id


def devices() -> list[DeviceInfo]:
    """This host's devices, GPUs first; the cpu is always among them. Raises `CoordinatorUnavailable`."""
    with _viewer() as connection:
        return list(connection.welcome.devices)


def status() -> Status:
    """A snapshot: who holds what, who waits, who takes part. Raises `CoordinatorUnavailable`."""
    with _viewer() as connection:
        return expect(connection.ask(GetStatus(request_id=next_request_id())), Status)


def history(
    limit: int = 100, device: str = "", label: str = "", verdict: str = "", since: float = 0.0
) -> list[RegionReport]:
    """Reports of past regions, newest first.

    Args:
        limit: how many at most.
        device: only those on the device whose UUID begins so.
        label: only those with exactly this label.
        verdict: only those with this verdict.
        since: only those granted at or after this Unix time.

    Raises:
        CoordinatorUnavailable: there is no coordinator and none could be started.
    """
    with _viewer() as connection:
        answer = expect(
            connection.ask(
                GetHistory(
                    request_id=next_request_id(),
                    limit=limit,
                    device=device,
                    label=label,
                    verdict=verdict,
                    since=since,
                )
            ),
            History,
        )
        return list(answer.reports)


def report(region_id: str) -> RegionReport:
    """The report of one past region. Raises `KrexError` where none is on record."""
    with _viewer() as connection:
        answer = expect(connection.ask(GetReport(request_id=next_request_id(), region_id=region_id)), History)
        return answer.reports[0]


@contextlib.contextmanager
def _viewer() -> Iterator[Connection]:
    connection = Connection.open(Hello(role="viewer"))
    try:
        yield connection
    finally:
        connection.close()
