"""A real Jupyter server with the extension, beside a coordinator that nobody else can meet."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_core.utils import ensure_event_loop
from pytest_jupyter.jupyter_server import *  # noqa: F403
from traitlets.config import Config

from krex_jupyter.server_ext.extension import KrexExtension
from krex_jupyter.server_ext.processes import Process


@pytest.fixture
def krex_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's coordinator listens; whatever it started there is gone afterwards."""
    directory = tmp_path / "krex"
    directory.mkdir(mode=0o700)
    socket = directory / "krex.sock"
    monkeypatch.setenv("KREX_SOCKET", str(socket))
    monkeypatch.setenv("KREX_LOCK_DIR", str(directory))
    yield socket
    end_all_that_mention(str(directory))


@pytest.fixture(autouse=True)
def jp_asyncio_loop(krex_socket: Path) -> Iterator[asyncio.AbstractEventLoop]:
    """As the plugin's, but inside `krex_socket`: the server goes first, or it would replace what is ended there."""
    loop = ensure_event_loop(prefer_selector_loop=True)
    yield loop
    loop.close()


def end_all_that_mention(mark: str) -> None:
    """End the coordinators and guardians of one test, found by the private path on their command lines."""
    ended: list[Process] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        process = Process.open(int(entry.name))
        if process is None:
            continue
        if any(mark in part for part in process.command) and "krex_jupyter" in " ".join(process.command):
            process.send(signal.SIGCONT)
            process.send(signal.SIGKILL)
            ended.append(process)
        else:
            process.close()
    deadline_s = time.monotonic() + 5.0
    for process in ended:
        while not process.has_exited and time.monotonic() < deadline_s:
            os.sched_yield()
        assert process.has_exited
        process.close()


@pytest.fixture
def jp_server_config(krex_socket: Path) -> Config:
    return Config({"ServerApp": {"jpserver_extensions": {"krex_jupyter": True}}})


@pytest.fixture
def extension(jp_serverapp: object) -> KrexExtension:
    (found,) = jp_serverapp.extension_manager.extension_apps["krex_jupyter"]  # type: ignore[attr-defined]
    assert isinstance(found, KrexExtension)
    return found


@pytest.fixture(autouse=True)
def _factory_of_its_own() -> Iterator[None]:
    """The provisioner factory is a singleton of the process; each test starts with a fresh one."""
    KernelProvisionerFactory.clear_instance()
    yield
    KernelProvisionerFactory.clear_instance()
