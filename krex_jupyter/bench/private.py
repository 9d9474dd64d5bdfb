"""A coordinator of a benchmark's own, so that measuring disturbs nobody and nobody disturbs it.

Ended in order: the coordinator first (its guardian sets everything free when it goes), then the guardian.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from krex_jupyter.errors import KrexError
from krex_jupyter.protocol import DeviceInfo, GetStatus, Hello, Status
from krex_jupyter.runtime.client import Connection, next_request_id

_END_S = 3.0


@dataclass(frozen=True)
class PrivateCoordinator:
    """Where it is, and what it found."""

    directory: Path
    environment: dict[str, str]
    """For processes that shall use it."""
    devices: tuple[DeviceInfo, ...]
    _connection: Connection

    def wait_for(self, pids: Iterable[int], timeout_s: float = 10.0) -> None:
        """Wait until these processes are participants; loading the extension joins in the background.

        Raises:
            KrexError: they are not after ``timeout_s``.
        """
        missing = set(pids)
        deadline = time.monotonic() + timeout_s
        while missing and time.monotonic() < deadline:
            status = self._connection.ask(GetStatus(request_id=next_request_id(), recent=0))
            if isinstance(status, Status):
                missing -= {participant.pid for participant in status.participants if participant.joined}
            if missing:
                time.sleep(0.05)
        if missing:
            raise KrexError(
                f"kernels {sorted(missing)} loaded the extension and did not join in {timeout_s:g} s"
            )


@contextlib.contextmanager
def private_coordinator() -> Iterator[PrivateCoordinator]:
    """Start a coordinator in a private directory; ``KREX_SOCKET`` points to it meanwhile."""
    # A short path: a Unix socket's has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="krex-bench-"))
    before = os.environ.get("KREX_SOCKET")
    os.environ["KREX_SOCKET"] = str(directory / "krex.sock")
    connection: Connection | None = None
    try:
        connection = Connection.open(Hello(role="viewer", label="krex bench"), timeout_s=10.0)
        yield PrivateCoordinator(directory, dict(os.environ), connection.welcome.devices, connection)
    finally:
        try:
            if connection is not None:
                _end(connection)
        finally:
            if before is None:
                os.environ.pop("KREX_SOCKET", None)
            else:
                os.environ["KREX_SOCKET"] = before
            shutil.rmtree(directory, ignore_errors=True)


def _end(connection: Connection) -> None:
    pids = [connection.welcome.coordinator_pid, connection.welcome.guardian_pid]
    with contextlib.suppress(OSError, RuntimeError):
        status = connection.ask(GetStatus(request_id=next_request_id(), recent=0))
        if isinstance(status, Status):
            pids = [status.coordinator_pid, status.guardian_pid]
    pidfds = []
    for pid in pids:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                pidfds.append(os.pidfd_open(pid))
    connection.close()
    for pidfd in pidfds:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            if select.select([pidfd], [], [], _END_S)[0]:
                break
        os.close(pidfd)
