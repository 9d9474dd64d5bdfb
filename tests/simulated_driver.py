"""A simulated GPU driver for machines without a GPU: real processes, held to the contract of the real driver.

`tests/enforcement/test_driver_lock.py` runs the same contract against this and, where there is a GPU, against
libcuda. How it is built follows from how the real one behaves:

- A *simulated GPU process* is a real process that holds a `SimulatedGpu`. "Work" is a duration: it is queued
  at once and done when the device has had the time, also while the process is stopped, as on a GPU.
- A lock is answered by a daemon thread *of the target*, over a Unix socket named after its pid. So a call on
  a stopped target hangs until SIGCONT, a killed target ends the call, and the lock outlives the locker, all
  by themselves and not by imitation.
- Nobody polls: threads wait on a condition, callers on a socket.

The driver's state is a directory: ``PID.sock`` and ``PID.json`` per process, and ``PID.work`` with one line
per piece of work (device, start and end by CLOCK_MONOTONIC), an observer that shares no code with the
product.

A child process: ``python -m tests.simulated_driver DIRECTORY [--device UUID]... [--memory-bytes N]``, which
then follows the commands of `tests/cuda_process.py` on its standard input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from krex_jupyter.enforcement.driver_lock import (
    FAILED,
    ILLEGAL_STATE,
    LOCKED,
    NOT_CUDA,
    NOT_READY,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    RUNNING,
    SUCCESS,
)
from krex_jupyter.protocol import DeviceInfo, Vendor
from tests import cuda_process

DEVICES = ("GPU-sim-0", "GPU-sim-1")
DRIVER_VERSION = "999.0-simulated"


@dataclass(frozen=True)
class Work:
    """A piece of work as it ran on the device; times by CLOCK_MONOTONIC."""

    pid: int
    device: str
    started_s: float
    ended_s: float


class SimulatedGpu:
    """The calling process's contexts: what its CUDA would be."""

    def __init__(
        self, directory: Path | str, devices: Sequence[str] = DEVICES[:1], memory_bytes: int = 256 << 20
    ) -> None:
        self._directory = Path(directory)
        self._devices = tuple(devices)
        self._memory_bytes = memory_bytes
        # Guards everything below; notified when the lock is taken, given up or released.
        self._changed = threading.Condition()
        self._state = RUNNING
        self._blocked = False
        """New work must wait: the process is locked, or a lock waits for the queue to drain."""
        self._profiled = False
        self._busy_until_s = dict.fromkeys(self._devices, 0.0)
        stem = self._directory / str(os.getpid())
        self._library = _map_library(self._directory)
        self._work = stem.with_suffix(".work").open("a", encoding="ascii", buffering=1)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _bind(self._listener, stem.with_suffix(".sock"))
        self._listener.listen(64)
        threading.Thread(target=self._answer, name="simulated-driver", daemon=True).start()
        self._register()

    def submit(self, duration_s: float, device: str | None = None) -> None:
        """Queue work. Returns at once, or once the process is unlocked."""
        device = device or self._devices[0]
        with self._changed:
            self._changed.wait_for(lambda: not self._blocked)
            start_s = max(time.monotonic(), self._busy_until_s[device])
            self._busy_until_s[device] = start_s + duration_s
            self._work.write(f"{device} {start_s:.9f} {start_s + duration_s:.9f}\n")

    def synchronise(self) -> None:
        """Wait until all queued work is done; a locked process waits for its unlock, too."""
        with self._changed:
            while self._blocked or self._remaining_s() > 0:
                self._changed.wait(None if self._blocked else self._remaining_s())

    def set_profiled(self, profiled: bool) -> None:
        """As under a profiler: the driver refuses to lock this process."""
        with self._changed:
            self._profiled = profiled

    def close(self) -> None:
        """Destroy the contexts; the process is no CUDA process any more."""
        stem = self._directory / str(os.getpid())
        for suffix in (".json", ".sock"):
            stem.with_suffix(suffix).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._work.close()

    def _remaining_s(self) -> float:
        return max(self._busy_until_s.values()) - time.monotonic()

    def _register(self) -> None:
        entry = {
            "pid": os.getpid(),
            "start_ticks": _start_ticks(os.getpid()),
            "devices": self._devices,
            "memory_bytes": self._memory_bytes,
        }
        target = self._directory / f"{os.getpid()}.json"
        temporary = target.with_suffix(".new")
        temporary.write_text(json.dumps(entry), encoding="utf-8")
        temporary.replace(target)

    def _answer(self) -> None:
        """The driver's own thread: one request at a time."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                uid = int.from_bytes(credentials[4:8], "little")
                request = connection.recv(64).decode().split()
                if not request:
                    continue
                if uid not in (0, os.geteuid()):
                    connection.send(f"{OPERATING_SYSTEM} {FAILED}".encode())
                else:
                    connection.send(f"{self._carry_out(request)} {self._state}".encode())

    def _carry_out(self, request: list[str]) -> int:
        with self._changed:
            if request[0] == "lock":
                return self._lock(float(request[1]))
            if request[0] == "unlock":
                if self._state != LOCKED:
                    return ILLEGAL_STATE
                self._state, self._blocked = RUNNING, False
                self._changed.notify_all()
            return SUCCESS

    def _lock(self, timeout_s: float) -> int:
        if self._state == LOCKED:
            return ILLEGAL_STATE
        if self._profiled:
            return NOT_SUPPORTED
        self._blocked = True
        deadline_s = time.monotonic() + timeout_s
        while (remaining_s := self._remaining_s()) > 0:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                self._blocked = False
                self._changed.notify_all()
                return NOT_READY
            self._changed.wait(min(remaining_s, deadline_s - now_s))
        self._state = LOCKED
        return SUCCESS


class SimulatedLock:
    """`DriverLock` of the simulated driver: ``tests.simulated_driver:SimulatedLock:/dir``, in any process."""

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)

    def lock(self, pid: int, timeout_s: float) -> int:
        """As `DriverLock.lock`."""
        return self._ask(pid, f"lock {timeout_s}")[0]

    def unlock(self, pid: int) -> int:
        """As `DriverLock.unlock`."""
        return self._ask(pid, "unlock")[0]

    def state(self, pid: int) -> tuple[int, int]:
        """As `DriverLock.state`."""
        return self._ask(pid, "state")

    def _ask(self, pid: int, request: str) -> tuple[int, int]:
        if not _lives(pid):
            return OPERATING_SYSTEM, FAILED
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                _connect(connection, self._directory / f"{pid}.sock")
                connection.send(request.encode())
                answer = connection.recv(64)
            except (FileNotFoundError, ConnectionRefusedError):
                return (NOT_CUDA if _lives(pid) else OPERATING_SYSTEM), FAILED
            except OSError:
                # Another user's (EACCES), or it died while it was asked.
                return OPERATING_SYSTEM, FAILED
        if not answer:
            return OPERATING_SYSTEM, FAILED
        code, state = answer.decode().split()
        return int(code), int(state)


class SimulatedBackend:
    """`DeviceBackend` of the simulated driver: ``tests.simulated_driver:SimulatedBackend:/dir``."""

    vendor: Vendor = "nvidia"

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)

    def devices(self) -> list[DeviceInfo]:
        """Two GPUs, or as many as the directory's file ``devices`` says."""
        count = len(DEVICES)
        with contextlib.suppress(OSError):
            count = int((self._directory / "devices").read_text(encoding="ascii"))
        return [
            DeviceInfo(
                uuid=f"GPU-sim-{index}",
                name="Simulated GPU",
                vendor="nvidia",
                index=index,
                memory_bytes=8 << 30,
                gates=("driver-lock", "freeze", "observe"),
                note="A simulated driver: for tests.",
            )
            for index in range(count)
        ]

    def processes(self, uuid: str) -> dict[int, int | None] | None:
        """Living processes with a context on the device; None where the directory is gone."""
        try:
            entries = [path for path in self._directory.iterdir() if path.suffix == ".json"]
        except OSError:
            return None
        found: dict[int, int | None] = {}
        for path in entries:
            try:
                entry = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            pid = entry["pid"]
            if uuid in entry["devices"] and _lives(pid) and _start_ticks(pid) == entry["start_ticks"]:
                found[pid] = entry["memory_bytes"]
        return found

    def mps_clients(self, uuid: str) -> frozenset[int] | None:
        """Nobody: the simulated driver has no MPS."""
        return frozenset()

    def driver_version(self) -> str:
        """As `NvidiaBackend.driver_version`."""
        return DRIVER_VERSION


def work_of(directory: Path | str, pid: int) -> list[Work]:
    """Everything the process has ever run, in the order of submission; also after its death."""
    found: list[Work] = []
    with contextlib.suppress(FileNotFoundError):
        for line in (Path(directory) / f"{pid}.work").read_text(encoding="ascii").splitlines():
            device, started, ended = line.split()
            found.append(Work(pid, device, float(started), float(ended)))
    return found


def _map_library(directory: Path) -> mmap.mmap:
    """What has a context has the driver's library mapped, by which others tell it from what has not."""
    with (directory / "libcuda.so.simulated").open("ab+") as library:
        library.truncate(mmap.PAGESIZE)
        return mmap.mmap(library.fileno(), mmap.PAGESIZE)


class FreezingLock(SimulatedLock):
    """The wrong order, for the test that shows that it is wrong: freeze, then lock."""

    def lock(self, pid: int, timeout_s: float) -> int:
        """As `DriverLock.lock`, on a process that it has just stopped."""
        os.kill(pid, signal.SIGSTOP)
        return super().lock(pid, timeout_s)


def _bind(listener: socket.socket, path: Path) -> None:
    path.unlink(missing_ok=True)
    with _short(path) as name:
        listener.bind(name)
    # Another user may knock, and is told 304 like from the driver.
    path.chmod(0o777)


def _connect(connection: socket.socket, path: Path) -> None:
    with _short(path) as name:
        connection.connect(name)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of any path that fits a socket address (107 bytes): through the directory's descriptor."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _lives(pid: int) -> bool:
    """A zombie is dead to the driver."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def main() -> None:
    """A simulated GPU process that follows its standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", action="append", default=[])
    parser.add_argument("--memory-bytes", type=int, default=256 << 20)
    arguments = parser.parse_args()
    gpu = SimulatedGpu(arguments.directory, arguments.device or DEVICES[:1], arguments.memory_bytes)
    try:
        cuda_process.serve(gpu)
    finally:
        gpu.close()


if __name__ == "__main__":
    main()
