"""A coordinator of its own for each test, and the proof that nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from krex_jupyter.devices.nvidia import NvidiaBackend
from krex_jupyter.runtime import client, region
from tests.scripts import Scripts, descendants_matching, state_of, wait_thawed, wait_until
from tests.terminals import Terminal


def pytest_configure() -> None:
    """Ctrl-C works here and in what tests start, also where this run is a shell's background job, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _outside_any_region() -> None:
    """What one test failed to leave is not the next one's region."""
    region._current.set(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests run where there is a GPU whose driver offers the lock, and are skipped, visibly, elsewhere."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not any("driver-lock" in info.gates for info in NvidiaBackend().devices()):
        for item in wanting:
            item.add_marker(
                pytest.mark.skip(reason="needs an NVIDIA GPU whose driver offers the process lock")
            )


@dataclass(frozen=True)
class Place:
    """Where a test's coordinator lives."""

    directory: Path

    @property
    def socket(self) -> Path:
        return self.directory / "krex.sock"

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    def daemons(self) -> list[int]:
        """Pids of its coordinator and guardian, and of whatever starts them."""
        return list(descendants_matching(str(self.directory)))

    def coordinator(self) -> int:
        return int((self.directory / "coordinator.lock").read_text(encoding="ascii").split()[1])

    def guardian(self) -> int:
        (child,) = Path(f"/proc/{self.coordinator()}/task/{self.coordinator()}/children").read_text().split()
        return int(child)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A private place for a coordinator, which regions of this test and its scripts start and use."""
    directory = Path(tempfile.mkdtemp(prefix="krex-test-"))
    locks = directory / "locks"
    locks.mkdir()
    monkeypatch.setenv("KREX_SOCKET", str(directory / "krex.sock"))
    monkeypatch.setenv("KREX_LOCK_DIR", str(locks))
    monkeypatch.delenv("KREX_DEVICE", raising=False)
    found = Place(directory)
    yield found
    client.leave()
    for pid in found.daemons():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)
    try:
        wait_until(lambda: not found.daemons(), "coordinator and guardian have ended", 8.0, found.daemons)
    except AssertionError:
        for pid in found.daemons():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def scripts(place: Place) -> Iterator[Scripts]:
    """Starts child processes; at the end none of them may still stand frozen, and all are ended."""
    started = Scripts()
    yield started
    client.leave()
    try:
        # Owners first: with them their regions end, and whoever they froze must go on by that alone.
        for script in started.started:
            if state_of(script.pid) != "T":
                script.end()
        for script in started.started:
            if script.pid not in started.stopped_by_test and script.process.poll() is None:
                wait_thawed(script.pid, 3.0)
    finally:
        started.end()


@pytest.fixture
def terminal(scripts: Scripts) -> Iterator[Terminal]:
    """A terminal with a real interactive shell; what runs on it is ended before other scripts are."""
    found = Terminal()
    yield found
    found.end()
