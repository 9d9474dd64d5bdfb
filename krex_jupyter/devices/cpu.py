"""The host itself as a device: what is measured where there is no GPU. Reads procfs, changes nothing."""

from __future__ import annotations

import math
import os
from pathlib import Path

from krex_jupyter.devices import CPU_UUID
from krex_jupyter.protocol import DeviceInfo, Vendor

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


class CpuBackend:
    """One device, always there."""

    vendor: Vendor = "cpu"

    def devices(self) -> list[DeviceInfo]:
        """The host."""
        return [
            DeviceInfo(
                uuid=CPU_UUID,
                name=model_name(),
                vendor="cpu",
                memory_bytes=memory_bytes(),
                gates=("freeze", "observe"),
            )
        ]

    def processes(self, uuid: str) -> dict[int, int | None] | None:
        """Empty: nobody has a context on a cpu, and whoever runs is found by its CPU time instead."""
        return {}


def model_name() -> str:
    """The processor's name as the kernel gives it; the architecture where it gives none (much of Arm)."""
    try:
        with (_PROC / "cpuinfo").open(encoding="utf-8") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name" and value.strip():
                    return value.strip()
    except OSError:
        pass
    return f"{os.uname().machine} processor"


def memory_bytes() -> int | None:
    """The host's memory; None where it cannot be read."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def usable_cores() -> frozenset[int]:
    """Logical cores that the calling thread may run on."""
    return frozenset(os.sched_getaffinity(0))


def usable_core_count() -> int:
    """How many cores' worth of time this process can have: its cores, or a smaller quota's.

    A container held to two cores by quota still sees all of the host's cores in its mask, and reserving cores
    there would take nothing from anybody.
    """
    quota = _quota_cores()
    cores = len(usable_cores())
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota_cores() -> float | None:
    """The cgroup's CPU limit in cores; None where none can be read, which is no limit to us.

    Only the cgroup that is visible as the root here: inside a container that is the container's own.
    """
    try:
        quota, period = (_CGROUP / "cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((_CGROUP / "cpu" / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
        period_us = int((_CGROUP / "cpu" / "cpu.cfs_period_us").read_text(encoding="utf-8"))
        return quota_us / period_us if quota_us > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
