"""Looking at devices in the background: who has a context where, and which participant has a GPU library mapped.

A look takes milliseconds (NVML 1 to 2.6 ms a call), so it happens on a worker, never in a grant's path. The last
look serves as the process list at a region's entry: what appeared since then counts as new, which errs on the
safe side. At the exit a fresh one is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from krex_jupyter.devices import Devices
from krex_jupyter.identity import maps_any
from krex_jupyter.workers import Workers

_GPU_LIBRARIES = (b"/libcuda.so", b"/libamdhip64.so", b"/libhsa-runtime64.so")


@dataclass(frozen=True, slots=True)
class Look:
    """The processes with a context on a device; ``pids`` is None where they could not be read."""

    at_s: float
    pids: tuple[int, ...] | None


class DeviceWatch:
    """The last `Look` at each GPU."""

    def __init__(self, devices: Devices, workers: Workers) -> None:
        self._devices = devices
        self._workers = workers
        self._gpus = [info.uuid for info in devices.infos if info.vendor != "cpu"]
        self.last: dict[str, Look] = {}
        self._busy = False

    @property
    def has_gpus(self) -> bool:
        """There is something to look at."""
        return bool(self._gpus)

    def look(self, uuid: str, then: Callable[[Look], None]) -> None:
        """Look at one device now; ``then`` is called later, on the main thread."""

        def work() -> None:
            look = self._look(uuid)

            def arrived() -> None:
                self.last[uuid] = look
                then(look)

            self._workers.post(arrived)

        self._workers.submit(work)

    def refresh(self, unknown: list[int], then: Callable[[dict[int, bool]], None]) -> None:
        """Look at all GPUs, and whether each of the processes ``unknown`` has a GPU library mapped by now."""
        if self._busy:
            return
        self._busy = True

        def work() -> None:
            looks = {uuid: self._look(uuid) for uuid in self._gpus}
            libraries = {
                pid: mapped for pid in unknown if (mapped := maps_any(pid, *_GPU_LIBRARIES)) is not None
            }

            def arrived() -> None:
                self._busy = False
                self.last.update(looks)
                then(libraries)

            self._workers.post(arrived)

        self._workers.submit(work)

    def contexts(self, pid: int) -> tuple[str, ...] | None:
        """Devices on which a process had a context at the last look; None where no look succeeded."""
        seen = [(uuid, look.pids) for uuid, look in self.last.items() if look.pids is not None]
        if not seen:
            return None
        return tuple(uuid for uuid, pids in seen if pid in pids)

    def _look(self, uuid: str) -> Look:
        found = self._devices.backend_of(uuid).processes(uuid)
        return Look(time.monotonic(), None if found is None else tuple(sorted(found)))
