"""What the coordinator tells of itself: its status, and what a waiter waits for. Reads its state, changes nothing."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping

from krex_jupyter.devices import Devices
from krex_jupyter.protocol import (
    DeviceInfo,
    DeviceStatus,
    HolderStatus,
    ParticipantStatus,
    RegionReport,
    Status,
    WaiterStatus,
)

from .guardian_link import GuardianLink
from .peers import Participant
from .queue import Arbiter
from .regions import Region
from .settings import Settings

_RECENT_HELD = 20
"""Held times that an estimate is made from."""


class Picture:
    """A view of the coordinator's state, which it shares and never changes."""

    def __init__(
        self,
        *,
        socket: str,
        system: bool,
        settings: Settings,
        devices: Devices,
        guardian: GuardianLink,
        arbiter: Arbiter,
        regions: Mapping[str, Region],
        participants: Mapping[str, Participant],
        recent: deque[RegionReport],
        notices: deque[str],
    ) -> None:
        self._socket = socket
        self._system = system
        self._settings = settings
        self._devices = devices
        self._guardian = guardian
        self._arbiter = arbiter
        self._regions = regions
        self._participants = participants
        self._recent = recent
        self._notices = notices
        self._held_s: deque[float] = deque(maxlen=_RECENT_HELD)
        self._started_s = time.monotonic()

    def note_held(self, held_s: float) -> None:
        """A region was held so long: what estimates are made from."""
        self._held_s.append(held_s)

    def holder_of(self, region: Region) -> Region | None:
        """The region that has what this one needs."""
        for resource in region.ticket.resources:
            ticket = self._arbiter.holder(resource)
            if ticket is not None:
                return self._regions.get(ticket.region_id)
        return None

    def waits_for(self, region: Region) -> str:
        """What a waiting region waits for, as a sentence."""
        holder = self.holder_of(region)
        names = ", ".join(region.acquire.device_ids or region.acquire.devices)
        if holder is None:
            if not self._guardian.ready:
                return f"{names} is free; waiting for the guardian to be ready."
            return f"{names} is free; waiting for the pause that lets work outside regions go on."
        who = (
            holder.participant.notebook or holder.participant.label or f"pid {holder.participant.process.pid}"
        )
        if holder.phase == "entering":
            return f"{names} goes to {who} (pid {holder.participant.process.pid}), which is about to hold it."
        held_s = time.monotonic() - holder.granted_s
        left = f", ends by itself after {holder.max_hold_s:g} s" if holder.max_hold_s else ""
        return f"{names} is held by {who} (pid {holder.participant.process.pid}) for {held_s:.1f} s{left}."

    def eta_s(self, region: Region, position: int) -> float | None:
        """Estimated seconds until its turn, from the regions held lately; None where there were none."""
        if not self._held_s:
            return None
        mean_s = sum(self._held_s) / len(self._held_s)
        holder = self.holder_of(region)
        running_s = max(mean_s - (time.monotonic() - holder.granted_s), 0.0) if holder is not None else 0.0
        return running_s + (position - 1) * mean_s

    def status(self, request_id: int, recent: int, may_see: int | None) -> Status:
        """A snapshot with up to ``recent`` reports; ``may_see``: of this uid only, or of everybody where None."""
        """A snapshot, with up to ``recent`` reports; ``may_see``: only this uid's, or everybody's where None."""
        now_s = time.monotonic()
        positions = self._arbiter.positions()
        reports = [report for report in self._recent if may_see in (None, report.uid)]
        return Status(
            request_id=request_id,
            coordinator_pid=os.getpid(),
            guardian_pid=self._guardian.pid,
            system=self._system,
            socket=self._socket,
            uptime_s=now_s - self._started_s,
            devices=tuple(self._device_status(info, positions, now_s) for info in self._devices.infos),
            participants=tuple(self._participant_status(p, now_s) for p in self._participants.values()),
            recent=tuple(reports[:recent]),
            notices=tuple(self._notices),
        )

    def _device_status(self, info: DeviceInfo, positions: dict[str, int], now_s: float) -> DeviceStatus:
        ticket = self._arbiter.holder(info.uuid)
        holder = None if ticket is None else self._regions.get(ticket.region_id)
        queue = [
            WaiterStatus(
                pid=region.participant.process.pid,
                uid=region.participant.uid,
                label=region.acquire.label or region.participant.label,
                notebook=region.participant.notebook,
                devices=region.ticket.devices,
                position=position,
                waited_s=now_s - region.ticket.submitted_s,
                eta_s=self.eta_s(region, position),
                waits_for=self.waits_for(region),
                region_id=region_id,
            )
            for region_id, position in positions.items()
            if info.uuid in (region := self._regions[region_id]).ticket.devices
        ]
        return DeviceStatus(
            device=info,
            holder=None if holder is None else self._holder_status(holder, now_s),
            queue=tuple(queue),
        )

    def _holder_status(self, region: Region, now_s: float) -> HolderStatus:
        held_s = now_s - region.granted_s if region.granted_s else 0.0
        gated = sum(sibling.gate != "observe" for sibling in region.all_siblings)
        notice = f"held for {held_s:.0f} s" if held_s > self._settings.notice_s else ""
        return HolderStatus(
            region_id=region.region_id,
            epoch=region.epoch,
            pid=region.participant.process.pid,
            uid=region.participant.uid,
            label=region.acquire.label or region.participant.label,
            notebook=region.participant.notebook,
            devices=region.ticket.devices,
            cpu_policy=region.cpu_policy,
            phase="held" if region.phase == "granted" else region.phase,  # type: ignore[arg-type]
            held_s=held_s,
            remaining_s=max(region.max_hold_s - held_s, 0.0) if region.max_hold_s else None,
            siblings_gated=gated,
            siblings_observed=len(region.all_siblings) - gated,
            notice=notice,
        )

    def _participant_status(self, participant: Participant, now_s: float) -> ParticipantStatus:
        state, paused_by, paused_s = "running", "", 0.0
        for region in self._regions.values():
            if region.participant is participant and region.occupies:
                state = "holding"
                break
            if region.participant is participant and region.phase == "queued":
                state = "queued"
            for sibling in region.all_siblings:
                if region.occupies and sibling.pid == participant.process.pid and sibling.gate != "observe":
                    since_s = region.granted_s or region.entering_s
                    paused_by, paused_s = region.region_id, now_s - since_s
        if paused_by and state == "running":
            state = "paused"
        return ParticipantStatus(
            pid=participant.process.pid,
            uid=participant.uid,
            label=participant.label,
            kernel_id=participant.kernel_id,
            notebook=participant.notebook,
            joined=participant.joined,
            gpu_library=participant.gpu_library,
            state=state,  # type: ignore[arg-type]  # one of the four literals above
            paused_by=paused_by,
            paused_s=paused_s,
            protected=participant.protected,
        )
