"""Regions on a simulated GPU: drained before the grant, blocked during the region, going on after it, whatever happens.

The owner is this process, or a script; siblings are real processes with a simulated context, whose work is on
record (`simulated_driver.work_of`) by code that the product knows nothing of.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import krex_jupyter as krex
from krex_jupyter.launch import start_coordinator
from krex_jupyter.locate import location
from krex_jupyter.protocol import SiblingReport
from tests.conftest import Place
from tests.scripts import Script, Scripts, is_frozen, state_of, wait_frozen, wait_thawed, wait_until
from tests.simulated_driver import DEVICES, Work, work_of
from tests.terminals import Terminal
from tests.test_protocol_abuse import RawClient

GPU = """
import sys
from krex_jupyter.runtime import client
from tests.cuda_process import serve
from tests.simulated_driver import SimulatedGpu
gpu = SimulatedGpu(sys.argv[2], sys.argv[3].split(","))
client.join(sys.argv[1])
print("joined", flush=True)
"""

FOLLOWS = GPU + "serve(gpu)\n"
"""Does as it is told."""

LOOPS = (
    GPU
    + """
while True:
    gpu.submit(0.002)
    gpu.synchronise()
"""
)
"""Uses its GPU without end."""

OWNS = """
import sys, time
import krex_jupyter as krex
if sys.argv[3]:
    from tests.simulated_driver import SimulatedGpu
    gpu = SimulatedGpu(sys.argv[3], sys.argv[4].split(","))
from krex_jupyter.runtime import client
client.join(sys.argv[1])
print("joined", flush=True)
for line in sys.stdin:
    devices = line.split()
    with krex.exclusive(devices, cpu=sys.argv[2], timeout=30,
                        on_queued=lambda _: print("queued", flush=True)) as region:
        print("held", time.monotonic(), flush=True)
        sys.stdin.readline()
        left_s = time.monotonic()
    print("left", left_s, region.report.verdict, flush=True)
"""
"""Holds a region on the devices of one line until the next line."""


@dataclass
class Gpus:
    """A coordinator with two simulated GPUs, and the scripts on them."""

    directory: Path
    place: Place
    scripts: Scripts

    def sibling(self, code: str = FOLLOWS, device: str = DEVICES[0], label: str = "sibling") -> Script:
        """A participant with a context."""
        script = self.scripts.sibling(code, label, str(self.directory), device)
        if code is FOLLOWS:
            assert script.line() == "ready"
        else:
            wait_until(lambda: bool(self.work(script)), "it works")
        return script

    def owner(self, cpu: str = "share", device: str = "") -> Script:
        """A participant that takes regions when told to; with a context where ``device`` says."""
        return self.scripts.sibling(OWNS, "owner", cpu, str(self.directory) if device else "", device)

    def work(self, script: Script) -> list[Work]:
        return work_of(self.directory, script.pid)

    def worked_between(self, script: Script, start_s: float, end_s: float) -> list[Work]:
        """Work that was on the device at some time in between."""
        return [work for work in self.work(script) if work.started_s < end_s and work.ended_s > start_s]

    def works_on(self, script: Script, within_s: float = 2.0) -> float:
        """Wait until it starts another piece of work; returns the seconds that took."""
        now_s = time.monotonic()
        wait_until(
            lambda: bool(self.worked_between(script, now_s, float("inf"))),
            "it works on",
            within_s,
            lambda: self.work(script)[-1],
        )
        return time.monotonic() - now_s


def start(scripts: Scripts, place: Place, driver: str) -> Gpus:
    directory = place.directory / "gpus"
    directory.mkdir()
    start_coordinator(
        location(),
        options=(
            "--backend",
            f"tests.simulated_driver:SimulatedBackend:{directory}",
            "--driver",
            f"tests.simulated_driver:{driver}:{directory}",
        ),
    )
    return Gpus(directory, place, scripts)


@pytest.fixture
def gpus(scripts: Scripts, place: Place) -> Gpus:
    return start(scripts, place, "SimulatedLock")


@contextlib.contextmanager
def on_record() -> Iterator[list[float]]:
    """The times at which a block began and ended."""
    times = [time.monotonic()]
    yield times
    times.append(time.monotonic())


def submit(sibling: Script, duration_s: float, count: int = 1) -> None:
    """Queue work; returns once it is queued."""
    sibling.say(f"submit {duration_s} {count}")
    assert sibling.line() == "submitted"


def reported(region: krex.Region, sibling: Script) -> SiblingReport:
    assert region.report is not None
    (found,) = [found for found in region.report.siblings if found.pid == sibling.pid]
    return found


def codes(region: krex.Region) -> set[str]:
    assert region.report is not None
    return {reason.code for reason in region.report.reasons}


def heard(script: Script, word: str) -> list[str]:
    """The words of its next line that begins so; "queued" is skipped."""
    while (words := script.line().split())[0] == "queued":
        pass
    assert words[0] == word
    return words


# --- Drained, blocked, going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpu", ["freeze", "share"])
def test_a_sibling_is_drained_before_the_grant_blocked_and_goes_on(gpus: Gpus, cpu: krex.CpuPolicy) -> None:
    queued, looping = gpus.sibling(), gpus.sibling(LOOPS, label="loops")
    submit(queued, 0.05, 10)
    with krex.exclusive("cuda:0", cpu=cpu) as region, on_record() as times:
        wait_until(lambda: time.monotonic() > times[0] + 0.1, "the region has lasted")
        assert is_frozen(looping.pid) == (cpu == "freeze")
    for sibling in (queued, looping):
        assert gpus.worked_between(sibling, *times) == []
        found = reported(region, sibling)
        assert (found.gate, found.frozen, found.error) == ("driver-lock", cpu == "freeze", "")
    drained_s = reported(region, queued).drain_s
    assert drained_s is not None
    assert drained_s > 0.2
    assert not codes(region) & {
        "not_drained",
        "sibling_ran",
        "evidence_missing",
        "new_context",
        "foreign_gpu_work",
    }
    gpus.works_on(looping)
    submit(queued, 0.01)


def test_a_queue_longer_than_the_bound_demotes_its_sibling(gpus: Gpus) -> None:
    busy, other = gpus.sibling(), gpus.sibling()
    submit(busy, 7.0)
    with krex.exclusive("cuda:0", cpu="freeze") as region:
        assert is_frozen(busy.pid)
    found = reported(region, busy)
    assert found.gate == "observe"
    assert found.frozen
    assert "within 5 s" in found.error
    assert reported(region, other).gate == "driver-lock"
    assert "not_drained" in codes(region)
    assert 4.5 < region.enter_s < 7.0
    submit(busy, 0.01)


def test_a_profiled_sibling_is_observed_and_the_verdict_says_so(gpus: Gpus) -> None:
    profiled = gpus.sibling()
    profiled.say("profile on")
    assert profiled.line() == "profiled"
    with krex.exclusive("cuda:0", cpu="share") as region:
        submit(profiled, 0.01)
    found = reported(region, profiled)
    assert found.gate == "observe"
    assert "profiled" in found.error
    assert "not_drained" in codes(region)


def test_a_process_on_several_gpus_is_observed(gpus: Gpus) -> None:
    job = gpus.sibling(device=",".join(DEVICES))

    for device in ("cuda:1", "cuda:0"):
        # At their ends the processes of each device are looked up.
        with krex.exclusive(device, cpu="share"):
            pass
    with krex.exclusive("cuda:0", cpu="freeze") as region:
        submit(job, 0.01)
    assert "several GPUs" in reported(region, job).error
    assert "not_drained" in codes(region)


def test_a_sibling_without_a_context_is_frozen_and_not_locked(gpus: Gpus) -> None:
    plain = gpus.scripts.sibling()
    with krex.exclusive("cuda:0", cpu="freeze") as region:
        assert is_frozen(plain.pid)
    assert reported(region, plain).gate == "freeze"


IN_TERMINAL = (
    GPU.replace('print("joined", flush=True)', 'print("joined as", os.getpid(), "ready", flush=True)')
    + """
for line in sys.stdin:
    gpu.submit(0.001)
    print("read", line.strip(), flush=True)
"""
)


def test_a_script_in_a_terminals_foreground_keeps_its_terminal_though_locked_first(
    gpus: Gpus, terminal: Terminal
) -> None:
    """The lock comes before its shell is stopped, and the shell must go on after it nevertheless."""
    code = gpus.place.directory / "in_terminal.py"
    code.write_text("import os\n" + IN_TERMINAL, encoding="utf-8")
    pid = terminal.run(code, "terminal", str(gpus.directory), DEVICES[0])
    owner = gpus.owner("freeze")
    for number in range(10):
        owner.say("cuda:0")
        heard(owner, "held")
        assert is_frozen(pid)
        assert is_frozen(terminal.shell.pid)
        owner.say("leave")
        heard(owner, "left")
        wait_thawed(terminal.shell.pid)
        terminal.type(f"line {number}")
        terminal.read_until(f"read line {number}\n")
        assert terminal.foreground_group == os.getpgid(pid)
    assert "Stopped" not in terminal.shown
    (report, *_) = krex.history()
    (found,) = [found for found in report.siblings if found.pid == pid]
    assert (found.gate, found.frozen) == ("driver-lock", True)


# --- Bad luck ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpu", ["freeze", "share"])
def test_a_sibling_that_is_stopped_while_it_drains_is_left_to_whoever_stopped_it(
    gpus: Gpus, cpu: krex.CpuPolicy
) -> None:
    """Its lock call hangs until it is continued; the region does not wait for that, and nor does it continue it."""
    stopped, other = gpus.sibling(), gpus.sibling()
    submit(stopped, 1.0)
    gpus.scripts.stopped_by_test.add(stopped.pid)
    threading.Timer(0.2, lambda: os.kill(stopped.pid, signal.SIGSTOP)).start()
    with krex.exclusive("cuda:0", cpu=cpu) as region:
        assert state_of(stopped.pid) == "T"
    assert region.enter_s < 1.0
    found = reported(region, stopped)
    assert (found.gate, found.frozen) == ("observe", False)
    assert "stopped by somebody else" in found.error
    assert reported(region, other).gate == "driver-lock"
    assert "not_drained" in codes(region)
    submit(other, 0.01)
    assert state_of(stopped.pid) == "T"
    stopped.signal(signal.SIGCONT)
    submit(stopped, 0.01)
    with krex.exclusive("cuda:0", cpu=cpu) as region:
        pass
    assert reported(region, stopped).gate == "driver-lock"


def test_a_locked_sibling_that_somebody_stops_is_unlocked_once_it_is_continued(gpus: Gpus) -> None:
    stopped, other = gpus.sibling(LOOPS), gpus.sibling(LOOPS)
    gpus.scripts.stopped_by_test.add(stopped.pid)
    with krex.exclusive("cuda:0", cpu="share") as region:
        stopped.signal(signal.SIGSTOP)
        wait_frozen(stopped.pid)
    gpus.works_on(other)
    assert reported(region, stopped).gate == "driver-lock"
    assert is_frozen(stopped.pid)
    stopped.signal(signal.SIGCONT)
    assert gpus.works_on(stopped, 5.0) < 1.0


def test_a_locked_and_stopped_sibling_is_unlocked_by_the_next_guardian_once_it_is_continued(
    gpus: Gpus,
) -> None:
    stopped, other = gpus.sibling(LOOPS), gpus.sibling(LOOPS)
    gpus.scripts.stopped_by_test.add(stopped.pid)
    with krex.exclusive("cuda:0", cpu="share"):
        stopped.signal(signal.SIGSTOP)
        wait_frozen(stopped.pid)
        os.kill(gpus.place.guardian(), signal.SIGKILL)
        gpus.works_on(other, 5.0)
    with krex.exclusive("cuda:0", cpu="share", timeout=5.0) as region:
        pass
    assert reported(region, stopped).gate == "observe"
    assert is_frozen(stopped.pid)
    stopped.signal(signal.SIGCONT)
    assert gpus.works_on(stopped, 5.0) < 1.0
    wait_until(lambda: gpus.place.journal.read_bytes() == b"", "the journal owes nothing")


def test_a_freezing_region_waits_for_another_to_lock_what_it_freezes(gpus: Gpus) -> None:
    """Frozen in the middle of its lock call, the sibling would not answer until thawed."""
    busy, owner = gpus.sibling(), gpus.owner()
    submit(busy, 1.5)
    owner.say("cuda:0")
    wait_until(lambda: _phase() == "entering", "the sibling drains")
    with krex.exclusive("cpu") as region:
        assert is_frozen(busy.pid)
        heard(owner, "held")
    owner.say("leave")
    heard(owner, "left")
    assert reported(region, busy).frozen
    assert region.enter_s > 0.5
    (report,) = [report for report in krex.history() if report.device.id == "cuda:0"]
    (found,) = [found for found in report.siblings if found.pid == busy.pid]
    assert (found.gate, found.error) == ("driver-lock", "")
    submit(busy, 0.01)


def test_a_sibling_that_dies_while_it_drains_keeps_nobody_waiting(gpus: Gpus) -> None:
    doomed, other = gpus.sibling(), gpus.sibling()
    submit(doomed, 4.0)
    threading.Timer(0.2, lambda: os.kill(doomed.pid, signal.SIGKILL)).start()
    with krex.exclusive("cuda:0", cpu="freeze") as region:
        assert is_frozen(other.pid)
    assert region.enter_s < 2.0
    assert region.report is not None
    assert [found.pid for found in region.report.siblings] == [other.pid]


def test_a_sibling_that_dies_while_locked_harms_nobody(gpus: Gpus) -> None:
    doomed, other = gpus.sibling(LOOPS), gpus.sibling(LOOPS)
    with krex.exclusive("cuda:0", cpu="share") as region:
        doomed.signal(signal.SIGKILL)
        doomed.wait()
    gpus.works_on(other)
    assert not codes(region) & {"not_drained", "evidence_missing", "sibling_ran"}
    with krex.exclusive("cuda:0", cpu="share", timeout=5):
        pass


@pytest.mark.parametrize("cpu", ["freeze", "share"])
def test_the_death_of_the_locker_unlocks_within_bounds(gpus: Gpus, cpu: krex.CpuPolicy) -> None:
    looping = gpus.sibling(LOOPS)
    with krex.exclusive("cuda:0", cpu=cpu) as region:
        guardian = gpus.place.guardian()
        os.kill(guardian, signal.SIGKILL)
        assert gpus.works_on(looping, 5.0) < 1.5
    assert region.report is not None
    assert region.report.verdict == "revoked"
    with krex.exclusive("cuda:0", cpu=cpu, timeout=5) as region:
        pass
    assert reported(region, looping).gate == "driver-lock"
    assert gpus.place.guardian() != guardian


def test_an_owner_killed_while_its_siblings_drain_unlocks_them(gpus: Gpus) -> None:
    busy, other = gpus.sibling(), gpus.sibling(LOOPS)
    submit(busy, 3.0)
    owner = gpus.owner()
    owner.say("cuda:0")
    wait_until(lambda: _phase() == "entering", "the siblings drain")
    owner.signal(signal.SIGKILL)
    assert gpus.works_on(other, 5.0) < 1.5
    submit(busy, 0.01)
    with krex.exclusive("cuda:0", cpu="share", timeout=10):
        pass


def _phase(device: int = 0) -> str:
    holder = krex.status().devices[device].holder
    return "" if holder is None else holder.phase


def test_ctrl_c_while_siblings_drain_comes_at_once_and_lets_them_go(gpus: Gpus) -> None:
    busy, other = gpus.sibling(), gpus.sibling(LOOPS)
    submit(busy, 3.0)
    interrupted_s: list[float] = []

    def interrupt() -> None:
        interrupted_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.3, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        krex.exclusive("cuda:0", cpu="freeze").__enter__()
    assert time.monotonic() - interrupted_s[0] < 0.2
    assert gpus.works_on(other) < 1.0
    submitted_s = time.monotonic()
    submit(busy, 0.01)
    assert time.monotonic() - submitted_s < 1.0
    assert _phase() == ""


def test_a_region_whose_siblings_drain_cannot_be_released(gpus: Gpus) -> None:
    busy = gpus.sibling()
    holder, raw = gpus.owner(), RawClient(gpus.place.socket)
    try:
        holder.say("cuda:0")
        heard(holder, "held")
        raw.say("hello", label="raw")
        raw.say("acquire", request_id=1, devices=[DEVICES[0]], cpu="share")
        region_id = raw.hear_until("queued")["region_id"]
        # Locked until the holder leaves, so the work is queued in the moment between the two regions, or later.
        busy.say("submit 0.5 1")
        holder.say("leave")
        raw.say("release", request_id=2, region_id=region_id, owner={})
        assert raw.refused().startswith("bad_request")
        raw.hear_until("granted")
    finally:
        raw.close()
    assert busy.line() == "submitted"
    with krex.exclusive("cuda:0", cpu="share", timeout=5):
        pass


# --- Several devices -----------------------------------------------------------------------------------------------


def test_regions_on_two_devices_run_at_the_same_time_where_nobody_is_frozen(gpus: Gpus) -> None:
    first, second = gpus.owner(device=DEVICES[0]), gpus.owner(device=DEVICES[1])
    for owner, device in ((first, "cuda:0"), (second, "cuda:1")):
        # Once each, alone: from then on it is known which device they use.
        owner.say(device)
        heard(owner, "held")
        owner.say("leave")
        heard(owner, "left")
    first.say("cuda:0")
    heard(first, "held")
    second.say("cuda:1")
    heard(second, "held")
    assert not is_frozen(first.pid)
    assert not is_frozen(second.pid)
    for owner in (first, second):
        owner.say("leave")
        assert heard(owner, "left")[2] in ("clean", "suspect")


def test_freezing_regions_on_two_devices_take_turns(gpus: Gpus) -> None:
    first, second = gpus.owner("freeze", DEVICES[0]), gpus.owner("freeze", DEVICES[1])
    bystander = gpus.sibling()
    with krex.exclusive("cpu", cpu="share", timeout=5):
        pass
    first.say("cuda:0")
    heard(first, "held")
    wait_frozen(second.pid)
    assert is_frozen(bystander.pid)
    second.say("cuda:1")
    first.say("leave")
    left_s = float(heard(first, "left")[1])
    assert float(heard(second, "held")[1]) > left_s
    wait_frozen(first.pid)
    second.say("leave")
    heard(second, "left")
    wait_thawed(first.pid)


def test_a_participant_locked_for_one_device_waits_for_another(gpus: Gpus) -> None:
    """Granted, it could not use its device: its calls are blocked."""
    locked = gpus.owner(device=DEVICES[0])
    with krex.exclusive("cuda:0", cpu="share") as region:
        locked.say("cuda:1")
        assert locked.line() == "queued"
        left_s = time.monotonic()
    assert float(heard(locked, "held")[1]) > left_s
    locked.say("leave")
    heard(locked, "left")
    assert reported(region, locked).gate == "driver-lock"


def test_a_list_of_devices_is_held_whole_or_not_at_all(gpus: Gpus) -> None:
    both = gpus.owner()
    with krex.exclusive("cuda:1", cpu="share"):
        both.say("cuda:1 cuda:0")
        assert both.line() == "queued"
        assert _phase(0) == ""
    heard(both, "held")
    assert (_phase(0), _phase(1)) == ("held", "held")
    for device in ("cuda:0", "cuda:1"):
        with pytest.raises(krex.WaitTimeout):
            krex.exclusive(device, cpu="share", timeout=0).__enter__()
    both.say("leave")
    heard(both, "left")
    (report, *_) = krex.history()
    assert [device.uuid for device in report.devices] == list(DEVICES)
    assert [device.id for device in report.devices] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("cpu", ["freeze", "share"])
def test_a_hand_off_never_unlocks_who_is_gated_for_both(gpus: Gpus, cpu: str) -> None:
    bystander = gpus.sibling(LOOPS)
    owners = [gpus.owner(cpu) for _ in range(2)]
    with krex.exclusive("cuda:0", cpu="share"):
        for owner in owners:
            owner.say("cuda:0")
            assert owner.line() == "queued"
    first, second = owners
    held_s = float(heard(first, "held")[1])
    first.say("leave")
    heard(second, "held")
    second.say("leave")
    left_s = float(heard(second, "left")[1])
    assert gpus.worked_between(bystander, held_s, left_s) == []
    gpus.works_on(bystander)


# --- The order -----------------------------------------------------------------------------------------------------


def test_freezing_before_locking_drains_nobody(scripts: Scripts, place: Place) -> None:
    """The negative test of the order: a lock call on a stopped process does not return."""
    gpus = start(scripts, place, "FreezingLock")
    sibling = gpus.sibling()
    scripts.stopped_by_test.add(sibling.pid)
    submit(sibling, 0.5)
    with krex.exclusive("cuda:0", cpu="freeze") as region:
        started_s = time.monotonic()
    assert gpus.worked_between(sibling, started_s, started_s + 0.001)
    found = reported(region, sibling)
    assert found.gate == "observe"
    assert "stopped" in found.error
    assert "not_drained" in codes(region)
    # The call returns once somebody continues the process; what it locked then is unlocked.
    sibling.signal(signal.SIGCONT)
    submit(sibling, 0.01)
