"""Packets: every message survives the trip, and what is no message is refused without harm."""

from __future__ import annotations

import contextlib
import os
import socket
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from krex_jupyter import protocol, wire
from krex_jupyter.protocol import Failed, Hello, Message, Ping, Register
from krex_jupyter.wire import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    Assembler,
    Codec,
    WireError,
    close_all,
    receive_packet,
)

SIDES: dict[str, tuple[Callable[[], Codec[Any]], Any]] = {
    "to the coordinator": (wire.coordinator_side, protocol.ToCoordinator),
    "from the coordinator": (wire.client_side, protocol.FromCoordinator),
    "to the guardian": (wire.guardian_side, protocol.ToGuardian),
    "from the guardian": (wire.guarded_side, protocol.FromGuardian),
}
DIRECTED = [(side, kind) for side, (_, union) in SIDES.items() for kind in typing.get_args(union)]
few_examples = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation of `protocol.py`."""
    plain: dict[Any, st.SearchStrategy[Any]] = {
        type(None): st.none(),
        bool: st.booleans(),
        int: st.integers(-(2**31), 2**53),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=12),
    }
    if kind in plain:
        return plain[kind]
    if kind == protocol.Number:
        return st.integers(-(2**53), 2**53)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(one) for one in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*[values(one) for one in arguments])
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.deferred(lambda: structs(kind))
    raise AssertionError(f"no values known for {kind}")


_structs: dict[type, st.SearchStrategy[Any]] = {}


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Instances of a struct, all fields drawn."""
    if kind not in _structs:
        fields = {field.name: values(field.type) for field in msgspec.structs.fields(kind)}
        _structs[kind] = st.builds(kind, **fields)
    return _structs[kind]


def assembled(packets: list[bytes], limit_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """The body of one message, complete with its last packet and not before."""
    assembler = Assembler(limit_bytes)
    bodies = [assembler.feed(packet) for packet in packets]
    assert all(body is None for body in bodies[:-1])
    assert bodies[-1] is not None
    return bodies[-1]


# --- Messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "kind"), DIRECTED, ids=lambda value: getattr(value, "__name__", value))
@few_examples
@given(data=st.data())
def test_every_message_comes_out_as_it_went_in(side: str, kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(structs(kind))
    codec = SIDES[side][0]()
    assert codec.decode(assembled(codec.packets(message))) == message


def test_every_message_has_a_direction() -> None:
    def below(kind: type) -> Iterator[type]:
        for one in kind.__subclasses__():
            yield one
            yield from below(one)

    # Messages that other modules define for their own wires are theirs to test.
    # `Unavailable` goes to a browser as text of a WebSocket, not through a wire of these.
    ours = {kind for kind in below(Message) if kind.__module__ == Message.__module__}
    assert {kind for _, kind in DIRECTED} | set(typing.get_args(protocol.ToBrowser)) == ours


@given(st.integers(0, 300_000), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_a_large_message_is_cut_into_packets_that_fit_and_put_together_again(size: int, width: int) -> None:
    codec = wire.client_side()
    message = Failed(request_id=1, code="ended", detail=chr((0x61, 0xE9, 0x20AC, 0x1F600)[width - 1]) * size)
    packets = codec.packets(message)
    assert all(len(packet) <= MAX_REQUEST_BYTES for packet in packets)
    assert [packet[:1] for packet in packets] == [b"\x01"] * (len(packets) - 1) + [b"\x00"]
    assert codec.decode(assembled(packets)) == message


def test_messages_may_follow_each_other_through_one_assembler() -> None:
    codec = wire.client_side()
    sent = [Failed(request_id=number, code="ended", detail="x" * number * 50_000) for number in range(4)]
    assembler = Assembler(MAX_ANSWER_BYTES)
    bodies = [assembler.feed(packet) for message in sent for packet in codec.packets(message)]
    assert [codec.decode(body) for body in bodies if body is not None] == sent


def test_fields_of_a_later_version_are_ignored() -> None:
    assert wire.coordinator_side().decode(b'{"type":"ping","request_id":3,"colour":"blue"}') == Ping(
        request_id=3
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"type":"teleport","request_id":3}',
        b'{"request_id":3}',
        b'{"type":"ping"}',
        b'{"type":"ping","request_id":"three"}',
        b'{"type":"pong","request_id":3}',
        b'{"type":"ping","request_id":3} trailing',
        b'{"type":"ping","request_id":3',
        b'{"type":"hello","label":"\xff"}',
        b'{"type":"hello","label":"\\ud800"}',
        b'{"type":"acquire","request_id":1,"devices":["a"],"timeout_s":1e999}',
        b"[" * 100_000,
        b'{"type":"ping","request_id":3,"more":' + b"[" * 100_000,
        b"null",
        b"",
    ],
    ids=lambda body: body[:40].decode("latin1"),
)
def test_what_is_no_message_of_this_direction_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="not a message of this protocol"):
        wire.coordinator_side().decode(body)


@given(st.binary(max_size=200), st.sampled_from(sorted(SIDES)))
def test_garbage_is_refused_and_nothing_else_happens(garbage: bytes, side: str) -> None:
    with pytest.raises(WireError):
        SIDES[side][0]().decode(garbage)


@given(st.binary(max_size=60), st.integers(0, 100), st.integers(1, 255))
def test_a_damaged_message_is_refused_or_another_message(more: bytes, at: int, change: int) -> None:
    codec = wire.coordinator_side()
    body = bytearray(codec.packets(Hello(label="a label", notebook="a.ipynb"))[0][1:])
    body[at % len(body)] ^= change
    for damaged in (bytes(body), bytes(body) + more):
        with contextlib.suppress(WireError):
            assert isinstance(codec.decode(damaged), Message)


# --- Packets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packet", [b"\x02{}", b"{}", b"\xff", b""])
def test_a_packet_without_one_of_the_two_flags_is_refused(packet: bytes) -> None:
    with pytest.raises(WireError, match="neither of the two flags"):
        Assembler(100).feed(packet)


def test_a_message_over_the_limit_is_refused_however_it_is_cut() -> None:
    assert assembled([b"\x01" + b"x" * 60, b"\x00" + b"x" * 40], 100) == b"x" * 100
    with pytest.raises(WireError, match="over 100 bytes"):
        assembled([b"\x01" + b"x" * 60, b"\x00" + b"x" * 41], 100)
    with pytest.raises(WireError, match="over 100 bytes"):
        assembled([b"\x00" + b"x" * 101], 100)


# --- Sockets ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """(ours, theirs)"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    # A full buffer is a test's mistake, and is to fail soon.
    theirs.settimeout(5.0)
    with ours, theirs:
        yield ours, theirs


def open_descriptors() -> set[str]:
    """What this process has open; the listing's own descriptor is closed again and left out."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd", name)
        try:
            found.add(f"{name} {path.readlink()}")
        except FileNotFoundError:
            continue
    return found


@pytest.fixture
def pipe() -> Iterator[int]:
    """A descriptor to send along."""
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


Pair = tuple[socket.socket, socket.socket]


@pytest.mark.parametrize("descriptors", [False, True])
def test_one_packet_is_read_at_a_time(pair: Pair, descriptors: bool) -> None:
    ours, theirs = pair
    theirs.send(b"\x00first")
    theirs.send(b"\x00second")
    assert receive_packet(ours, descriptors=descriptors) == (b"\x00first", [])
    assert receive_packet(ours, descriptors=descriptors) == (b"\x00second", [])
    with pytest.raises(BlockingIOError):
        receive_packet(ours, descriptors=descriptors)
    theirs.close()
    assert receive_packet(ours, descriptors=descriptors) == (b"", [])


@pytest.mark.parametrize("descriptors", [False, True])
def test_the_largest_packet_passes_and_a_larger_one_is_refused(pair: Pair, descriptors: bool) -> None:
    ours, theirs = pair
    theirs.send(b"\x00" + b"x" * MAX_REQUEST_BYTES)
    assert len(receive_packet(ours, descriptors=descriptors)[0]) == MAX_REQUEST_BYTES + 1
    for size in (MAX_REQUEST_BYTES + 1, 2 * MAX_REQUEST_BYTES):
        theirs.send(b"\x00" + b"x" * size)
        with pytest.raises(WireError, match=f"over {MAX_REQUEST_BYTES} bytes"):
            receive_packet(ours, descriptors=descriptors)
    theirs.send(b"\x00fine")
    assert receive_packet(ours, descriptors=descriptors) == (b"\x00fine", [])


def test_descriptors_travel_with_their_packet_and_do_not_outlive_an_exec(pair: Pair, pipe: int) -> None:
    ours, theirs = pair
    socket.send_fds(theirs, [wire.coordinator_side().packets(Register(request_id=1))[0]], [pipe])
    packet, fds = receive_packet(ours, descriptors=True)
    assert wire.coordinator_side().decode(packet[1:]) == Register(request_id=1)
    assert len(fds) == 1
    assert os.path.sameopenfile(fds[0], pipe)
    assert not os.get_inheritable(fds[0])
    close_all(fds)
    close_all(fds)


def test_descriptors_where_none_belong_are_closed(pair: Pair, pipe: int) -> None:
    ours, theirs = pair
    before = open_descriptors()
    socket.send_fds(theirs, [b"\x00{}"], [pipe, pipe])
    assert receive_packet(ours) == (b"\x00{}", [])
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("packet", "count"),
    [(b"\x00{}", 5), (b"\x00{}", 100), (b"\x00" + b"x" * (MAX_REQUEST_BYTES + 1), 1)],
    ids=["five descriptors", "a hundred", "an oversized packet"],
)
def test_descriptors_of_a_refused_packet_are_closed(pair: Pair, pipe: int, packet: bytes, count: int) -> None:
    ours, theirs = pair
    before = open_descriptors()
    socket.send_fds(theirs, [packet], [pipe] * count)
    with pytest.raises(WireError):
        receive_packet(ours, descriptors=True)
    assert open_descriptors() == before
    socket.send_fds(theirs, [b"\x00fine"], [pipe] * 4)
    packet, fds = receive_packet(ours, descriptors=True)
    assert (packet, len(fds)) == (b"\x00fine", 4)
    close_all(fds)
    assert open_descriptors() == before


def test_descriptors_with_an_empty_packet_are_the_callers_to_close(pair: Pair, pipe: int) -> None:
    """An empty packet reads like the end of a connection, but may carry something."""
    ours, theirs = pair
    before = open_descriptors()
    socket.send_fds(theirs, [b""], [pipe])
    packet, fds = receive_packet(ours, descriptors=True)
    assert packet == b""
    close_all(fds)
    assert open_descriptors() == before
