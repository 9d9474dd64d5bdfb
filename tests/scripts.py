"""Real child processes for tests: started, spoken with, and gone at the end, frozen ones included."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.left_overs import processes_that_mention

ROOT = Path(__file__).parent.parent

JOIN = """
import os, sys, threading, time
from krex_jupyter.runtime import client
client.join(label=sys.argv[1] if len(sys.argv) > 1 else "")
print("joined", flush=True)
"""
"""A participant that does nothing."""

WAIT = JOIN + "sys.stdin.read()\n"

COUNT = (
    JOIN
    + """
import mmap
counter = memoryview(mmap.mmap(int(sys.argv[2]), 8)).cast("Q")
while True:
    counter[0] += 1
"""
)
"""A participant whose progress can be read by `Counter`."""

THREADS = JOIN.replace(
    'print("joined"',
    '[threading.Thread(target=threading.Event().wait, daemon=True).start() for _ in range(12)]\nprint("joined"',
)
"""A participant with as many threads as an ipykernel."""

REGION = """
import os, sys, time
import krex_jupyter as krex
device = sys.argv[1]
with krex.exclusive(device, label="holder") as region:
    print("held", region.region_id, flush=True)
    for line in sys.stdin:
        if line.strip() == "leave":
            break
        if line.strip() == "spin":
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                pass
            print("spun", flush=True)
print("left", region.report.verdict, *[reason.code for reason in region.report.reasons], flush=True)
"""
"""Holds a region until told to leave."""


def search_path() -> str:
    """``PYTHONPATH`` of a child that imports the package and these tests."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def wait_until(
    claim: Callable[[], bool], what: str, within_s: float = 10.0, state: Callable[[], object] = str
) -> None:
    """Look until ``claim`` holds; fails with the last state seen."""
    give_up_s = time.monotonic() + within_s
    while not claim():
        if time.monotonic() > give_up_s:
            raise AssertionError(f"after {within_s:g} s still not: {what}; last seen: {state()}")
        select.select([], [], [], 0.005)


def state_of(pid: int) -> str:
    """The state letter of a process; empty where it is gone."""
    try:
        return (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rsplit(")", 1)[1]
            .split()[0]
        )
    except (OSError, IndexError):
        return ""


def is_frozen(pid: int) -> bool:
    """Every thread of the process stands stopped."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(thread / "stat").read_bytes().rsplit(b")", 1)[1].split()[0] for thread in threads]
    except (OSError, IndexError):
        return False
    return bool(states) and all(state == b"T" for state in states)


def wait_frozen(pid: int, within_s: float = 5.0) -> None:
    """Wait until a process stands frozen."""
    wait_until(lambda: is_frozen(pid), f"process {pid} is frozen", within_s, lambda: state_of(pid))


def wait_thawed(pid: int, within_s: float = 5.0) -> float:
    """Wait until a process runs again; returns the seconds that took."""
    started_s = time.monotonic()
    wait_until(lambda: state_of(pid) not in ("T", ""), f"process {pid} runs", within_s, lambda: state_of(pid))
    return time.monotonic() - started_s


class Script:
    """A Python child that prints lines and reads them."""

    def __init__(
        self, code: str, *arguments: str, env: dict[str, str] | None = None, **popen: object
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search_path(), **(env or {})},
            **popen,  # type: ignore[call-overload]
        )
        self._pending = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, within_s: float = 20.0) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        give_up_s = time.monotonic() + within_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self.process.stdout], [], [], max(give_up_s - time.monotonic(), 0.0))
            chunk = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                raise AssertionError(
                    f"no line within {within_s:g} s; so far {self._pending!r}; "
                    f"exit {self.process.poll()}; errors: {self.errors()}"
                )
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode().strip()

    def errors(self) -> str:
        """What it wrote to standard error, if it has ended."""
        if self.process.poll() is None or self.process.stderr is None:
            return "(it runs)"
        return self.process.stderr.read().decode()[-2000:]

    def say(self, line: str) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, within_s: float = 10.0) -> int:
        return self.process.wait(within_s)

    def end(self) -> None:
        """Continue, kill and reap it."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
            self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Counter:
    """Progress of a `COUNT` script, read through shared memory."""

    def __init__(self) -> None:
        import mmap

        self.fd = os.memfd_create("counter")
        os.ftruncate(self.fd, 8)
        self._memory = mmap.mmap(self.fd, 8)

    @property
    def value(self) -> int:
        return int.from_bytes(self._memory[:8], sys.byteorder)

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class Scripts:
    """Starts scripts and ends them all."""

    def __init__(self) -> None:
        self.started: list[Script] = []
        self.stopped_by_test: set[int] = set()
        """Pids that a test stopped on purpose; nobody else may continue them."""
        self._counters: list[Counter] = []
        self._mark = uuid.uuid4().hex
        """In the environment of every script and of whatever it starts, however that detaches itself."""

    def __call__(self, code: str, *arguments: str, **options: Any) -> Script:
        options["env"] = {**(options.get("env") or {}), "KREX_TEST_SCRIPTS": self._mark}
        script = Script(code, *arguments, **options)
        self.started.append(script)
        return script

    def sibling(self, code: str = WAIT, label: str = "sibling", *arguments: str, **options: object) -> Script:
        """A participant, joined."""
        script = self(code, label, *arguments, **options)
        assert script.line() == "joined"
        return script

    def counter(self) -> Counter:
        """Shared memory for a script's progress, closed at the end."""
        counter = Counter()
        self._counters.append(counter)
        return counter

    def counting(self, label: str = "counter") -> tuple[Script, Counter]:
        """A busy participant and its progress."""
        counter = self.counter()
        script = self(COUNT, label, str(counter.fd), pass_fds=(counter.fd,))
        assert script.line() == "joined"
        return script, counter

    def holder(self, device: str = "cpu") -> tuple[Script, str]:
        """A script that holds a region, and the region's id."""
        script = self(REGION, device)
        word, region_id = script.line().split()
        assert word == "held"
        return script, region_id

    def end(self) -> None:
        for script in self.started:
            script.end()
        for pid in processes_that_mention(self._mark):
            # A daemon of a script that was killed before it could end it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        for counter in self._counters:
            counter.close()


def descendants_matching(mark: str) -> Iterator[int]:
    """Pids of our own daemons whose command line mentions a test's private path."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if mark.encode() in command and b"krex_jupyter" in command and int(entry.name) != os.getpid():
                    yield int(entry.name)
