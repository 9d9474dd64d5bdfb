"""What a device is to KREX, and which ones this host has.

A vendor is one class with the methods of `DeviceBackend`; nothing here gates anybody (`enforcement/`), and
nothing here creates a GPU context. A reading that fails is None, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import msgspec

from krex_jupyter.errors import DeviceNotFound
from krex_jupyter.named import construct
from krex_jupyter.protocol import DeviceInfo, Gate, Vendor

CPU_UUID = "cpu"
"""Identity of the host itself as a device."""

VENDOR_BACKENDS = ("krex_jupyter.devices.nvidia:NvidiaBackend",)
"""The GPU vendors that `discover` looks for, in order of preference for the default device."""


class DeviceBackend(Protocol):
    """One vendor's devices on this host. Methods may take milliseconds: never call them in a grant's path."""

    vendor: Vendor

    def devices(self) -> list[DeviceInfo]:
        """The devices, in the driver's order; empty where there are none. Never raises."""
        ...

    def processes(self, uuid: str) -> dict[int, int | None] | None:
        """Pids with a context on the device, and the device memory of each in bytes (None: unknown).

        Pids are of this pid namespace as far as the driver knows it. None where the list could not be read.
        """
        ...


class Devices:
    """This host's devices, as found once: GPUs by vendor and driver index, the cpu last."""

    def __init__(self, backends: Sequence[DeviceBackend]) -> None:
        found: list[DeviceInfo] = []
        self._backends: dict[str, DeviceBackend] = {}
        for backend in backends:
            for info in backend.devices():
                found.append(info)
                self._backends[info.uuid] = backend
        self.infos: tuple[DeviceInfo, ...] = tuple(found)

    def info_of(self, uuid: str) -> DeviceInfo:
        """The device with this UUID; raises `DeviceNotFound`."""
        for info in self.infos:
            if info.uuid == uuid:
                return info
        raise DeviceNotFound(f"This host has no device {uuid!r}. It has: {listing(self.infos)}.")

    def backend_of(self, uuid: str) -> DeviceBackend:
        """What reads this device; raises `DeviceNotFound`."""
        return self._backends[self.info_of(uuid).uuid]

    def default(self) -> DeviceInfo:
        """The first GPU, else the cpu."""
        return default_of(self.infos)

    def withdraw_gate(self, vendor: Vendor, gate: Gate, reason: str) -> None:
        """Take ``gate`` from the vendor's devices and note why: found by a trial, not by looking."""
        self.infos = tuple(
            msgspec.structs.replace(
                info,
                gates=tuple(offered for offered in info.gates if offered != gate),
                note=f"{info.note} {reason}".strip(),
            )
            if info.vendor == vendor and gate in info.gates
            else info
            for info in self.infos
        )


def discover(specs: Sequence[str] = ()) -> Devices:
    """This host's devices. Takes 10-100 ms (NVML starts); a missing driver is no error but an empty list.

    ``specs`` (``module:Class:argument``) name other GPU backends to use instead of the vendors' own: a
    simulated driver, say. The cpu is always there.
    """
    from krex_jupyter.devices.cpu import CpuBackend

    gpus = [cast("DeviceBackend", construct(spec)) for spec in specs or VENDOR_BACKENDS]
    return Devices([*gpus, CpuBackend()])


def default_of(infos: Sequence[DeviceInfo]) -> DeviceInfo:
    """The first GPU, else the cpu; raises `DeviceNotFound` where there is neither."""
    for info in infos:
        if info.vendor != "cpu":
            return info
    if not infos:
        raise DeviceNotFound(
            "The coordinator lists no device at all, not even the cpu. See its log: krex status."
        )
    return infos[0]


def listing(infos: Sequence[DeviceInfo]) -> str:
    """The devices for a message: driver's index, name, UUID."""
    if not infos:
        return "none"
    return ", ".join(
        info.uuid if info.index is None else f"{info.vendor} {info.index} = {info.name} ({info.uuid})"
        for info in infos
    )
