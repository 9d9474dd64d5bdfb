"""Putting a coordinator together: guardian first, then devices, then the socket; and running it to its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from krex_jupyter.protocol import FromGuardian

from .daemon import Coordinator
from .guardian_link import GuardianLink
from .peers import listen
from .settings import Settings

if TYPE_CHECKING:
    from krex_jupyter.devices import Devices


def serve(
    *,
    socket_path: Path,
    settings: Settings,
    state_directory: Path,
    lock_directory: Path,
    history_files: list[Path],
    driver: str,
    backends: tuple[str, ...],
    log: IO[str],
    ready: Callable[[], None],
    install_leave: Callable[[Callable[[], None]], None],
) -> None:
    """Become the coordinator at ``socket_path`` and serve until told to leave.

    Replays what an earlier guardian left behind before anybody is accepted. Raises `OSError`, `TimeoutError`.
    """
    guardian = GuardianLink(state_directory / "journal", driver, log)
    guardian.start()
    early: list[FromGuardian] = []
    try:
        if guardian.owes_replay:
            early = list(guardian.wait_ready(5.0))
        from krex_jupyter.devices import discover
        from krex_jupyter.enforcement.cpus import read_topology, reserve

        devices = discover(backends)
        gpus = [info for info in devices.infos if info.vendor != "cpu"]
        cores = reserve(read_topology(), dict.fromkeys(info.uuid for info in gpus)) if gpus else {}
        coordinator = Coordinator(
            socket_path=socket_path,
            settings=settings,
            devices=devices,
            guardian=guardian,
            history_files=history_files,
            lock_directory=lock_directory,
            driver_lock=_driver_lock_works(devices, state_directory, simulated=bool(driver)),
            reserved_cores=cores,
            system=os.getuid() == 0 and socket_path.parent == Path("/run/krex"),
        )
        install_leave(coordinator.leave)
        listener = listen(socket_path)
    except BaseException:
        guardian.dismiss()
        raise
    ready()
    for message in early:
        coordinator.on_guardian_message(message)
    coordinator.run(listener)


def _driver_lock_works(devices: Devices, state_directory: Path, *, simulated: bool) -> bool:
    """Whether NVIDIA siblings can be locked; a refusal is noted on the devices."""
    nvidia = [info for info in devices.infos if info.vendor == "nvidia"]
    if not nvidia or not any("driver-lock" in info.gates for info in nvidia):
        return False
    if simulated:
        return True
    from krex_jupyter.devices.nvidia import NvidiaBackend
    from krex_jupyter.enforcement.driver_lock import probe

    version = NvidiaBackend().driver_version() or "unknown"
    reason = probe(version, state_directory / "driver-lock.json")
    if reason:
        devices.withdraw_gate("nvidia", "driver-lock", reason)
    return not reason
