"""Connections and the processes behind them: who speaks, established by the kernel and not by what they say.

A peer's identity is its socket's credentials and pidfd. The connection ends with the process that opened it: a
forked child that keeps the descriptor open keeps nothing alive. Nothing here decides; `daemon.py` reacts.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from krex_jupyter.identity import has_ended, peer_pidfd, pid_of, reference
from krex_jupyter.locate import peer_credentials, short_address
from krex_jupyter.protocol import Hello, Message, ProcessRef, ToCoordinator
from krex_jupyter.wire import MAX_ANSWER_BYTES, Codec, WireError, close_all, coordinator_side, receive_packet

_MAX_OUTGOING = 10_000
"""Packets queued for a peer that does not read, before it is cut off."""
_MAX_OUTGOING_BYTES = MAX_ANSWER_BYTES
"""The same in bytes: one whole answer of the largest kind."""


class PeerRefused(ConnectionError):
    """A connection whose peer cannot be identified."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The process that opened a connection."""

    process: ProcessRef
    uid: int
    pidfd: int
    """Owned by the `Connection`."""


@dataclass(eq=False)
class Participant:
    """A process that takes part, however many connections it has."""

    process: ProcessRef
    uid: int
    pidfd: int
    label: str = ""
    kernel_id: str = ""
    notebook: str = ""
    joined: bool = False
    registered: bool = False
    protected: bool = False
    foreign: bool = False
    """It never took part; a region with ``foreign="gate"`` had it gated."""
    gpu_library: bool | None = None
    contexts: tuple[str, ...] | None = None
    """Devices that it has GPU contexts on, as of the last look; None: not known."""
    connections: set[Connection] = field(default_factory=set)

    @property
    def key(self) -> str:
        """Identity as a string, for the queue."""
        return f"{self.process.pid}:{self.process.start_ticks}:{self.process.inode}"


class Connection:
    """One accepted connection; non-blocking both ways."""

    def __init__(self, accepted: socket.socket, codec: Codec[ToCoordinator]) -> None:
        """Identify the peer. Raises `PeerRefused`, and closes, where that fails."""
        self.socket = accepted
        self._codec = codec
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self.hello: Hello | None = None
        self.participant: Participant | None = None
        self.subscribed = False
        self.closed = False
        accepted.setblocking(False)
        try:
            self.peer = _credentials(accepted)
        except (OSError, PeerRefused) as error:
            accepted.close()
            raise PeerRefused(str(error)) from error

    def fileno(self) -> int:
        """For the selector."""
        return self.socket.fileno()

    def receive(self) -> tuple[ToCoordinator, list[int]] | None:
        """The next message and its descriptors (the caller owns them); None at the end of the connection.

        Raises `BlockingIOError` where nothing is there, `WireError` for what is no message.
        """
        try:
            packet, fds = receive_packet(self.socket, descriptors=True)
        except ConnectionResetError:
            return None
        if not packet:
            close_all(fds)
            return None
        try:
            if packet[:1] != b"\x00":
                raise WireError("requests come in one packet")
            return self._codec.decode(packet[1:]), fds
        except WireError:
            close_all(fds)
            raise

    def send(self, message: Message) -> bool:
        """Send, or queue what does not fit; False where the peer is to be cut off because it never reads."""
        if self.closed:
            return True
        for packet in self._codec.packets(message):
            self._outgoing.append(packet)
            self._outgoing_bytes += len(packet)
        return self.flush()

    def flush(self) -> bool:
        """Send what is queued; False as `send`."""
        while self._outgoing:
            try:
                self.socket.send(self._outgoing[0])
            except BlockingIOError:
                return len(self._outgoing) <= _MAX_OUTGOING and self._outgoing_bytes <= _MAX_OUTGOING_BYTES
            except OSError:
                # The end of the connection is read, and handled, on the receiving side.
                self._outgoing.clear()
                self._outgoing_bytes = 0
                return True
            self._outgoing_bytes -= len(self._outgoing.popleft())
        return True

    @property
    def wants_to_write(self) -> bool:
        """Something is queued."""
        return bool(self._outgoing)

    def close(self) -> None:
        """Close socket and pidfd; idempotent."""
        if not self.closed:
            self.closed = True
            self.socket.close()
            os.close(self.peer.pidfd)


def listen(path: Path) -> socket.socket:
    """A listening socket at ``path``, in place of whatever stale socket is there.

    The caller holds the lock that makes it the only coordinator. Raises `OSError`.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    with short_address(path) as address:
        listener.bind(address)
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def new_codec() -> Codec[ToCoordinator]:
    """One codec serves all connections."""
    return coordinator_side()


def _credentials(accepted: socket.socket) -> Credentials:
    pid, uid = peer_credentials(accepted)
    if pid <= 0:
        raise PeerRefused("the peer's process is not visible from this pid namespace")
    pidfd = peer_pidfd(accepted)
    if pidfd is None:
        # Before Linux 6.5. The connection is fresh, and the identity is compared below.
        pidfd = os.pidfd_open(pid)
    os.set_inheritable(pidfd, False)
    process = reference(pid, pidfd)
    if process is None or pid_of(pidfd) <= 0 or has_ended(pidfd):
        os.close(pidfd)
        raise PeerRefused(f"the peer (pid {pid}) is gone")
    return Credentials(process, uid, pidfd)
