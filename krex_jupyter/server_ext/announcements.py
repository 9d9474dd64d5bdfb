"""What the rest of the server learns from the coordinator's changes: events on its bus, figures, and activity.

Three translations, nothing else: an `Event` becomes a Jupyter event (schemas in ``events/``), a `Status` becomes
Prometheus figures on ``/metrics``, and a region of this server's that is queued or held counts as activity, so
that neither the server nor the waiting kernel is culled meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from krex_jupyter.protocol import Event, RegionReport, Status, Unavailable

from .connection import Change

SCHEMA_DIRECTORY = Path(__file__).parent / "events"
SCHEMA_PREFIX = "https://events.jupyter.org/krex_jupyter"
ANNOUNCED = ("queued", "granted", "released", "revoked", "contended")


def register_schemas(event_logger: Any) -> None:
    """Make the schemas known to the server's event bus; once per bus."""
    for kind in ANNOUNCED:
        if schema_id(kind) not in event_logger.schemas:
            event_logger.register_event_schema(SCHEMA_DIRECTORY / f"{kind}.yaml")


def schema_id(kind: str) -> str:
    """Identity of a schema."""
    return f"{SCHEMA_PREFIX}/{kind}/v1"


def emit(event_logger: Any, change: Change) -> None:
    """Put a change on the server's event bus, as far as it is one for others."""
    if not isinstance(change, Event) or change.kind not in ANNOUNCED:
        return
    event_logger.emit(schema_id=schema_id(change.kind), data=event_data(change))
    if change.report is not None and change.report.verdict == "contended":
        event_logger.emit(schema_id=schema_id("contended"), data=event_data(change))


def event_data(event: Event) -> dict[str, Any]:
    """The fields of an event on the bus."""
    report = event.report
    data: dict[str, Any] = {
        "region_id": event.region_id,
        "pid": event.pid,
        "label": event.label,
        "notebook": event.notebook,
        "devices": list(event.devices),
    }
    if report is None:
        data["detail"] = event.detail
        return data
    return data | _report_data(report)


def _report_data(report: RegionReport) -> dict[str, Any]:
    return {
        "verdict": report.verdict,
        "reasons": [{"code": reason.code, "detail": reason.detail} for reason in report.reasons],
        "wait_s": report.wait_s,
        "enter_s": report.enter_s,
        "held_s": report.held_s,
    }


def busy_kernels(status: Status | None, kernel_pids: dict[str, int]) -> set[str]:
    """Ids of the kernels among ``kernel_pids`` (pid by kernel id) that hold a region or wait for one."""
    if status is None:
        return set()
    active: set[int] = set()
    for device in status.devices:
        if device.holder is not None:
            active.add(device.holder.pid)
        active.update(waiter.pid for waiter in device.queue)
    busy = {kernel_id for kernel_id, pid in kernel_pids.items() if pid in active}
    # A coordinator of another pid namespace knows other pids; there the id that was registered tells.
    busy |= {entry.kernel_id for entry in status.participants if entry.pid in active} & kernel_pids.keys()
    return busy


def touch_activity(settings: dict[str, Any], kernel_manager: Any, busy: Collection[str]) -> None:
    """Count queued and held regions as activity of the server and of their kernels."""
    if not busy:
        return
    now = datetime.now(UTC)
    settings["last_activity_times"]["krex"] = now
    for kernel_id in busy:
        if kernel_id in kernel_manager:
            kernel_manager.get_kernel(kernel_id).last_activity = now


class Figures:
    """Prometheus figures of the host, as this server sees it. A host without a coordinator has ``krex_up`` 0."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.up = Gauge("krex_up", "1 while a coordinator answers this server", registry=registry)
        self.held = Gauge("krex_regions_held", "Regions held now, by device", ["device"], registry=registry)
        self.queued = Gauge(
            "krex_regions_queued",
            "Regions asked for and not granted, by device",
            ["device"],
            registry=registry,
        )
        self.ended = Counter(
            "krex_regions_ended", "Regions that ended, by verdict", ["verdict"], registry=registry
        )
        self.waited = Counter(
            "krex_region_wait_seconds", "Seconds that ended regions had queued", registry=registry
        )
        self.holding = Counter(
            "krex_region_held_seconds", "Seconds that ended regions were held", registry=registry
        )

    def take(self, change: Change) -> None:
        """Bring the figures up to date."""
        if isinstance(change, Unavailable):
            self.up.set(0)
            # Old numbers would look like current ones.
            self.held.clear()
            self.queued.clear()
            return
        self.up.set(1)
        status = change if isinstance(change, Status) else change.status
        if status is not None:
            for device in status.devices:
                self.held.labels(device.device.uuid).set(int(device.holder is not None))
                self.queued.labels(device.device.uuid).set(len(device.queue))
        if isinstance(change, Event) and change.kind == "released" and change.report is not None:
            self.ended.labels(change.report.verdict).inc()
            self.waited.inc(change.report.wait_s)
            self.holding.inc(change.report.held_s)


# A process has one registry and may load the extension more than once (every test does).
_figures: Figures | None = None


def figures() -> Figures:
    """The figures of this process."""
    global _figures
    if _figures is None:
        _figures = Figures()
    return _figures
