"""Clients that do not follow the protocol: each is answered or cut off, and everybody else is served as before."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import krex_jupyter as krex
from krex_jupyter.launch import start_coordinator
from krex_jupyter.locate import location
from krex_jupyter.runtime import client
from krex_jupyter.wire import MAX_REQUEST_BYTES
from tests.conftest import Place
from tests.scripts import Scripts, is_frozen, wait_until

ANSWER_S = 5.0
OTHER_UID = 65534

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another uid")


class RawClient:
    """A connection that sends whatever it is told to."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(ANSWER_S)
        self.socket.connect(str(path))

    def send(self, body: bytes, fds: tuple[int, ...] = (), flag: bytes = b"\x00") -> None:
        if fds:
            socket.send_fds(self.socket, [flag + body], list(fds))
        else:
            self.socket.send(flag + body)

    def say(self, kind: str, fds: tuple[int, ...] = (), **fields: object) -> None:
        self.send(json.dumps({"type": kind, **fields}).encode(), fds)

    def hear(self) -> dict[str, Any]:
        """Its next message; empty at the end of the connection."""
        body = b""
        while True:
            try:
                packet = self.socket.recv(1 << 20)
            except ConnectionResetError:
                return {}
            if not packet:
                return {}
            body += packet[1:]
            if packet[:1] == b"\x00":
                found: dict[str, Any] = json.loads(body)
                return found

    def hear_until(self, kind: str) -> dict[str, Any]:
        """The next message of a kind; others are skipped."""
        while (message := self.hear()).get("type") != kind:
            assert message, f"the connection ended before a {kind!r} came"
        return message

    def refused(self) -> str:
        """Why the last request came to nothing."""
        message = self.hear_until("failed")
        return f"{message['code']}: {message['detail']}"

    def is_cut_off(self) -> bool:
        while self.hear():
            pass
        return True

    def close(self) -> None:
        self.socket.close()


class Served:
    """A coordinator and the raw clients of a test."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.pid = place.coordinator()
        self.clients: list[RawClient] = []

    def stranger(self) -> RawClient:
        """A client that has said nothing yet."""
        self.clients.append(RawClient(self.place.socket))
        return self.clients[-1]

    def client(self) -> RawClient:
        """A client that has said hello."""
        found = self.stranger()
        found.say("hello", label="raw")
        found.hear_until("welcome")
        return found

    def descriptors(self) -> int:
        """How many the coordinator has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def wait_for_descriptors(self, count: int) -> None:
        """It closes some only after its answer."""
        wait_until(
            lambda: self.descriptors() == count,
            f"it has {count} descriptors",
            5.0,
            self.descriptors,
        )


@pytest.fixture
def served(scripts: Scripts, place: Place) -> Iterator[Served]:
    """A coordinator that afterwards must still be there and still serve a region, with a sibling."""
    start_coordinator(location())
    found = Served(place)
    # The history opens its file in its own time; an answer of it shows that it has.
    krex.history()
    client.leave()
    yield found
    for one in found.clients:
        one.close()
    sibling = scripts.sibling()
    with krex.exclusive("cpu", timeout=5.0):
        assert is_frozen(sibling.pid)
    assert place.coordinator() == found.pid


# --- What is no message --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 60_000,
        b'{"no": "type"}',
        b'{"type": "nonsense"}',
        b'{"type": "granted", "request_id": 1}',
        b'{"type": "ping"}',
        b'{"type": "ping", "request_id": "one"}',
        b'{"type": "ping", "request_id": 1180591620717411303424}',
        b'{"type": "ping", "request_id": -9223372036854775809}',
        b'{"type": "acquire", "request_id": 1, "devices": ["cpu"], "timeout_s": NaN}',
        b'{"type": "acquire", "request_id": 1, "devices": ["cpu"], "max_hold_s": 1e999}',
        b'{"type": "acquire", "request_id": 1, "devices": ["cpu"], "peers": [1180591620717411303424]}',
        b'{"type": "acquire", "request_id": 1, "devices": ["cpu"], "cpu": "fast"}',
        b'{"type": "get_history", "request_id": 1, "limit": 1180591620717411303424}',
        b'{"type": "end", "request_id": 1, "region_id": "\\ud800"}',
    ],
)
def test_what_is_no_message_is_answered_and_cut_off(served: Served, body: bytes) -> None:
    one = served.client()
    one.send(body)
    assert one.refused().startswith("bad_request")
    assert one.is_cut_off()


def test_a_packet_without_its_flag_is_cut_off(served: Served) -> None:
    for flag in (b"\x01", b"{"):
        one = served.client()
        one.send(b'{"type": "ping", "request_id": 1}', flag=flag)
        assert one.refused().startswith("bad_request")
        assert one.is_cut_off()


def test_an_oversized_packet_is_cut_off(served: Served) -> None:
    one = served.client()
    one.say("hello", label="x" * (2 * MAX_REQUEST_BYTES))
    assert str(MAX_REQUEST_BYTES) in one.refused()
    assert one.is_cut_off()


def test_the_largest_message_is_taken(served: Served) -> None:
    one = served.stranger()
    one.say("hello", label="x" * (MAX_REQUEST_BYTES - 100))
    one.hear_until("welcome")
    one.say("get_status", request_id=1)
    assert one.hear_until("status")["request_id"] == 1


def test_whoever_says_nothing_first_is_cut_off(served: Served) -> None:
    one = served.stranger()
    one.say("ping", request_id=1)
    assert "hello" in one.refused()
    assert one.is_cut_off()


# --- What is out of order ------------------------------------------------------------------------------------------


def acquire(one: RawClient, request_id: int = 1, **fields: object) -> None:
    one.say("acquire", request_id=request_id, **{"devices": ["cpu"], "cpu": "share", **fields})


def hold(one: RawClient) -> str:
    """Take a region; returns its id."""
    acquire(one)
    region_id: str = one.hear_until("granted")["region_id"]
    one.say("confirm", region_id=region_id)
    return region_id


def holder() -> str | None:
    """The region that is held."""
    found = krex.status().devices[-1].holder
    return None if found is None else found.region_id


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"timeout_s": -1.0}, "bad_request"),
        ({"max_hold_s": -0.5}, "bad_request"),
        ({"devices": []}, "bad_request"),
        ({"devices": ["cpu", "cpu"]}, "bad_request"),
        ({"device_ids": ["a", "b"]}, "bad_request"),
        ({"devices": ["nowhere"]}, "device_not_found"),
        ({"cpu": "isolate"}, "unsupported"),
        ({"cpu": "freeze", "max_hold_s": 0}, "bad_request"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    served: Served, fields: dict[str, object], reason: str
) -> None:
    one = served.client()
    acquire(one, **fields)
    assert one.refused().startswith(reason)
    hold(one)


def test_a_connection_holds_one_region(served: Served) -> None:
    one = served.client()
    region_id = hold(one)
    acquire(one, 2)
    assert one.refused().startswith("bad_request")
    assert holder() == region_id


def test_a_viewer_holds_none(served: Served) -> None:
    one = served.stranger()
    one.say("hello", role="viewer")
    one.hear_until("welcome")
    acquire(one)
    assert "viewer" in one.refused()


def test_nobody_releases_or_confirms_somebody_elses_region(served: Served) -> None:
    one, other = served.client(), served.client()
    region_id = hold(one)
    other.say("confirm", region_id=region_id)
    other.say("release", request_id=7, region_id=region_id, owner={})
    assert other.refused().startswith("not_found")
    assert holder() == region_id
    one.say("release", request_id=8, region_id=region_id, owner={})
    assert one.hear_until("released")["report"]["region_id"] == region_id


def test_a_region_is_released_once(served: Served) -> None:
    one = served.client()
    region_id = hold(one)
    for request_id in (7, 8):
        one.say("release", request_id=request_id, region_id=region_id, owner={})
    one.hear_until("released")
    assert one.refused().startswith("not_found")


def test_a_region_that_is_not_held_yet_cannot_be_released(served: Served) -> None:
    one, other = served.client(), served.client()
    region_id = hold(one)
    acquire(other)
    queued = other.hear_until("queued")["region_id"]
    other.say("confirm", region_id=queued)
    other.say("release", request_id=7, region_id=queued, owner={})
    assert other.refused().startswith("bad_request")
    one.say("release", request_id=8, region_id=region_id, owner={})
    assert other.hear_until("granted")["region_id"] == queued


def test_a_grant_that_nobody_confirms_goes_to_the_next(served: Served) -> None:
    one, other = served.client(), served.client()
    acquire(one)
    one.hear_until("granted")
    acquire(other)
    assert one.refused().startswith("ended")
    other.hear_until("granted")


def test_an_unknown_region_is_nobodys(served: Served) -> None:
    one = served.client()
    one.say("confirm", region_id="unknown")
    for kind in ("end", "get_report"):
        one.say(kind, request_id=1, region_id="unknown")
        assert one.refused().startswith("not_found")


def test_there_is_nothing_to_cancel_where_nothing_waits(served: Served) -> None:
    one = served.client()
    one.say("cancel", request_id=99)
    assert one.refused().startswith("cancelled")
    region_id = hold(one)
    one.say("cancel", request_id=99)
    assert one.refused().startswith("cancelled")
    assert holder() == region_id


def test_a_second_hello_takes_nothing_away(served: Served) -> None:
    one = served.client()
    region_id = hold(one)
    one.say("hello", label="renamed", role="viewer")
    one.hear_until("welcome")
    assert holder() == region_id


# --- Too much ------------------------------------------------------------------------------------------------------


FLOOD = """
import select, socket, sys, time
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
connection.send(b'\\0{"type": "hello", "role": "viewer"}')
connection.recv(65536)
print("floods", flush=True)
packet = b"\\0" + sys.argv[2].encode()
reads = sys.argv[3] == "reads"
connection.setblocking(False)
sent, end = 0, time.monotonic() + 15
while time.monotonic() < end and not select.select([sys.stdin], [], [], 0)[0]:
    try:
        for _ in range(100):
            connection.send(packet)
            sent += 1
    except BlockingIOError:
        select.select([], [connection], [], 0.01)
    except OSError:
        print("cut off", flush=True)
        break
    if reads:
        try:
            while connection.recv(1 << 20):
                pass
        except BlockingIOError:
            pass
"""


@pytest.mark.parametrize(
    "packet", ['{"type": "ping", "request_id": 1}', '{"type": "get_status", "request_id": 1}']
)
def test_whoever_asks_without_end_and_never_reads_is_cut_off(
    served: Served, scripts: Scripts, packet: str
) -> None:
    flood = scripts(FLOOD, str(served.place.socket), packet, "never")
    assert flood.line() == "floods"
    with krex.exclusive("cpu", timeout=5.0):
        pass
    assert flood.line() == "cut off"


def test_whoever_asks_without_end_does_not_keep_others_waiting(served: Served, scripts: Scripts) -> None:
    sibling = scripts.sibling()
    flood = scripts(FLOOD, str(served.place.socket), '{"type": "get_status", "request_id": 1}', "reads")
    assert flood.line() == "floods"
    started_s = time.monotonic()
    for _ in range(10):
        with krex.exclusive("cpu", timeout=5.0) as region:
            assert is_frozen(sibling.pid)
        assert region.report is not None
        assert region.report.verdict != "revoked"
    # 0.1 s on an idle machine; 2 s where a connection is served until it has nothing more to ask.
    assert time.monotonic() - started_s < 1.0
    flood.say("enough")
    assert flood.wait() == 0


def test_descriptors_that_nobody_asked_for_are_closed(served: Served) -> None:
    one = served.client()
    inside, outside = os.pipe()
    before = served.descriptors()
    try:
        for request_id in range(50):
            one.say("ping", (inside, outside, inside), request_id=request_id)
            assert one.hear()["request_id"] == request_id
        served.wait_for_descriptors(before)
        for kind, fields in (
            ("hello", {}),
            ("confirm", {"region_id": "x"}),
            ("get_status", {"request_id": 1}),
            ("cancel", {"request_id": 1}),
        ):
            one.say(kind, (inside,), **fields)
        one.hear_until("failed")
        served.wait_for_descriptors(before)
        one.say("ping", (inside,) * 20, request_id=1)
        assert "descriptors" in one.refused()
        assert one.is_cut_off()
        # Those of the connection: its socket, its peer's pidfd and its participant's.
        served.wait_for_descriptors(before - 3)
    finally:
        os.close(inside)
        os.close(outside)


# --- Registering ---------------------------------------------------------------------------------------------------


def ended_process() -> int:
    """A pidfd of a process that has ended and was reaped."""
    child = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(child.pid)
    child.wait()
    return pidfd


def zombie(children: list[subprocess.Popen[bytes]]) -> int:
    """A pidfd of a process that has ended and is not reaped yet."""
    child = subprocess.Popen(["true"])
    children.append(child)
    pidfd = os.pidfd_open(child.pid)
    select.select([pidfd], [], [], 5.0)
    return pidfd


@pytest.mark.parametrize("which", ["none", "two", "a file", "ended", "zombie"])
def test_only_a_living_process_is_registered(served: Served, which: str) -> None:
    children: list[subprocess.Popen[bytes]] = []
    makers: dict[str, Callable[[], tuple[int, ...]]] = {
        "none": lambda: (),
        "two": lambda: (os.pidfd_open(os.getpid()), os.pidfd_open(os.getpid())),
        "a file": lambda: (os.open("/dev/null", os.O_RDONLY),),
        "ended": lambda: (ended_process(),),
        "zombie": lambda: (zombie(children),),
    }
    one = served.client()
    before = served.descriptors()
    fds = makers[which]()
    try:
        one.say("register", fds, request_id=5, label="kernel")
        assert "not registered" in one.refused()
        served.wait_for_descriptors(before)
        assert "kernel" not in {found.label for found in krex.status().participants}
    finally:
        for fd in fds:
            os.close(fd)
        for child in children:
            child.wait()


AS_ANOTHER = """
import json, os, socket, sys
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
def ask(fds=(), **message):
    socket.send_fds(connection, [b"\\0" + json.dumps(message).encode()], list(fds))
    return json.loads(connection.recv(1 << 20)[1:])
print(ask(type="hello", role="viewer")["type"], flush=True)
for line in sys.stdin:
    words = line.split()
    if words[0] == "register":
        pidfd = os.pidfd_open(int(words[1]))
        answer = ask((pidfd,), type="register", request_id=1, label="kernel")
        os.close(pidfd)
    elif words[0] == "end":
        answer = ask(type="end", request_id=1, region_id=words[1])
    else:
        answer = ask(type="ungate", request_id=1, pid=int(words[1]))
    print(answer.get("code", answer["type"]), answer.get("detail", ""), flush=True)
"""


@needs_root
def test_another_user_may_not_touch_what_is_not_theirs(served: Served, scripts: Scripts) -> None:
    served.place.directory.chmod(0o711)
    served.place.socket.chmod(0o666)
    other = scripts(AS_ANOTHER, str(served.place.socket))
    assert other.line() == "welcome"
    other.say(f"register {os.getpid()}")
    assert "belongs to uid 0" in other.line()
    other.say(f"register {other.pid}")
    assert other.line() == "done"
    sibling = scripts.sibling()
    with krex.exclusive("cpu") as region:
        other.say(f"end {region.region_id}")
        assert other.line().startswith("not_permitted")
        other.say(f"ungate {sibling.pid}")
        assert other.line().startswith("not_permitted")
        assert is_frozen(sibling.pid)
    assert region.report is not None
    assert region.report.verdict != "revoked"


def test_a_registered_process_that_ends_is_forgotten(served: Served) -> None:
    one = served.client()
    before = served.descriptors()
    child = subprocess.Popen(["sleep", "60"])
    pidfd = os.pidfd_open(child.pid)
    one.say("register", (pidfd,), request_id=5, label="kernel")
    one.hear_until("done")
    assert "kernel" in {found.label for found in krex.status().participants}
    child.send_signal(signal.SIGKILL)
    child.wait()
    os.close(pidfd)
    wait_until(
        lambda: "kernel" not in {found.label for found in krex.status().participants}, "it is forgotten"
    )
    client.leave()
    served.wait_for_descriptors(before)


def test_a_killed_owner_is_told_from_one_that_closes_its_connection(served: Served, scripts: Scripts) -> None:
    """Its socket closes a moment before its process is gone, so what arrives first proves nothing."""
    for _ in range(10):
        owner, region_id = scripts.holder()
        owner.signal(signal.SIGKILL)
        owner.wait()
        wait_until(lambda: holder() is None, "its region has ended")
        assert "owner_died" in krex.report(region_id).reasons[0].detail
    one = served.client()
    region_id = hold(one)
    one.close()
    wait_until(lambda: holder() is None, "its region has ended")
    assert "connection_lost" in krex.report(region_id).reasons[0].detail
