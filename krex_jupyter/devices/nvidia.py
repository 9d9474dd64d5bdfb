"""NVIDIA devices, read through NVML (`nvidia-ml-py`): which there are, who has a context on them.

NVML needs no CUDA context and sees every GPU of the host whatever ``CUDA_VISIBLE_DEVICES`` says. A missing
library, driver or GPU gives an empty list and a sentence in `NvidiaBackend.unavailable`; a reading that fails
is None. Nothing here changes a setting of a GPU.

Each call takes 1-3 ms: none belongs into a grant's path or a timed part.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from krex_jupyter.protocol import DeviceInfo, Gate, Vendor

T = TypeVar("T")

_INITIAL_PID_NAMESPACE_INODE = 0xEFFFFFFC
"""PROC_PID_INIT_INO: the kernel gives its first pid namespace this inode on every machine."""
_LOCK_SYMBOL = "cuCheckpointProcessLock"


class NvidiaBackend:
    """This host's NVIDIA GPUs.

    A MIG slice is not a device of its own here: it stands for its parent GPU, with which it shares clocks and
    memory (`parent_of`).
    """

    vendor: Vendor = "nvidia"

    def __init__(self) -> None:
        self.unavailable = ""
        """Why there are no devices, as a sentence; empty before the first reading and where NVML works."""
        # Guards the one nvmlInit. NVML itself may be called from several threads.
        self._starting = threading.Lock()
        self._started = False
        self._library: Any = None

    def devices(self) -> list[DeviceInfo]:
        """As `DeviceBackend.devices`; a GPU that has fallen off its bus is left out."""
        nvml = self._nvml()
        if nvml is None:
            return []
        found: list[DeviceInfo] = []
        gates, note = _gates()
        for index in range(self._read(nvml.nvmlDeviceGetCount) or 0):
            handle = self._read(nvml.nvmlDeviceGetHandleByIndex, index)
            uuid = None if handle is None else self._read(nvml.nvmlDeviceGetUUID, handle)
            if uuid is None:
                continue
            memory = self._read(nvml.nvmlDeviceGetMemoryInfo, handle)
            found.append(
                DeviceInfo(
                    uuid=_text(uuid),
                    name=_text(self._read(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"),
                    vendor="nvidia",
                    index=index,
                    memory_bytes=None if memory is None else int(memory.total),
                    gates=gates,
                    note=" ".join(filter(None, (note, self._device_note(handle)))),
                )
            )
        return found

    def processes(self, uuid: str) -> dict[int, int | None] | None:
        """As `DeviceBackend.processes`: compute, graphics and MPS contexts.

        Where `pids_are_of_this_namespace` is False these are the *host's* pids: comparing two lists is sound,
        looking one up in this container's ``/proc`` is not.
        """
        nvml, handle = self._nvml(), self._handle(uuid)
        if nvml is None or handle is None:
            return None
        compute = self._read(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        if compute is None:
            return None
        # Graphics and MPS lists are additions that some drivers do not support: without them, what is known.
        graphics = self._read(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or []
        clients = self._read(nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle) or []
        found: dict[int, int | None] = {}
        for process in [*graphics, *clients, *compute]:
            used = process.usedGpuMemory
            # A process may be in several lists with the same memory, which is therefore not added up.
            before = found.get(process.pid)
            found[process.pid] = before if used is None else max(before or 0, int(used))
        return found

    def mps_clients(self, uuid: str) -> frozenset[int] | None:
        """Pids that use the device through MPS: the driver refuses to lock them, and they run side by side.

        None where it could not be read.
        """
        nvml, handle = self._nvml(), self._handle(uuid)
        if nvml is None or handle is None:
            return None
        clients = self._read(nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle)
        return None if clients is None else frozenset(int(client.pid) for client in clients)

    def driver_version(self) -> str:
        """The driver's version, "580.159.03" say; empty where it is unknown."""
        nvml = self._nvml()
        version = None if nvml is None else self._read(nvml.nvmlSystemGetDriverVersion)
        return "" if version is None else _text(version)

    def parent_of(self, uuid: str) -> str | None:
        """The GPU's UUID for its own UUID or that of one of its MIG slices; None for any other text."""
        nvml, handle = self._nvml(), self._handle(uuid)
        if nvml is None or handle is None:
            return None
        if uuid.startswith("MIG-"):
            handle = self._read(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
            if handle is None:
                return None
        parent = self._read(nvml.nvmlDeviceGetUUID, handle)
        return None if parent is None else _text(parent)

    def clock_mhz(self, uuid: str) -> float | None:
        """The SM clock now; None where it could not be read."""
        nvml, handle = self._nvml(), self._handle(uuid)
        if nvml is None or handle is None:
            return None
        clock = self._read(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        return None if clock is None else float(clock)

    def temperature_c(self, uuid: str) -> float | None:
        """The GPU's temperature now; None where it could not be read."""
        nvml, handle = self._nvml(), self._handle(uuid)
        if nvml is None or handle is None:
            return None
        degrees = self._read(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        return None if degrees is None else float(degrees)

    def numa_node(self, uuid: str) -> int | None:
        """The NUMA node that the device hangs on; None where the machine does not say."""
        nvml, handle = self._nvml(), self._handle(uuid)
        address = None if nvml is None or handle is None else self._read(nvml.nvmlDeviceGetPciInfo, handle)
        if address is None:
            return None
        # NVML writes an eight-digit PCI domain, sysfs a four-digit one.
        domain, _, rest = _text(address.busId).lower().partition(":")
        try:
            path = Path(f"/sys/bus/pci/devices/{int(domain, 16):04x}:{rest}/numa_node")
            node = int(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def pids_are_of_this_namespace(self) -> bool:
        """Whether the pids of `processes` can be looked up in our ``/proc``.

        NVML speaks of pids as the kernel module knows them: those of the host's first pid namespace. In it
        they are ours. In a container they are only where the driver translates them, which is seen by this:
        every pid it lists exists here *and* has an NVIDIA device file open. An empty list proves nothing and
        counts as "not ours", as does one of a process whose descriptors we may not read.
        """
        if _in_initial_pid_namespace():
            return True
        listed: set[int] = set()
        for info in self.devices():
            listed.update(self.processes(info.uuid) or ())
        return bool(listed) and all(_has_nvidia_file_open(pid) for pid in listed)

    def _device_note(self, handle: Any) -> str:
        nvml = self._library
        if self._read(nvml.nvmlDeviceGetPersistenceMode, handle) == 0:
            return (
                "Persistence mode is off: the driver may unload between processes, which makes locking slow "
                "and, on some drivers, fatal to the locked process. Run `nvidia-smi -pm 1` as root."
            )
        return ""

    def _handle(self, uuid: str) -> Any:
        nvml = self._nvml()
        return None if nvml is None else self._read(nvml.nvmlDeviceGetHandleByUUID, uuid)

    def _read(self, call: Callable[..., T], *arguments: object) -> T | None:
        """What ``call`` answers, or None: it may be unsupported, forbidden, or of a GPU that is gone."""
        try:
            return call(*arguments)
        except self._library.NVMLError:
            return None

    def _nvml(self) -> Any:
        """The started library, or None with the reason in `unavailable`."""
        with self._starting:
            if not self._started:
                self._started = True
                try:
                    import pynvml

                    pynvml.nvmlInit()
                except ImportError:
                    self.unavailable = (
                        "The Python package nvidia-ml-py is not installed, so no NVIDIA GPU is seen."
                    )
                except pynvml.NVMLError as error:
                    self.unavailable = f"NVML does not start ({error}), so no NVIDIA GPU is seen."
                else:
                    self._library = pynvml
            return self._library


def _gates() -> tuple[tuple[Gate, ...], str]:
    """The gates by what this host's libcuda offers, before any trial, and why the best one is missing."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (
            "freeze",
            "observe",
        ), "libcuda.so.1 is not installed here, so the driver's lock cannot be used."
    if hasattr(libcuda, _LOCK_SYMBOL):
        return ("driver-lock", "freeze", "observe"), ""
    return ("freeze", "observe"), "This driver has no process lock: install driver 570 or later (CUDA 12.8)."


def _in_initial_pid_namespace() -> bool:
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE_INODE
    return False


def _has_nvidia_file_open(pid: int) -> bool:
    directory = Path(f"/proc/{pid}/fd")
    try:
        descriptors = list(directory.iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith("/dev/nvidia"):
                return True
    return False


def _text(value: object) -> str:
    """NVML's strings: bytes in older bindings, text in newer ones."""
    return value.decode() if isinstance(value, bytes) else str(value)
