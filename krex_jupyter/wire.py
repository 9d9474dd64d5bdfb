"""Packets: how a message of `protocol.py` becomes bytes on a ``SOCK_SEQPACKET`` Unix socket, and back.

One packet is one flag byte and JSON. Requests fit one packet (`MAX_REQUEST_BYTES`); answers may be larger (a
history, a status of a thousand participants) and are cut into several packets, all but the last flagged as
continued. Nothing here waits: callers own their timeouts.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from typing import Generic, TypeVar

import msgspec

from .protocol import FromCoordinator, FromGuardian, Message, ToCoordinator, ToGuardian

T = TypeVar("T")

MAX_REQUEST_BYTES = 64 * 1024
"""Largest message a client may send: far above any honest request, far below the socket buffer."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Largest answer that a client reassembles before it gives up on its peer."""

_CHUNK_BYTES = 60 * 1024
_LAST = b"\x00"
_CONTINUED = b"\x01"
_MAX_FDS = 4


class WireError(ValueError):
    """A packet that does not follow the protocol: malformed, oversized, or with descriptors it may not carry."""


class Codec(Generic[T]):
    """Encodes any `Message`, decodes those of one direction."""

    def __init__(self, incoming: type[T]) -> None:
        self._encoder = msgspec.json.Encoder()
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(incoming)

    def packets(self, message: Message) -> list[bytes]:
        """The packets of ``message``, in order."""
        body = self._encoder.encode(message)
        if len(body) <= _CHUNK_BYTES:
            return [_LAST + body]
        chunks = [body[at : at + _CHUNK_BYTES] for at in range(0, len(body), _CHUNK_BYTES)]
        return [_CONTINUED + chunk for chunk in chunks[:-1]] + [_LAST + chunks[-1]]

    def decode(self, body: bytes) -> T:
        """The message in ``body``; raises `WireError` where it is none of this direction."""
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            # Bad UTF-8 is a UnicodeDecodeError in older versions of msgspec.
            raise WireError(f"not a message of this protocol: {error}") from error


def coordinator_side() -> Codec[ToCoordinator]:
    """What the coordinator reads from its clients."""
    return Codec(ToCoordinator)  # type: ignore[arg-type]


def client_side() -> Codec[FromCoordinator]:
    """What a client reads from the coordinator."""
    return Codec(FromCoordinator)  # type: ignore[arg-type]


def guardian_side() -> Codec[ToGuardian]:
    """What the guardian reads from the coordinator."""
    return Codec(ToGuardian)  # type: ignore[arg-type]


def guarded_side() -> Codec[FromGuardian]:
    """What the coordinator reads from the guardian."""
    return Codec(FromGuardian)  # type: ignore[arg-type]


class Assembler:
    """Puts packets back together."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def feed(self, packet: bytes) -> bytes | None:
        """The whole body once ``packet`` completes it, else None; raises `WireError` past the limit."""
        flag, body = packet[:1], packet[1:]
        if flag not in (_LAST, _CONTINUED):
            raise WireError("the packet starts with neither of the two flags")
        self._size_bytes += len(body)
        if self._size_bytes > self._limit_bytes:
            raise WireError(f"the message has over {self._limit_bytes} bytes")
        self._parts.append(body)
        if flag == _CONTINUED:
            return None
        whole = b"".join(self._parts)
        self._parts.clear()
        self._size_bytes = 0
        return whole


def receive_packet(connection: socket.socket, *, descriptors: bool = False) -> tuple[bytes, list[int]]:
    """One packet and the descriptors with it; an empty packet is the end of the connection.

    Raises `BlockingIOError` where nothing is there, `WireError` for a packet larger than `MAX_REQUEST_BYTES`
    or one with unwanted descriptors (they are closed).
    """
    if not descriptors:
        # A plain recv drops any descriptors that were sent along, which is what is wanted here.
        packet = connection.recv(MAX_REQUEST_BYTES + 2)
        if len(packet) > MAX_REQUEST_BYTES + 1:
            raise WireError(f"the packet has over {MAX_REQUEST_BYTES} bytes")
        return packet, []
    fds = array.array("i")
    packet, ancillary, flags, _ = connection.recvmsg(
        MAX_REQUEST_BYTES + 1, socket.CMSG_LEN(_MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(list(fds))
        raise WireError(f"the packet has over {MAX_REQUEST_BYTES} bytes or over {_MAX_FDS} descriptors")
    return packet, list(fds)


def close_all(fds: list[int]) -> None:
    """Close descriptors that nobody wants; one that is closed already is fine."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
