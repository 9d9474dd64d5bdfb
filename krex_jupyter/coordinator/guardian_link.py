"""The coordinator's end of its guardian: starting it, speaking with it, noticing that it is dead or stopped.

When it is gone, siblings may stand frozen with nobody to thaw them. `recover` does what can be done without the
driver: it continues what the journal says is frozen, ends a guardian that is merely stopped, and starts another,
which replays the rest.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from krex_jupyter.enforcement.journal import outstanding
from krex_jupyter.identity import open_same
from krex_jupyter.launch import clean_environment, python_command
from krex_jupyter.protocol import FromGuardian, Message, Ready
from krex_jupyter.wire import Assembler, WireError, guarded_side, receive_packet


class GuardianLink:
    """A guardian process and the socket to it."""

    def __init__(self, journal: Path, driver: str, log: IO[str]) -> None:
        self._journal = journal
        self._driver = driver
        self._log = log
        self._codec = guarded_side()
        self._assembler = Assembler(1 << 24)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.ready = False
        """It has the journal and has replayed it."""
        self.heard_s = 0.0

    @property
    def pid(self) -> int | None:
        """The guardian's pid; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def owes_replay(self) -> bool:
        """An earlier guardian left something gated."""
        return not outstanding(self._journal).empty

    def start(self) -> None:
        """Start a guardian; it is usable once its `Ready` arrives. Raises `OSError`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            # A burst of participants with their descriptors must not make the sender wait.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        command = python_command(
            "krex_jupyter.enforcement.guardian",
            "--link-fd",
            str(theirs.fileno()),
            "--journal",
            str(self._journal),
            "--driver",
            self._driver,
        )
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=clean_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd="/",
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._assembler = Assembler(1 << 24)
        self.ready = False
        self.heard_s = time.monotonic()

    def fileno(self) -> int:
        """For the selector; -1 while there is no guardian."""
        return -1 if self._socket is None else self._socket.fileno()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message. A guardian that is gone or does not read is noticed elsewhere (EOF, lateness)."""
        if self._socket is None:
            return
        for packet in self._codec.packets(message):
            with contextlib.suppress(OSError):
                if fds:
                    socket.send_fds(self._socket, [packet], list(fds))
                else:
                    self._socket.send(packet)

    def messages(self) -> Iterator[FromGuardian]:
        """What has arrived. Raises `ConnectionError` once the guardian is gone."""
        while self._socket is not None:
            try:
                packet, _ = receive_packet(self._socket)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            if not packet:
                raise ConnectionError("the guardian is gone")
            self.heard_s = time.monotonic()
            body = self._assembler.feed(packet)
            if body is None:
                continue
            try:
                message = self._codec.decode(body)
            except WireError as error:
                raise ConnectionError(f"the guardian speaks another protocol: {error}") from error
            if isinstance(message, Ready):
                self.ready = True
            yield message

    def wait_ready(self, timeout_s: float) -> Iterator[FromGuardian]:
        """Wait for `Ready`, bounded; yields what arrives. Raises `TimeoutError` and `ConnectionError`."""
        give_up_s = time.monotonic() + timeout_s
        while not self.ready:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"the guardian was not ready after {timeout_s:g} s")
            select.select([self.fileno()], [], [], left_s)
            yield from self.messages()

    def recover(self) -> None:
        """The guardian is dead or stopped: continue what it froze, end it, start another. Raises `OSError`."""
        for process in outstanding(self._journal).frozen:
            pidfd = open_same(process)
            if pidfd is not None:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
                os.close(pidfd)
        self.stop()
        self.start()

    def stop(self) -> None:
        """End the guardian for certain and reap it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.ready = False

    def dismiss(self, timeout_s: float = 4.0) -> None:
        """Let the guardian undo everything and leave; ends it where that takes too long."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.stop()
