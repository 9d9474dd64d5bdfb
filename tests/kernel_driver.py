"""Drives a real ipykernel over its message channels, as a front end does."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

DEADLINE_S = 30.0


@dataclass
class Cell:
    """What came back from one cell."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)
    ended_at_s: float = 0.0

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message["content"] for message in self.messages if message["msg_type"] == kind]

    @property
    def text(self) -> str:
        """What it printed, on either stream."""
        return "".join(content["text"] for content in self.of("stream"))

    @property
    def result(self) -> str | None:
        """Its Out, as text."""
        results = self.of("execute_result")
        return results[-1]["data"]["text/plain"] if results else None

    @property
    def traceback(self) -> str:
        return "\n".join("\n".join(content["traceback"]) for content in self.of("error"))


class Kernel:
    """A running kernel and its client."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self._manager = manager
        self._client = client
        self.widget_values: list[tuple[float, str]] = []
        """(monotonic time, text) of every change of a widget's value, whichever cell it belongs to."""

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.pid)

    def start(self, code: str) -> str:
        """Send a cell; its message id, for `wait`."""
        # Else a kernel drops what arrives shortly after a cell that raised.
        return str(self._client.execute(code, stop_on_error=False))

    def wait(self, message_id: str, *, until: str | None = None, interrupt: bool = False) -> Cell:
        """Collect a cell's messages to its end; at one with ``until`` return, or interrupt."""
        cell = Cell()
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            message = self._next(deadline_s, cell)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                cell.ended_at_s = time.monotonic()
                break
            cell.messages.append({"msg_type": kind, "content": content, "at_s": time.monotonic()})
            if until is not None and until in repr(content) and kind != "execute_input":
                if not interrupt:
                    return cell
                self.interrupt()
                until, interrupt = None, False
        while True:
            reply = self._client.get_shell_msg(timeout=max(0.0, deadline_s - time.monotonic()))
            if reply["parent_header"].get("msg_id") == message_id:
                cell.reply = reply["content"]
                return cell

    def wait_for_widget(self, text: str) -> str:
        """Wait until a widget's value contains ``text``; that value."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not (self.widget_values and text in self.widget_values[-1][1]):
            self._next(deadline_s, self.widget_values[-1:])
        return self.widget_values[-1][1]

    def _next(self, deadline_s: float, seen: object) -> dict[str, Any]:
        try:
            message: dict[str, Any] = self._client.get_iopub_msg(
                timeout=max(0.0, deadline_s - time.monotonic())
            )
        except queue.Empty:
            raise AssertionError(f"nothing more came from the kernel; so far: {seen}") from None
        if message["msg_type"] in ("comm_msg", "comm_open"):
            value = message["content"]["data"].get("state", {}).get("value")
            if isinstance(value, str):
                self.widget_values.append((time.monotonic(), value))
        return message

    def run(self, code: str) -> Cell:
        return self.wait(self.start(code))

    def ends_when_asked(self, within_s: float) -> bool:
        """Ask it to shut down, as a server does; whether its process ended by itself in time."""
        pidfd = os.pidfd_open(self.pid)
        try:
            self._client.shutdown()
            return bool(select.select([pidfd], [], [], within_s)[0])
        finally:
            os.close(pidfd)

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)


@contextmanager
def running_kernel(**environment: str) -> Iterator[Kernel]:
    """A kernel that has loaded nothing yet; gone at the end."""
    manager = KernelManager()
    manager.start_kernel(env={**os.environ, **environment})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE_S)
        kernel = Kernel(manager, client)
        kernel.run("%colors nocolor")
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
        manager.context.destroy()


@contextmanager
def private_socket() -> Iterator[Path]:
    """A path for a socket that nobody else uses; short, because such paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="krex-test-") as directory:
        yield Path(directory) / "krex.sock"


@contextmanager
def running_coordinator(socket: Path) -> Iterator[None]:
    """A coordinator at ``socket``; it has ended when the block has."""
    directory = str(socket.parent)
    command = [sys.executable, "-m", "krex_jupyter.coordinator", "--foreground"]
    places = ["--socket", str(socket), "--state-dir", directory, "--lock-dir", directory]
    process = subprocess.Popen([*command, *places])
    try:
        wait_until(lambda: process.poll() is None and socket.is_socket(), "the coordinator's socket")
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def another_holder(socket: Path, label: str = "somebody else") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the cpu device until its input is closed."""
    script = (
        "import sys, krex_jupyter as krex\n"
        f"with krex.exclusive('cpu', cpu='share', label={label!r}) as region:\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "KREX_SOCKET": str(socket)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(timeout=10)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def wait_until(condition: Any, what: str, deadline_s: float = 10.0) -> None:
    """Poll ``condition``; on the deadline say what was waited for and what was seen last."""
    end_s = time.monotonic() + deadline_s
    poller = threading.Event()
    while not (seen := condition()):
        if time.monotonic() > end_s:
            raise AssertionError(f"waited {deadline_s} s for {what}; last seen: {seen!r}")
        poller.wait(0.01)
