"""A region as the coordinator keeps it, from its request to its report. Data and the report; no reactions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from krex_jupyter.protocol import (
    Acquire,
    DeviceEvidence,
    DeviceInfo,
    EffectiveCpuPolicy,
    EntryCosts,
    Evidence,
    GuardianAudit,
    OwnerEvidence,
    RegionReport,
    ReportDevice,
    SiblingReport,
    Vendor,
)

from .peers import Connection, Participant
from .queue import Ticket
from .verdict import Facts, Thresholds, judge

Phase: TypeAlias = Literal["queued", "entering", "granted", "held", "leaving", "revoked"]


@dataclass(eq=False)
class Region:
    """One request and what became of it. Times are monotonic seconds, `started_at` is Unix time."""

    ticket: Ticket
    acquire: Acquire
    connection: Connection
    participant: Participant
    devices: tuple[DeviceInfo, ...]
    cpu_policy: EffectiveCpuPolicy
    max_hold_s: float
    phase: Phase = "queued"
    epoch: int = 0
    guarded: bool = False
    """The guardian gates siblings for it."""
    entering_s: float = 0.0
    granted_s: float = 0.0
    started_at: float = 0.0
    released_s: float = 0.0
    cores: tuple[int, ...] = ()
    enter_costs: EntryCosts = EntryCosts()  # noqa: RUF009 (frozen)
    siblings: tuple[SiblingReport, ...] = ()
    late: tuple[SiblingReport, ...] = ()
    """Those of the siblings that appeared during the region."""
    revoked: tuple[str, str] | None = None
    release_request: int = 0
    owner: OwnerEvidence | None = None
    audit: GuardianAudit | None = None
    evidence: dict[str, DeviceEvidence] = field(default_factory=dict)
    processes_before: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    due: set[str] = field(default_factory=set)
    """Evidence that is still on its way: "audit", or a device's uuid."""
    announced: tuple[int, str] = (0, "")
    """Position and holder that the waiting client was last told."""
    announced_s: float = float("-inf")
    cpu_seen: tuple[int, float] = (-1, 0.0)
    """Owner's CPU ticks, and since when they stand still (the watchdog's)."""

    @property
    def region_id(self) -> str:
        """Its id, in every message and record."""
        return self.ticket.region_id

    @property
    def vendor(self) -> Vendor:
        """GPUs before the cpu, where it holds both."""
        return next((info.vendor for info in self.devices if info.vendor != "cpu"), "cpu")

    @property
    def occupies(self) -> bool:
        """It has its devices (a revoked one has lost them)."""
        return self.phase in ("entering", "granted", "held", "leaving")

    @property
    def frozen(self) -> bool:
        """Somebody stands frozen for it."""
        return any(sibling.frozen for sibling in self.all_siblings)

    @property
    def all_siblings(self) -> tuple[SiblingReport, ...]:
        """Those gated or observed from the start, and those that appeared since."""
        return self.siblings + self.late

    def report(self, now_s: float, thresholds: Thresholds) -> RegionReport:
        """The region's report as of now."""
        evidence = Evidence(owner=self.owner, siblings=self.audit, device=dict(self.evidence))
        ended_s = self.released_s or now_s
        late = self.late + (self.audit.joined_late if self.audit is not None else ())
        siblings = self.siblings + late
        verdict, reasons = judge(
            Facts(
                vendor=self.vendor,
                held_s=max(ended_s - self.granted_s, 0.0),
                siblings=siblings,
                late=late,
                evidence=evidence,
                gated=self.guarded,
                revoked=self.revoked,
                pinned=bool(self.cores),
                devices=tuple(info.uuid for info in self.devices if info.vendor != "cpu"),
            ),
            thresholds,
        )
        names = self.acquire.device_ids or self.acquire.devices
        devices = tuple(
            ReportDevice(id=name, uuid=info.uuid, name=info.name, vendor=info.vendor)
            for name, info in zip(names, self.devices, strict=True)
        )
        return RegionReport(
            region_id=self.region_id,
            epoch=self.epoch,
            device=devices[0],
            devices=devices,
            label=self.acquire.label or self.participant.label,
            pid=self.participant.process.pid,
            notebook=self.participant.notebook,
            uid=self.participant.uid,
            started_at=self.started_at,
            wait_s=self.entering_s - self.ticket.submitted_s,
            enter_s=self.granted_s - self.entering_s,
            held_s=max(ended_s - self.granted_s, 0.0),
            exit_s=now_s - ended_s,
            enter_costs=self.enter_costs,
            cpu_policy=self.cpu_policy,
            siblings=siblings,
            verdict=verdict,
            reasons=reasons,
            evidence=evidence,
        )
