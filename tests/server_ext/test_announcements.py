from __future__ import annotations

import asyncio
from typing import Any

import pytest
from jupyter_events import EventLogger
from prometheus_client import CollectorRegistry, generate_latest

from krex_jupyter.protocol import (
    DeviceInfo,
    DeviceStatus,
    Event,
    HolderStatus,
    ParticipantStatus,
    Reason,
    RegionReport,
    ReportDevice,
    Status,
    Unavailable,
    WaiterStatus,
)
from krex_jupyter.server_ext import announcements

CPU = DeviceInfo(uuid="cpu", name="some cpu", vendor="cpu")


def report(verdict: Any) -> RegionReport:
    return RegionReport(
        region_id="r1",
        epoch=1,
        device=ReportDevice(id="cpu", uuid="cpu", name="some cpu", vendor="cpu"),
        pid=10,
        started_at=0.0,
        wait_s=1.0,
        enter_s=0.1,
        held_s=2.0,
        exit_s=0.1,
        cpu_policy="freeze",
        verdict=verdict,
        reasons=() if verdict == "clean" else (Reason(code="sibling_ran", detail="Run it again."),),
    )


def event(kind: Any, verdict: str | None = None) -> Event:
    return Event(
        kind=kind,
        at=0.0,
        region_id="r1",
        pid=10,
        label="tune",
        notebook="a.ipynb",
        devices=("cpu",),
        detail="something happened",
        report=None if verdict is None else report(verdict),
    )


def status(
    *, holder_pid: int = 0, waiting_pid: int = 0, participants: dict[int, str] | None = None
) -> Status:
    holder = HolderStatus(
        region_id="r1",
        epoch=1,
        pid=holder_pid,
        uid=0,
        label="",
        notebook="",
        devices=("cpu",),
        cpu_policy="freeze",
        phase="held",
        held_s=0.1,
        remaining_s=1.0,
        siblings_gated=0,
        siblings_observed=0,
    )
    waiter = WaiterStatus(
        pid=waiting_pid,
        uid=0,
        label="",
        notebook="",
        devices=("cpu",),
        position=1,
        waited_s=0.1,
        eta_s=None,
        waits_for="",
        region_id="r2",
    )
    return Status(
        coordinator_pid=1,
        guardian_pid=None,
        system=False,
        socket="",
        uptime_s=1.0,
        devices=(
            DeviceStatus(
                device=CPU, holder=holder if holder_pid else None, queue=(waiter,) if waiting_pid else ()
            ),
        ),
        participants=tuple(
            ParticipantStatus(pid=pid, uid=0, label="", kernel_id=kernel_id)
            for pid, kernel_id in (participants or {}).items()
        ),
    )


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (event("queued"), ["queued"]),
        (event("granted"), ["granted"]),
        (event("revoked"), ["revoked"]),
        (event("released", "clean"), ["released"]),
        (event("released", "contended"), ["released", "contended"]),
        (event("notice"), []),
        (Unavailable(at=0.0, detail="gone"), []),
    ],
)
def test_changes_become_events_that_follow_their_schemas(change: Any, kinds: list[str]) -> None:
    heard: list[str] = []

    async def listen(logger: Any, schema_id: str, data: Any) -> None:
        heard.append(schema_id.split("/")[-2])

    async def scenario() -> None:
        bus = EventLogger()
        announcements.register_schemas(bus)
        announcements.register_schemas(bus)
        for kind in announcements.ANNOUNCED:
            bus.add_listener(schema_id=announcements.schema_id(kind), listener=listen)
        announcements.emit(bus, change)
        await bus.gather_listeners()

    asyncio.run(scenario())
    assert sorted(heard) == sorted(kinds)


def test_holding_and_waiting_kernels_are_busy_and_others_are_not() -> None:
    kernels = {"holding": 10, "waiting": 11, "idle": 12}
    assert announcements.busy_kernels(status(holder_pid=10, waiting_pid=11), kernels) == {
        "holding",
        "waiting",
    }
    assert announcements.busy_kernels(status(), kernels) == set()
    assert announcements.busy_kernels(None, kernels) == set()


def test_a_kernel_known_by_another_pid_to_the_coordinator_is_found_by_its_id() -> None:
    seen = status(holder_pid=4711, participants={4711: "ours", 4712: "idle"})
    assert announcements.busy_kernels(seen, {"ours": 10, "idle": 11}) == {"ours"}


def test_figures_count_what_ended_and_drop_what_is_stale() -> None:
    registry = CollectorRegistry()
    figures = announcements.Figures(registry)
    figures.take(status(holder_pid=10, waiting_pid=11))
    figures.take(event("released", "contended"))
    shown = generate_latest(registry).decode()
    for line in (
        "krex_up 1.0",
        'krex_regions_held{device="cpu"} 1.0',
        'krex_regions_queued{device="cpu"} 1.0',
        'krex_regions_ended_total{verdict="contended"} 1.0',
        "krex_region_wait_seconds_total 1.0",
        "krex_region_held_seconds_total 2.0",
    ):
        assert line in shown
    figures.take(Unavailable(at=0.0, detail="gone"))
    shown = generate_latest(registry).decode()
    assert "krex_up 0.0" in shown
    assert 'device="cpu"' not in shown
