"""Whether a request for a region makes sense here, and which CPU policy it gets: pure decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from krex_jupyter.protocol import Acquire, DeviceInfo, EffectiveCpuPolicy, Failed

_MIN_CORES_TO_ISOLATE = 8


@dataclass(frozen=True, slots=True)
class Host:
    """What requests are judged by."""

    devices: Sequence[DeviceInfo]
    reserved_cores: Mapping[str, tuple[int, ...]]
    """By device; empty or missing: none are reserved for it."""
    foreign_allowed: bool


def refusal(acquire: Acquire, host: Host) -> Failed | None:
    """Why a request cannot be queued; None where it can."""
    known = {info.uuid: info for info in host.devices}
    for name in acquire.devices:
        if name not in known:
            here = ", ".join(known) or "none"
            return Failed(
                request_id=acquire.request_id,
                code="device_not_found",
                detail=f"This host has no device {name!r}. It has: {here}.",
            )
    return _malformed(acquire) or _not_possible(acquire, host, known)


def effective_policy(acquire: Acquire, host: Host) -> EffectiveCpuPolicy:
    """What ``auto`` means for this request: `isolate` where every device has reserved cores, else `freeze`."""
    if acquire.cpu != "auto":
        return acquire.cpu
    return "isolate" if all(host.reserved_cores.get(name) for name in acquire.devices) else "freeze"


def bad_request(acquire: Acquire, detail: str) -> Failed:
    """A refusal of what no client of ours sends."""
    return Failed(request_id=acquire.request_id, code="bad_request", detail=detail)


def _malformed(acquire: Acquire) -> Failed | None:
    if not acquire.devices or len(set(acquire.devices)) != len(acquire.devices):
        return bad_request(acquire, "a region names at least one device, and none twice")
    if acquire.device_ids and len(acquire.device_ids) != len(acquire.devices):
        return bad_request(acquire, "device_ids and devices must go together")
    for bound_s in (acquire.timeout_s, acquire.max_hold_s):
        if bound_s is not None and not 0 <= bound_s < float("inf"):
            return bad_request(acquire, f"a time must be a number of seconds, 0 or more, not {bound_s}")
    if acquire.max_hold_s == 0 and acquire.cpu != "share":
        return bad_request(
            acquire, "max_hold=0 (no limit) is allowed only with cpu='share', which stops nobody"
        )
    return None


def _not_possible(acquire: Acquire, host: Host, known: Mapping[str, DeviceInfo]) -> Failed | None:
    problem = ""
    if acquire.cpu == "isolate" and any(known[name].vendor == "cpu" for name in acquire.devices):
        problem = "cpu='isolate' makes no sense on the cpu device, where every core is measured; use 'freeze'"
    elif acquire.cpu == "isolate" and not any(host.reserved_cores.get(name) for name in acquire.devices):
        problem = f"cpu='isolate' needs at least {_MIN_CORES_TO_ISOLATE} usable cores. Use cpu='freeze'."
    if problem:
        return Failed(request_id=acquire.request_id, code="unsupported", detail=problem)
    if acquire.foreign == "gate" and not host.foreign_allowed:
        return Failed(
            request_id=acquire.request_id,
            code="not_permitted",
            detail="foreign='gate' is not allowed here; ask the administrator to set allow_foreign = true",
        )
    return None
