"""What the connection does with peers that are not what they should be. Coordinators proper: test_with_coordinator."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from krex_jupyter.errors import CoordinatorUnavailable
from krex_jupyter.protocol import GetStatus, Unavailable
from krex_jupyter.server_ext.connection import Change, KernelRecord, Link
from krex_jupyter.server_ext.processes import Process

from .waiting import eventually

LISTEN_AS_NOBODY = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
os.setgid(65534)
os.setuid(65534)
listener.listen(8)
print("listening", flush=True)
sys.stdin.readline()
"""


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@asynccontextmanager
async def link_to(changes: list[Change]) -> AsyncIterator[Link]:
    link = Link(on_change=changes.append, log=logging.getLogger("krex"), may_start=False)
    link.start()
    try:
        yield link
    finally:
        await link.close()


async def test_a_peer_that_never_answers_is_reported_and_is_not_ended_unless_it_is_a_coordinator(
    krex_socket: Path,
) -> None:
    changes: list[Change] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(krex_socket))
        listener.listen(8)
        async with link_to(changes) as link:
            await eventually(lambda: "unanswered" in link.problem, "the reason")
            assert not link.connected
            assert isinstance(changes[-1], Unavailable)
            with pytest.raises(CoordinatorUnavailable, match="unanswered"):
                await link.ask(GetStatus(request_id=link.next_request_id()))


@pytest.mark.skipif(os.getuid() != 0, reason="listening as another user needs root")
async def test_a_peer_of_another_user_is_not_spoken_to(krex_socket: Path) -> None:
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", LISTEN_AS_NOBODY, str(krex_socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline()
        async with link_to([]) as link:
            await eventually(lambda: "uid 65534" in link.problem, "the reason")
            assert not link.connected
        listener.communicate("\n")


async def test_a_missing_coordinator_is_looked_for_again_and_again(krex_socket: Path) -> None:
    changes: list[Change] = []
    async with link_to(changes) as link:
        await eventually(lambda: len(changes) >= 3, "several attempts")
        assert str(krex_socket) in link.problem


async def test_a_kernel_that_ended_is_forgotten_and_its_descriptor_closed(krex_socket: Path) -> None:
    async with link_to([]) as link:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:  # noqa: ASYNC220
            process = Process.open(child.pid)
            assert process is not None
            link.register(KernelRecord("some-kernel", process))
            assert set(link.kernels) == {"some-kernel"}
            child.communicate(b"\n")
            await eventually(lambda: not link.kernels, "forgotten")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(process.fd)


async def test_closing_leaves_no_task_and_no_descriptor(krex_socket: Path) -> None:
    tasks = asyncio.all_tasks()
    descriptors = open_descriptors()
    async with link_to([]) as link:
        await eventually(lambda: "not to start" in link.problem, "an attempt")
        own = Process.open(os.getppid())
        assert own is not None
        link.register(KernelRecord("some-kernel", own))
    assert asyncio.all_tasks() == tasks
    assert open_descriptors() == descriptors
