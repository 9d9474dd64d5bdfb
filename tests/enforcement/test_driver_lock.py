"""The contract of a driver's lock: one suite for the simulated driver and, on a GPU machine, the real one."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from krex_jupyter.enforcement import driver_lock
from krex_jupyter.enforcement.driver_lock import (
    ILLEGAL_STATE,
    LOCKED,
    NOT_CUDA,
    NOT_READY,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    RUNNING,
    SUCCESS,
    DriverLock,
    LibcudaLock,
)
from tests.simulated_driver import SimulatedBackend, SimulatedLock, work_of

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0
"""A deadline that only a defect reaches."""
NO_PROCESS = 2**22
"""Above any pid that Linux gives."""


class Target:
    """A GPU process of the test's own."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.expect("ready")

    def say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def expect(self, answer: str, within_s: float = PATIENCE_S) -> None:
        assert self.answers(within_s), f"{answer!r} did not come within {within_s} s"
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == answer

    def answers(self, within_s: float) -> bool:
        """Whether it says something in time."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return bool(selector.select(within_s))

    def submit(self, seconds: float, count: int = 1) -> None:
        self.say(f"submit {seconds} {count}")
        self.expect("submitted")

    def stop(self) -> None:
        """Stopped, all threads of it, when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def proceed(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(PATIENCE_S)

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(BrokenPipeError):
                    pipe.close()


class Call:
    """A call of the lock in a thread, since it may hang."""

    def __init__(self, function: Callable[[], int]) -> None:
        self.result: int | None = None
        self.took_s = 0.0
        self._done = threading.Event()
        self._function = function
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        started_s = time.monotonic()
        self.result = self._function()
        self.took_s = time.monotonic() - started_s
        self._done.set()

    def returned(self, within_s: float = PATIENCE_S) -> bool:
        return self._done.wait(within_s)


class Driver:
    """A lock, the processes it concerns, and how to name it to a child process."""

    def __init__(self, lock: DriverLock, spec: str, command: list[str], cleanup: ExitStack) -> None:
        self.lock = lock
        self.spec = spec
        self._command = command
        self._cleanup = cleanup

    def target(self) -> Target:
        target = Target(self._command)
        self._cleanup.callback(target.close)
        return target


@pytest.fixture(params=["simulated", pytest.param("libcuda", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    with ExitStack() as cleanup:
        if request.param == "simulated":
            spec = f"tests.simulated_driver:SimulatedLock:{tmp_path}"
            command = [sys.executable, "-m", "tests.simulated_driver", str(tmp_path)]
            yield Driver(SimulatedLock(tmp_path), spec, command, cleanup)
        else:
            lock = LibcudaLock()
            if lock.state(NO_PROCESS)[0] == driver_lock.UNAVAILABLE:
                pytest.skip(driver_lock.meaning(driver_lock.UNAVAILABLE))
            command = [sys.executable, str(ROOT / "tests" / "cuda_process.py")]
            yield Driver(lock, "", command, cleanup)


def test_an_idle_process_is_locked_and_unlocked(driver: Driver) -> None:
    target = driver.target()
    assert driver.lock.state(target.pid) == (SUCCESS, RUNNING)
    assert driver.lock.lock(target.pid, 5.0) == SUCCESS
    assert driver.lock.state(target.pid) == (SUCCESS, LOCKED)
    assert driver.lock.unlock(target.pid) == SUCCESS
    assert driver.lock.state(target.pid) == (SUCCESS, RUNNING)


def test_locking_an_idle_process_takes_milliseconds(driver: Driver) -> None:
    target = driver.target()
    took_s: list[float] = []
    for _ in range(20):
        started_s = time.monotonic()
        assert driver.lock.lock(target.pid, 5.0) == SUCCESS
        took_s.append(time.monotonic() - started_s)
        assert driver.lock.unlock(target.pid) == SUCCESS
    assert min(took_s) < 0.01


def test_lock_returns_once_the_queued_work_is_done(driver: Driver) -> None:
    target = driver.target()
    target.submit(0.1, 3)
    call = Call(lambda: driver.lock.lock(target.pid, 5.0))
    assert call.returned()
    assert call.result == SUCCESS
    assert 0.15 < call.took_s < 5.0
    assert driver.lock.unlock(target.pid) == SUCCESS
    target.say("synchronise")
    target.expect("done")


def test_a_locked_process_submits_nothing_until_unlocked(driver: Driver) -> None:
    target = driver.target()
    assert driver.lock.lock(target.pid, 5.0) == SUCCESS
    target.say("submit 0.001 1")
    assert not target.answers(within_s=0.3)
    assert driver.lock.unlock(target.pid) == SUCCESS
    target.expect("submitted")


def test_a_lock_that_times_out_leaves_the_process_running_and_its_work_intact(driver: Driver) -> None:
    target = driver.target()
    target.submit(0.5, 2)
    assert driver.lock.lock(target.pid, 0.1) == NOT_READY
    assert driver.lock.state(target.pid) == (SUCCESS, RUNNING)
    target.submit(0.001)
    target.say("synchronise")
    target.expect("done")


def test_locking_a_stopped_process_hangs_past_its_timeout_until_it_continues(driver: Driver) -> None:
    target = driver.target()
    target.stop()
    call = Call(lambda: driver.lock.lock(target.pid, 0.1))
    assert not call.returned(within_s=1.0)
    target.proceed()
    assert call.returned()
    assert call.result == SUCCESS
    assert driver.lock.unlock(target.pid) == SUCCESS


def test_unlocking_a_stopped_process_hangs_until_it_continues(driver: Driver) -> None:
    target = driver.target()
    assert driver.lock.lock(target.pid, 5.0) == SUCCESS
    target.stop()
    call = Call(lambda: driver.lock.unlock(target.pid))
    assert not call.returned(within_s=0.5)
    target.proceed()
    assert call.returned()
    assert call.result == SUCCESS
    assert driver.lock.state(target.pid) == (SUCCESS, RUNNING)


def test_asking_for_the_state_of_a_stopped_process_hangs_until_it_continues(driver: Driver) -> None:
    target = driver.target()
    target.stop()
    call = Call(lambda: driver.lock.state(target.pid)[1])
    assert not call.returned(within_s=0.5)
    target.proceed()
    assert call.returned()
    assert call.result == RUNNING


def test_a_call_that_hangs_on_a_stopped_process_ends_with_its_death(driver: Driver) -> None:
    target = driver.target()
    target.stop()
    call = Call(lambda: driver.lock.lock(target.pid, 0.1))
    assert not call.returned(within_s=0.3)
    target.kill()
    assert call.returned()
    assert call.result == OPERATING_SYSTEM


def test_work_on_the_device_goes_on_while_its_process_is_stopped(driver: Driver) -> None:
    target = driver.target()
    target.submit(0.3)
    target.stop()
    call = Call(lambda: driver.lock.lock(target.pid, 5.0))
    assert not call.returned(within_s=0.5)
    target.proceed()
    assert call.returned()
    assert call.took_s < 0.75, "the lock had to wait for work that should have been done by then"
    assert driver.lock.unlock(target.pid) == SUCCESS


def test_locked_twice_and_unlocked_twice_are_refused(driver: Driver) -> None:
    target = driver.target()
    assert driver.lock.lock(target.pid, 5.0) == SUCCESS
    assert driver.lock.lock(target.pid, 5.0) == ILLEGAL_STATE
    assert driver.lock.unlock(target.pid) == SUCCESS
    assert driver.lock.unlock(target.pid) == ILLEGAL_STATE


def test_a_process_without_a_context_is_not_a_cuda_process(driver: Driver) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as plain:
        try:
            assert driver.lock.lock(plain.pid, 1.0) == NOT_CUDA
        finally:
            plain.kill()


def test_a_dead_process_is_an_operating_system_error(driver: Driver) -> None:
    target = driver.target()
    target.kill()
    assert driver.lock.lock(target.pid, 1.0) == OPERATING_SYSTEM
    assert driver.lock.unlock(target.pid) == OPERATING_SYSTEM


def test_a_locked_process_can_be_killed(driver: Driver) -> None:
    target = driver.target()
    assert driver.lock.lock(target.pid, 5.0) == SUCCESS
    target.kill()
    assert driver.lock.lock(target.pid, 1.0) == OPERATING_SYSTEM


def test_the_lock_outlives_the_locker_and_anybody_can_unlock(driver: Driver) -> None:
    target = driver.target()
    code = _in_child(driver, f"lock.lock({target.pid}, 5.0)")
    assert code == SUCCESS
    assert driver.lock.state(target.pid) == (SUCCESS, LOCKED)
    assert _in_child(driver, f"lock.unlock({target.pid})") == SUCCESS
    assert driver.lock.state(target.pid) == (SUCCESS, RUNNING)


def test_several_processes_are_drained_side_by_side(driver: Driver) -> None:
    targets = [driver.target() for _ in range(3)]
    for target in targets:
        assert driver.lock.lock(target.pid, 5.0) == SUCCESS
    assert [driver.lock.unlock(target.pid) for target in targets] == [SUCCESS] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_lock(driver: Driver, tmp_path: Path) -> None:
    target = driver.target()
    # The way to the simulated driver's directory must not be what stops the other user.
    for directory in (tmp_path, *list(tmp_path.parents)[:3]):
        directory.chmod(0o755)
    # The first call loads what a user without access to this Python could not.
    become = "lock.state(1), os.setgroups([]), os.setgid(65534), os.setuid(65534)"
    expression = f"({become}, lock.lock({target.pid}, 1.0))[-1]"
    assert _in_child(driver, expression) == OPERATING_SYSTEM
    assert driver.lock.state(target.pid) == (SUCCESS, RUNNING)


def _in_child(driver: Driver, expression: str) -> int:
    """What ``expression`` over ``lock`` gives in a process that ends right after it."""
    program = (
        "import json, os; from krex_jupyter.enforcement.driver_lock import load; "
        f"lock = load({driver.spec!r}); print(json.dumps({expression}))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert answer.returncode == 0, answer.stderr
    return int(json.loads(answer.stdout))


# --- Of the simulated driver alone: what the real one does only with a profiler, and its observer ---


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[Driver]:
    with ExitStack() as cleanup:
        command = [sys.executable, "-m", "tests.simulated_driver", str(tmp_path)]
        yield Driver(SimulatedLock(tmp_path), str(tmp_path), command, cleanup)


def test_a_profiled_process_refuses_to_be_locked(simulated: Driver) -> None:
    target = simulated.target()
    target.say("profile on")
    target.expect("profiled")
    assert simulated.lock.lock(target.pid, 1.0) == NOT_SUPPORTED
    assert simulated.lock.state(target.pid) == (SUCCESS, RUNNING)
    target.say("profile off")
    target.expect("profiled")
    assert simulated.lock.lock(target.pid, 1.0) == SUCCESS


def test_the_observer_sees_no_work_while_a_process_is_locked(simulated: Driver) -> None:
    target = simulated.target()
    target.submit(0.02, 2)
    assert simulated.lock.lock(target.pid, 5.0) == SUCCESS
    locked_s = time.monotonic()
    target.say("submit 0.01 1")
    assert not target.answers(within_s=0.1)
    unlocked_s = time.monotonic()
    assert simulated.lock.unlock(target.pid) == SUCCESS
    target.expect("submitted")
    work = work_of(simulated.spec, target.pid)
    assert len(work) == 3
    assert not [piece for piece in work if piece.ended_s > locked_s and piece.started_s < unlocked_s]


def test_the_process_list_names_living_processes_by_device(simulated: Driver) -> None:
    target = simulated.target()
    backend = SimulatedBackend(simulated.spec)
    assert backend.processes("GPU-sim-0") == {target.pid: 256 << 20}
    assert backend.processes("GPU-sim-1") == {}
    target.kill()
    assert backend.processes("GPU-sim-0") == {}


# --- The probe ---


@pytest.mark.gpu
def test_the_probe_finds_a_working_lock_and_remembers(tmp_path: Path) -> None:
    cache = tmp_path / "driver-lock.json"
    assert driver_lock.probe("test", cache) == ""
    assert json.loads(cache.read_text())["drivers"]["test"]["reason"] == ""


def test_a_known_bad_driver_is_refused_without_a_trial(tmp_path: Path) -> None:
    cache = tmp_path / "driver-lock.json"
    assert "570.158.01" in driver_lock.probe("570.158.01", cache)
    assert not cache.exists()


def test_a_remembered_success_is_not_tried_again(tmp_path: Path) -> None:
    cache = tmp_path / "driver-lock.json"
    cache.write_text(json.dumps({"probe": 1, "drivers": {"1.2": {"reason": "", "at": 0.0}}}))
    assert driver_lock.probe("1.2", cache, timeout_s=0.0) == ""


def test_an_old_failure_is_tried_again(tmp_path: Path) -> None:
    cache = tmp_path / "driver-lock.json"
    cache.write_text(json.dumps({"probe": 1, "drivers": {"1.2": {"reason": "long ago", "at": 0.0}}}))
    assert driver_lock.probe("1.2", cache, timeout_s=0.0) != "long ago"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"probe": 0, "drivers": {"1.2": {"reason": "", "at": 0}}}']
)
def test_an_unreadable_cache_is_no_answer(tmp_path: Path, content: str) -> None:
    cache = tmp_path / "driver-lock.json"
    cache.write_text(content)
    assert driver_lock.probe("1.2", cache, timeout_s=0.0) != ""


def test_a_probe_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []

    def start_silent_child(role: str, arguments: list[str]) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        return child

    monkeypatch.setattr(driver_lock, "_start_child", start_silent_child)
    assert "it hung" in driver_lock.probe("1.2", tmp_path / "driver-lock.json", timeout_s=0.2)
    assert [child.returncode for child in started] == [-signal.SIGKILL]


def test_every_code_has_a_meaning() -> None:
    for code in (SUCCESS, NOT_CUDA, OPERATING_SYSTEM, ILLEGAL_STATE, NOT_READY, NOT_SUPPORTED, 999):
        assert driver_lock.meaning(code).endswith(".")


@pytest.mark.parametrize("spec", ["nonsense", "os:", "os:nothing_of_this_name", "no_such_module_of_ours:A"])
def test_a_spec_that_names_nothing_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"form|used"):
        driver_lock.load(spec)
