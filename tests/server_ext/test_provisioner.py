"""The provisioner where no extension is loaded (nbclient, papermill), and what it asks the kernel of Linux for."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jupyter_client import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from krex_jupyter.server_ext import provisioner
from krex_jupyter.server_ext.extension import provisioner_is_installed
from krex_jupyter.server_ext.kernels import local_process
from krex_jupyter.server_ext.processes import Process

from .marks import needs_entry_point
from .waiting import eventually

SHOW_PARENT_DEATH_SIGNAL = """
import ctypes
chosen = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(chosen), 0, 0, 0)
print(chosen.value)
"""

LAUNCH_STOP_AND_DIE = """
import asyncio, os, signal, sys
from jupyter_client import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
KernelProvisionerFactory.instance().default_provisioner_name = "krex-provisioner"
async def main():
    manager = AsyncKernelManager()
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=30)
    os.kill(manager.provisioner.pid, signal.SIGSTOP)
    print(manager.provisioner.pid, flush=True)
    sys.stdin.readline()
    os._exit(0)
asyncio.run(main())
"""


@asynccontextmanager
async def kernel() -> AsyncIterator[tuple[AsyncKernelManager, Process]]:
    """A real kernel started by the provisioner; gone afterwards, also if it was stopped."""
    KernelProvisionerFactory.instance().default_provisioner_name = provisioner.NAME
    manager = AsyncKernelManager()
    await manager.start_kernel()
    process = Process.open(manager.provisioner.pid)
    assert process is not None
    try:
        client = manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=30)
        client.stop_channels()
        yield manager, process
    finally:
        process.send(signal.SIGCONT)
        await manager.shutdown_kernel(now=True)
        assert process.has_exited
        process.close()


async def stop(process: Process) -> None:
    process.send(signal.SIGSTOP)
    await eventually(lambda: process.state == "T", "stopped")


@needs_entry_point
async def test_a_kernel_works_as_before_where_no_coordinator_ever_ran(
    krex_socket: Path, jp_environ: None
) -> None:
    async with kernel() as (manager, process):
        assert isinstance(manager.provisioner, provisioner.KrexProvisioner)
        await manager.interrupt_kernel()
        await manager.restart_kernel(now=True)
        assert process.has_exited
        assert await manager.is_alive()


@needs_entry_point
async def test_a_kernel_that_somebody_else_stopped_is_not_continued(
    krex_socket: Path, jp_environ: None
) -> None:
    async with kernel() as (manager, process):
        await stop(process)
        await manager.interrupt_kernel()
        assert process.state == "T"


@needs_entry_point
async def test_a_kernel_stopped_under_a_coordinator_that_died_is_continued(
    krex_socket: Path, jp_environ: None
) -> None:
    async with kernel() as (manager, process):
        await stop(process)
        # What a killed coordinator leaves: its socket, and nobody behind it.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(krex_socket))
            listener.listen(1)
        await manager.interrupt_kernel()
        await eventually(lambda: process.state not in {"T", ""}, "continued")


@needs_entry_point
async def test_a_coordinator_that_does_not_answer_holds_a_signal_up_for_half_a_second_at_most(
    krex_socket: Path, jp_environ: None
) -> None:
    async with kernel() as (manager, process):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(krex_socket))
            listener.listen(8)
            await stop(process)
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            await manager.interrupt_kernel()
            assert loop.time() - began_s < provisioner.THAW_LIMIT_S + 0.3
            # It lives, and it alone knows what it stopped.
            assert process.state == "T"


@needs_entry_point
def test_a_stopped_kernel_whose_parent_dies_is_continued_and_ends(
    krex_socket: Path, jp_environ: None
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH_STOP_AND_DIE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        kernel_process = Process.open(int(parent.stdout.readline()))
        assert kernel_process is not None
        try:
            parent.communicate("die\n", timeout=20)
            poller = select.poll()
            poller.register(kernel_process.fd, select.POLLIN)
            assert poller.poll(10_000), f"the kernel is still there, in state {kernel_process.state}"
        finally:
            kernel_process.send(signal.SIGKILL)
            kernel_process.close()


def parent_death_signal(before: Any) -> int:
    shown = subprocess.run(
        [sys.executable, "-c", SHOW_PARENT_DEATH_SIGNAL],
        preexec_fn=functools.partial(provisioner._continue_when_parent_dies, before),
        capture_output=True,
        check=True,
        timeout=20,
    )
    return int(shown.stdout)


def test_a_child_is_continued_at_its_parents_death() -> None:
    assert parent_death_signal(None) == signal.SIGCONT


def test_a_launchers_own_parent_death_signal_is_kept() -> None:
    prctl = ctypes.CDLL(None).prctl
    assert parent_death_signal(lambda: prctl(1, int(signal.SIGKILL), 0, 0, 0)) == signal.SIGKILL


def test_the_entry_point_is_looked_for_where_python_looks(tmp_path: Path) -> None:
    assert not provisioner_is_installed([str(tmp_path)])
    metadata = tmp_path / "some-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[jupyter_client.kernel_provisioners]\n"
        "krex-provisioner = krex_jupyter.server_ext.provisioner:KrexProvisioner\n"
    )
    assert provisioner_is_installed([str(tmp_path)])


def test_a_process_of_another_parent_is_never_taken_for_a_kernel() -> None:
    assert local_process(SimpleNamespace(provisioner=SimpleNamespace(pid=os.getppid()))) is None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = local_process(SimpleNamespace(provisioner=SimpleNamespace(pid=child.pid)))
        assert found is not None
        assert found.pid == child.pid
        found.close()
        child.kill()
