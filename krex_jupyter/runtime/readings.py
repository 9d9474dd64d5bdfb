"""Clock and temperature of the device under measurement, read at both ends of the sampling and never within it.

A reading that fails is None, never zero. On NVIDIA one takes 2-5 ms (NVML); a cpu has neither here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from krex_jupyter.devices.nvidia import NvidiaBackend
from krex_jupyter.protocol import DeviceInfo


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading; None: not to be had."""

    clock_mhz: float | None = None
    temperature_c: float | None = None


class Readings:
    """Reads one device. Create it outside the region: NVML starts here (10-100 ms, once per process)."""

    def __init__(self, info: DeviceInfo) -> None:
        self._uuid = info.uuid
        self._backend = _nvidia() if info.vendor == "nvidia" else None
        self.read()

    def read(self) -> Reading:
        """The device now."""
        if self._backend is None:
            return Reading()
        return Reading(self._backend.clock_mhz(self._uuid), self._backend.temperature_c(self._uuid))


@cache
def _nvidia() -> NvidiaBackend:
    return NvidiaBackend()
