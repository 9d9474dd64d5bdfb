"""The kernel provisioner: Jupyter's own local one, plus the two things only a provisioner can do for KREX.

It hands the kernel's process to the coordinator the moment it exists, and it has the kernel thawed *before* a
signal or a shutdown request is sent: to a stopped process an interrupt stays pending and a polite shutdown ends
in a kill after five seconds, and the server's events come after the act, too late to help. All else is
`LocalProvisioner`, also where KREX is out of reach: a kernel must never fail to start, stop or be interrupted
because of us. The kernel's own environment needs nothing of KREX.

What it must never do: continue a process that somebody else stopped. It asks the coordinator, which knows what
it froze. Only where a coordinator died with this kernel in its care, and none answers, is a stopped kernel
continued from here.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from krex_jupyter import wire
from krex_jupyter.errors import KrexError
from krex_jupyter.locate import connect, location
from krex_jupyter.protocol import Hello, Ungate

from .connection import KernelRecord, Link, active_link
from .kernels import label_for, notebook_path
from .processes import Process

NAME = "krex-provisioner"
THAW_LIMIT_S = 0.5
"""Longest that a signal or shutdown is held up by asking the coordinator for a thaw."""

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2


class KrexProvisioner(LocalProvisioner):
    """A local kernel that KREX knows from its first moment, and thaws before every signal."""

    _kernel: Process | None = None
    _notebook: str = ""

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """As `LocalProvisioner`; the child asks to be continued when its parent dies."""
        prepared: dict[str, Any] = await super().pre_launch(**kwargs)
        self._notebook = prepared.get("env", {}).get("JPY_SESSION_NAME", "")
        # The signal comes when the *thread* that forked ends: from any but the main thread, too early.
        if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
            prepared["preexec_fn"] = functools.partial(_continue_when_parent_dies, prepared.get("preexec_fn"))
        return prepared

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """As `LocalProvisioner`; the kernel's process is registered, which is not waited for."""
        with warnings.catch_warnings():
            # From Python 3.12 on: a fork beside other threads is safe here, the child only makes two system calls.
            warnings.filterwarnings(
                "ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning
            )
            connection_info = await super().launch_kernel(cmd, **kwargs)
        self._let_go()
        # Nobody reaps the child before this coroutine yields, so its pid is still its own.
        self._kernel = Process.open(self.pid) if self.pid is not None else None
        link = active_link()
        if self._kernel is not None and link is not None:
            record = KernelRecord(
                kernel_id=self.kernel_id,
                process=self._kernel.duplicate(),
                label=label_for(self._notebook, getattr(self.parent, "kernel_name", "")),
                notebook=notebook_path(self._notebook, _root_dir(self.parent)),
            )
            _in_loop_of(link, link.register, record)
        return connection_info

    async def send_signal(self, signum: int) -> None:
        """Thaw, then as `LocalProvisioner`; `kill` and `terminate` come through here too."""
        if signum != 0:
            await self._thaw("signal")
        await super().send_signal(signum)

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Thaw, so that the kernel reads the request that was just sent to it."""
        await self._thaw("shutdown")
        await super().shutdown_requested(restart=restart)

    async def cleanup(self, restart: bool = False) -> None:
        """As `LocalProvisioner`."""
        self._let_go()
        await super().cleanup(restart=restart)

    async def _thaw(self, why: str) -> None:
        """Have the kernel thawed and unlocked; returns within `THAW_LIMIT_S`, whatever happened."""
        kernel = self._kernel
        if kernel is None or kernel.has_exited:
            return
        link = active_link()
        if link is not None and link.loop is asyncio.get_running_loop():
            nobody_answers = await _thaw_by_link(link, kernel, why)
        else:
            # No extension in this process (nbclient, papermill), or it lives in another loop that may be waiting
            # for this very call: a connection of our own, in a thread of our own.
            with_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="krex-thaw")
            try:
                nobody_answers = await asyncio.get_running_loop().run_in_executor(
                    with_thread, thaw_by_short_connection, kernel.pid, why, THAW_LIMIT_S
                )
            finally:
                with_thread.shutdown(wait=False)
        if nobody_answers and kernel.state == "T":
            self.log.warning(
                "KREX continues kernel %s: its coordinator died while it was stopped", self.kernel_id
            )
            kernel.send(signal.SIGCONT)

    def _let_go(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.close()


async def _thaw_by_link(link: Link, kernel: Process, why: str) -> bool:
    """Ask for a thaw; True where the coordinator died and none has taken its place."""
    deadline_s = link.loop.time() + THAW_LIMIT_S
    # A coordinator that just died has a successor in a moment, and that one thaws while it starts.
    if not link.connected and link.lost_coordinator:
        await link.wait_connected(THAW_LIMIT_S)
    if link.connected:
        request = Ungate(request_id=link.next_request_id(), pid=kernel.pid, why=why)
        try:
            await link.ask(request, timeout_s=max(0.01, deadline_s - link.loop.time()))
        except KrexError:
            # Refused: not gated. Unanswered: whether it lives is the link's to find out, and only a dead one
            # leaves its kernels to us.
            return link.lost_coordinator
        return False
    return link.lost_coordinator


def thaw_by_short_connection(pid: int, why: str, limit_s: float) -> bool:
    """Ask the coordinator of this user to thaw a process, over a connection of its own; blocks at most ``limit_s``.

    Returns True where a coordinator died there: its socket is left and nobody listens. A socket that does not
    exist is no sign of one, nor is one that is slow to answer.
    """
    deadline_s = time.monotonic() + limit_s
    codec = wire.client_side()
    try:
        with connect(location().socket) as connection:
            connection.settimeout(limit_s)
            for message in (Hello(role="viewer", label="signal"), Ungate(request_id=1, pid=pid, why=why)):
                for packet in codec.packets(message):
                    connection.send(packet)
            assembler = wire.Assembler(wire.MAX_ANSWER_BYTES)
            while (remaining_s := deadline_s - time.monotonic()) > 0:
                connection.settimeout(remaining_s)
                packet = connection.recv(wire.MAX_REQUEST_BYTES + 2)
                body = assembler.feed(packet) if packet else b""
                if body is None:
                    continue
                if not body or getattr(codec.decode(body), "request_id", None) == 1:
                    break
    except ConnectionRefusedError:
        return True
    except (OSError, KrexError, wire.WireError):
        return False
    return False


def _continue_when_parent_dies(before: Callable[[], None] | None) -> None:
    """In the forked child: SIGCONT at the parent's death, unless something else is set to come then already.

    A stopped process whose parent died would stay stopped for ever. A launcher's SIGKILL is left alone.
    """
    if before is not None:
        before()
    chosen = ctypes.c_int(0)
    if (
        _prctl is not None
        and _prctl(_PR_GET_PDEATHSIG, ctypes.byref(chosen), 0, 0, 0) == 0
        and chosen.value == 0
    ):
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def _find_prctl() -> Callable[..., int] | None:
    # Resolved at import: between fork and exec nothing may be loaded.
    if sys.platform != "linux":
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), "prctl", None)
    return found


_prctl = _find_prctl()


def _in_loop_of(link: Link, call: Callable[[KernelRecord], None], record: KernelRecord) -> None:
    if asyncio.get_running_loop() is link.loop:
        call(record)
    else:
        link.loop.call_soon_threadsafe(call, record)


def _root_dir(manager: Any) -> str:
    root_dir = getattr(getattr(manager, "parent", None), "root_dir", "")
    return str(Path(root_dir)) if root_dir else ""
