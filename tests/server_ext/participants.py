"""Processes that take part in regions by speaking the protocol: real sockets, none of the runtime's conveniences.

Run as ``python -m tests.server_ext.participants LABEL``, it holds a region on the cpu device, prints its id, and
releases it when its standard input ends. In a kernel, `join` makes that kernel a participant.
"""

from __future__ import annotations

import socket
import sys

from krex_jupyter import wire
from krex_jupyter.locate import connect, location
from krex_jupyter.protocol import (
    Acquire,
    Confirm,
    Failed,
    Granted,
    Hello,
    Message,
    OwnerEvidence,
    Release,
    Released,
    Welcome,
)

_presence: list[socket.socket] = []


def join(label: str = "sibling") -> Welcome:
    """Be a participant for as long as this process lives."""
    connection = connect(location().socket)
    _presence.append(connection)
    send(connection, Hello(label=label))
    welcome = receive(connection)
    assert isinstance(welcome, Welcome)
    return welcome


def hold(label: str) -> None:
    """Hold a region on the cpu device until standard input ends."""
    (cpu,) = (device.uuid for device in join(label).devices if device.vendor == "cpu")
    connection = _presence[-1]
    send(connection, Acquire(request_id=1, devices=(cpu,), device_ids=("cpu",), max_hold_s=20.0, label=label))
    while not isinstance(granted := receive(connection), Granted):
        assert not isinstance(granted, Failed), granted
    send(connection, Confirm(region_id=granted.region_id))
    print(granted.region_id, flush=True)
    sys.stdin.readline()
    send(connection, Release(request_id=2, region_id=granted.region_id, owner=OwnerEvidence()))
    while not isinstance(receive(connection), Released):
        pass


def send(connection: socket.socket, message: Message) -> None:
    for packet in wire.client_side().packets(message):
        connection.send(packet)


def receive(connection: socket.socket) -> object:
    assembler = wire.Assembler(wire.MAX_ANSWER_BYTES)
    while True:
        body = assembler.feed(connection.recv(wire.MAX_REQUEST_BYTES + 2) or b"\x00")
        if body is not None:
            return wire.client_side().decode(body)


if __name__ == "__main__":
    hold(sys.argv[1])
