"""Siblings that are not as simple as a process: stopped, traced, in a terminal, forking, daemonised, of another uid."""

from __future__ import annotations

import os
import select
import shlex
import signal
import sys
import time

import pytest

import krex_jupyter as krex
from krex_jupyter.identity import read_stat
from krex_jupyter.protocol import RegionReport, SiblingReport
from tests.conftest import Place
from tests.scripts import (
    REGION,
    Script,
    Scripts,
    is_frozen,
    state_of,
    wait_frozen,
    wait_thawed,
    wait_until,
)
from tests.terminals import Terminal

SPIN_S = 0.05


def spin(duration_s: float = SPIN_S) -> None:
    """Use the CPU, as a measurement does."""
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        pass


def reported(region: krex.Region, pid: int) -> SiblingReport:
    """What the region's report says of one process."""
    report = region.report
    assert report is not None
    (found,) = [sibling for sibling in report.siblings if sibling.pid == pid]
    return found


def codes(report: RegionReport | None) -> set[str]:
    assert report is not None
    return {reason.code for reason in report.reasons}


def parent_of(pid: int) -> int:
    stat = read_stat(pid)
    assert stat is not None
    return stat.parent


def end_with_children(script: Script) -> None:
    """Let a script that ends its own children come to its end."""
    assert script.process.stdin is not None
    script.process.stdin.close()
    script.wait()


# --- Not ours to touch ---------------------------------------------------------------------------------------------


def test_a_sibling_that_was_stopped_already_is_observed_and_stays_stopped(
    scripts: Scripts, place: Place
) -> None:
    stopped, other = scripts.sibling(label="stopped"), scripts.sibling()
    scripts.stopped_by_test.add(stopped.pid)
    stopped.signal(signal.SIGSTOP)
    wait_frozen(stopped.pid)
    with krex.exclusive("cpu") as region:
        assert is_frozen(other.pid)
        spin()
    wait_thawed(other.pid)
    assert is_frozen(stopped.pid)
    found = reported(region, stopped.pid)
    assert (found.gate, found.frozen) == ("observe", False)
    assert "stopped already" in found.error
    assert "sibling_ran" not in codes(region.report)


def test_the_death_of_the_guardian_continues_nobody_who_was_stopped_before(
    scripts: Scripts, place: Place
) -> None:
    stopped, other = scripts.sibling(label="stopped"), scripts.sibling()
    scripts.stopped_by_test.add(stopped.pid)
    stopped.signal(signal.SIGSTOP)
    wait_frozen(stopped.pid)
    with krex.exclusive("cpu"):
        guardian = place.guardian()
        os.kill(guardian, signal.SIGKILL)
        wait_thawed(other.pid)
    with krex.exclusive("cpu", timeout=5):
        wait_frozen(other.pid)
    assert place.guardian() != guardian
    assert is_frozen(stopped.pid)


TRACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SEIZE = 0x4206
pid = int(sys.argv[1])
if libc.ptrace(SEIZE, pid, None, None) != 0:
    print("refused", ctypes.get_errno(), flush=True)
    sys.exit(1)
print("traces", flush=True)
while True:
    # What a tracer does: it lets the other go on whenever that stops.
    _, status = os.waitpid(pid, 0x40000000)
    if os.WIFEXITED(status) or os.WIFSIGNALED(status):
        break
    libc.ptrace(7, pid, None, None)
"""
"""Traces a process, as a debugger does, until that ends or this does."""


def test_a_traced_sibling_is_observed_and_runs_on(scripts: Scripts) -> None:
    traced, counter = scripts.counting("traced")
    tracer = scripts(TRACE, str(traced.pid))
    answer = tracer.line()
    if answer != "traces":
        pytest.skip(f"this machine does not allow ptrace: {answer}")
    with krex.exclusive("cpu") as region:
        at_start = counter.value
        spin()
        assert counter.value > at_start
    found = reported(region, traced.pid)
    assert (found.gate, found.frozen) == ("observe", False)
    assert "traces" in found.error
    assert "sibling_ran" in codes(region.report)


PARENT = """
import mmap, os, sys, time
from krex_jupyter.runtime import client
client.join(sys.argv[1])
counter = memoryview(mmap.mmap(int(sys.argv[2]), 8)).cast("Q")

def count():
    while True:
        counter[0] += 1
"""
"""Start of a participant whose children count."""

CHILD_OF_ANOTHER_UID = (
    PARENT
    + """
pid = os.fork()
if pid == 0:
    os.setresuid(65534, 65534, 65534)
    count()
print("joined", flush=True)
print(pid, flush=True)
sys.stdin.read()
os.kill(pid, 9)
os.waitpid(pid, 0)
"""
)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a child of another uid")
def test_a_child_of_another_uid_is_observed(scripts: Scripts) -> None:
    counter = scripts.counter()
    sibling = scripts.sibling(CHILD_OF_ANOTHER_UID, "two uids", str(counter.fd), pass_fds=(counter.fd,))
    child = int(sibling.line())
    with krex.exclusive("cpu") as region:
        assert is_frozen(sibling.pid)
        at_start = counter.value
        spin()
        assert counter.value > at_start
    found = reported(region, child)
    assert (found.gate, found.frozen) == ("observe", False)
    assert "65534" in found.error
    assert "sibling_ran" in codes(region.report)
    end_with_children(sibling)


# --- Families ------------------------------------------------------------------------------------------------------


WITH_BUSY_CHILD = (
    PARENT
    + """
import subprocess
BUSY = '''
import mmap, sys
counter = memoryview(mmap.mmap(int(sys.argv[1]), 8)).cast("Q")
while True:
    counter[0] += 1
'''
child = subprocess.Popen([sys.executable, "-c", BUSY, sys.argv[2]], pass_fds=(int(sys.argv[2]),))
print("joined", flush=True)
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""
)


def test_a_busy_child_of_a_participant_is_frozen_with_it(scripts: Scripts) -> None:
    counter = scripts.counter()
    sibling = scripts.sibling(WITH_BUSY_CHILD, "parent", str(counter.fd), pass_fds=(counter.fd,))
    child = int(sibling.line())
    wait_until(lambda: counter.value > 0, "the child runs")
    with krex.exclusive("cpu") as region:
        assert is_frozen(child)
        at_start = counter.value
        spin()
        assert counter.value == at_start
    wait_until(lambda: counter.value > at_start, "the child goes on")
    found = reported(region, child)
    assert (found.gate, found.frozen, found.label) == ("freeze", True, "parent")
    assert not codes(region.report) & {"sibling_ran", "evidence_missing"}
    end_with_children(sibling)


FORKING = (
    PARENT
    + """
import select, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("joined", flush=True)
for _ in range(5000):
    if os.fork() == 0:
        counter[0] += 1
        time.sleep(0.03)
        os._exit(0)
    if select.select([sys.stdin], [], [], 0.001)[0]:
        break
"""
)
"""Has some thirty short-lived children at any time; gives up by itself after so many."""


def test_a_sibling_that_forks_without_end_stands_still_with_all_its_children(scripts: Scripts) -> None:
    counter = scripts.counter()
    sibling = scripts.sibling(FORKING, "forking", str(counter.fd), pass_fds=(counter.fd,))
    for _ in range(5):
        before = counter.value
        wait_until(lambda: counter.value > before + 5, "it forks")  # noqa: B023 (called at once)
        with krex.exclusive("cpu", timeout=10) as region:
            at_start = counter.value
            spin()
            assert counter.value == at_start
        assert reported(region, sibling.pid).frozen
        assert not codes(region.report) & {"sibling_ran", "evidence_missing"}
    sibling.say("enough")
    sibling.wait()


DAEMON = (
    PARENT
    + """
inside, outside = os.pipe()
if os.fork() == 0:
    if sys.argv[3] == "session":
        os.setsid()
    pid = os.fork()
    if pid:
        os.write(outside, str(pid).encode())
        os._exit(0)
    count()
os.wait()
daemon = int(os.read(inside, 32))
print("joined", flush=True)
print(daemon, flush=True)
sys.stdin.read()
os.kill(daemon, 9)
"""
)
"""A participant with a busy child whose parent has ended; with "session", that child left its session, too."""


def test_a_daemonised_child_in_its_participants_session_is_found_and_frozen(scripts: Scripts) -> None:
    """As `!busy &` in a notebook leaves it: its parent is 1, its session the kernel's."""
    counter = scripts.counter()
    sibling = scripts.sibling(
        DAEMON, "kernel", str(counter.fd), "", pass_fds=(counter.fd,), start_new_session=True
    )
    daemon = int(sibling.line())

    def is_frozen_inside() -> bool:
        with krex.exclusive("cpu"):
            return is_frozen(daemon)

    # The background looks for such processes once a second.
    wait_until(is_frozen_inside, "the daemonised child is frozen", 8.0, lambda: state_of(daemon))
    with krex.exclusive("cpu") as region:
        at_start = counter.value
        spin()
        assert counter.value == at_start
    wait_until(lambda: counter.value > at_start, "it goes on")
    assert reported(region, daemon).frozen
    end_with_children(sibling)


def test_a_daemon_that_left_every_session_is_measured(scripts: Scripts) -> None:
    counter = scripts.counter()
    sibling = scripts.sibling(DAEMON, "kernel", str(counter.fd), "session", pass_fds=(counter.fd,))
    daemon = int(sibling.line())
    with krex.exclusive("cpu") as region:
        at_start = counter.value
        spin(0.3)
        assert counter.value > at_start
    assert region.report is not None
    assert daemon not in {found.pid for found in region.report.siblings}
    assert region.report.evidence.owner is not None
    assert region.report.evidence.owner.other_cpu_s is not None
    assert region.report.evidence.owner.other_cpu_s > 0.1
    assert "cpu_load_elsewhere" in codes(region.report)
    end_with_children(sibling)


def test_a_sibling_that_dies_while_frozen_harms_nobody(scripts: Scripts) -> None:
    doomed, other = scripts.sibling(label="doomed"), scripts.sibling()
    with krex.exclusive("cpu") as region:
        doomed.signal(signal.SIGKILL)
        doomed.wait()
        assert is_frozen(other.pid)
    wait_thawed(other.pid)
    assert codes(region.report) <= {"cpu_delayed", "cpu_load_elsewhere"}
    assert reported(region, doomed.pid).frozen
    with krex.exclusive("cpu", timeout=5) as region:
        pass
    assert region.report is not None
    assert {found.pid for found in region.report.siblings} == {other.pid}


# --- Terminals -----------------------------------------------------------------------------------------------------


IN_TERMINAL = """
import os, sys
from krex_jupyter.runtime import client
client.join("in a terminal")
print("joined as", os.getpid(), "ready", flush=True)
for line in sys.stdin:
    print("read", line.strip(), flush=True)
"""


OWNER_ON_COMMAND = """
import sys, krex_jupyter as krex
for line in sys.stdin:
    with krex.exclusive("cpu") as region:
        print("held", flush=True)
        sys.stdin.readline()
    print("left", *[reason.code for reason in region.report.reasons], flush=True)
"""
"""Holds a region from one line to the next, again and again."""


@pytest.mark.parametrize("shells", [1, 2])
def test_a_script_in_a_terminals_foreground_keeps_its_terminal(
    scripts: Scripts, place: Place, terminal: Terminal, shells: int
) -> None:
    code = place.directory / "in_terminal.py"
    code.write_text(IN_TERMINAL, encoding="utf-8")
    for _ in range(1, shells):
        terminal.start_shell()
    pid = terminal.run(code)
    # Not this process: the shell is its child, and children of an owner are never touched.
    owner = scripts(OWNER_ON_COMMAND)
    for number in range(10):
        owner.say("enter")
        assert owner.line() == "held"
        assert is_frozen(pid)
        assert is_frozen(parent_of(pid))
        assert is_frozen(terminal.shell.pid)
        owner.say("leave")
        assert "sibling_ran" not in owner.line()
        wait_thawed(pid)
        wait_thawed(terminal.shell.pid)
        assert terminal.foreground_group == os.getpgid(pid)
        terminal.type(f"line {number}")
        terminal.read_until(f"read line {number}\n")
    assert "Stopped" not in terminal.shown


def test_a_script_whose_shell_must_not_stop_runs_on(
    scripts: Scripts, place: Place, terminal: Terminal
) -> None:
    code = place.directory / "in_terminal.py"
    code.write_text(IN_TERMINAL, encoding="utf-8")
    pid = terminal.run(code)
    with krex.exclusive("cpu", peers=[terminal.shell.pid]) as region:
        assert not is_frozen(terminal.shell.pid)
        terminal.type("hello")
        terminal.read_until("read hello\n")
    found = reported(region, pid)
    assert (found.gate, found.frozen) == ("observe", False)
    assert "terminal" in found.error
    assert "Stopped" not in terminal.shown


def test_a_script_beside_the_owner_in_one_terminal_runs_on(
    scripts: Scripts, place: Place, terminal: Terminal
) -> None:
    """The owner was started in the background of the terminal that has the sibling in its foreground."""
    code, owner = place.directory / "in_terminal.py", place.directory / "owner.py"
    code.write_text(IN_TERMINAL, encoding="utf-8")
    owner.write_text(REGION, encoding="utf-8")
    to_owner, from_owner = place.directory / "to_owner", place.directory / "from_owner"
    for pipe in (to_owner, from_owner):
        os.mkfifo(pipe)
    say = os.open(to_owner, os.O_RDWR)
    hear = os.open(from_owner, os.O_RDWR)
    try:
        start = f"{shlex.join([sys.executable, str(owner), 'cpu'])} < {to_owner} > {from_owner}"
        # The shell takes no other command once the sibling is in its foreground: the owner is started on a line.
        terminal.type(f"(read _ < {to_owner}; exec {start}) &")
        pid = terminal.run(code)
        os.write(say, b"own\n")
        assert _read_line(hear).startswith("held")
        assert not is_frozen(pid)
        assert not is_frozen(terminal.shell.pid)
        terminal.type("hello")
        terminal.read_until("read hello\n")
        os.write(say, b"leave\n")
        assert _read_line(hear).startswith("left")
    finally:
        os.close(say)
        os.close(hear)
    (report,) = krex.history()
    (found,) = [sibling for sibling in report.siblings if sibling.pid == pid]
    assert (found.gate, found.frozen) == ("observe", False)


def _read_line(fd: int, within_s: float = 20.0) -> str:
    content = b""
    give_up_s = time.monotonic() + within_s
    while b"\n" not in content:
        ready, _, _ = select.select([fd], [], [], max(give_up_s - time.monotonic(), 0.0))
        assert ready, f"no line within {within_s:g} s, only {content!r}"
        content += os.read(fd, 4096)
    return content.decode().partition("\n")[0]
