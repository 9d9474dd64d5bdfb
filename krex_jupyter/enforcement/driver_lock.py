"""The NVIDIA driver's own lock on a process's CUDA calls: how to call it, and whether it may be trusted here.

``cuCheckpointProcessLock`` blocks another process's new CUDA calls and returns once its submitted work is
done. It is reached through libcuda's C interface, so that an environment without any CUDA package can still
guard. Creates no GPU context in the calling process; never decides whom to lock.

What the caller owes, because the driver does not enforce it (measured on a 580 driver):

- Every call, that for the state too, is answered by a thread *of the target*. A target in state T does not
  answer, so the call then hangs past its time-out until SIGCONT (0) or SIGKILL (304). Nothing is locked,
  unlocked or asked while it is stopped: lock precedes freeze, thaw precedes unlock. And since somebody else
  may stop a target at any moment, every call is made in a thread or process that is never awaited without a
  deadline.
- The lock outlives the one who took it. Whoever locks has written down beforehand that he will.

This module imports only the standard library: its children (`probe`) are started by its path, with ``-I -S``,
so that they start in some 20 ms, whatever the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Final, Protocol, cast

SUCCESS: Final = 0
NOT_CUDA: Final = 3
OPERATING_SYSTEM: Final = 304
ILLEGAL_STATE: Final = 401
NOT_READY: Final = 600
NOT_SUPPORTED: Final = 801
UNAVAILABLE: Final = -1
"""Ours, not the driver's: there is no libcuda here that offers the lock."""

RUNNING: Final = 0
LOCKED: Final = 1
CHECKPOINTED: Final = 2
FAILED: Final = 3

STATE_NAMES: Final = {RUNNING: "running", LOCKED: "locked", CHECKPOINTED: "checkpointed", FAILED: "failed"}

_MEANINGS: Final = {
    SUCCESS: "The driver did as asked.",
    NOT_CUDA: "The process has no CUDA context, so there is nothing to lock.",
    OPERATING_SYSTEM: "The process is dead, or belongs to another user and KREX runs without privilege.",
    ILLEGAL_STATE: "The process is locked already, or was not locked when it was to be unlocked.",
    NOT_READY: "The process's submitted work was not done within the time-out; it runs on unharmed.",
    NOT_SUPPORTED: "The driver refuses to lock this process: it is being profiled, or is a client of MPS.",
    UNAVAILABLE: "libcuda.so.1 is missing here or has no process lock (that needs driver 570 or later).",
}

KNOWN_BAD_DRIVERS: Final = (
    ("570.86*", "locking fails on PyTorch processes with this driver"),
    ("570.158*", "locking fails on PyTorch processes with this driver"),
    ("610.57*", "locking a process with many threads can end it with SIGSEGV inside libcuda"),
)
"""Driver versions (shell patterns) whose lock is not used whatever the probe says, with the reason.

From public reports. They are listed because a probe's plain process does not show the fault: on 610.57.04
simple processes lock well and a threaded service dies (NVIDIA/cuda-checkpoint issue 58)."""

FAILURE_KEPT_S: Final = 24 * 3600.0
"""How long a probe's failure is believed (the machine may have been busy). Success holds for a version."""

_PROBE_VERSION: Final = 1
_PROBE_TIMEOUT_S: Final = 20.0
"""Two cuInits (10-200 ms each, seconds without persistence mode), a context (0.1 s; 2 s among 16 others)."""
_PROBE_LOCK_TIMEOUT_S: Final = 5.0
_REAP_TIMEOUT_S: Final = 2.0


class DriverLock(Protocol):
    """What the guardian asks of a driver. Codes are the constants above; nothing is raised."""

    def lock(self, pid: int, timeout_s: float) -> int:
        """Block the process's new CUDA calls and wait until its submitted work is done.

        Blocks that long, at most ``timeout_s``; without bound while the process is stopped.
        """
        ...

    def unlock(self, pid: int) -> int:
        """Let its CUDA calls go on. Blocks without bound while the process is stopped."""
        ...

    def state(self, pid: int) -> tuple[int, int]:
        """(code, state); the state means something only where the code is `SUCCESS`.

        Blocks without bound while the process is stopped, like the others.
        """
        ...


def meaning(code: int) -> str:
    """A sentence for a code of the lock."""
    return _MEANINGS.get(code, f"The driver answered with CUDA error {code}.")


def load(spec: str = "") -> DriverLock:
    """The lock that ``spec`` names (``module:Class:argument``); the driver's own where it is empty.

    Raises:
        ValueError: there is no such class.
    """
    if not spec:
        return LibcudaLock()
    # Here and not above: this file also runs by its path, outside the package.
    from krex_jupyter.named import construct

    return cast("DriverLock", construct(spec))


class _LockArguments(ctypes.Structure):
    """``CUcheckpointLockArgs``."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class _UnlockArguments(ctypes.Structure):
    """``CUcheckpointUnlockArgs``."""

    _fields_ = (("reserved", ctypes.c_uint64 * 8),)


class LibcudaLock:
    """The driver's lock. Safe to use from several threads at once: the calls release the GIL."""

    def __init__(self) -> None:
        # Guards the one cuInit: a second thread must not call the driver before it is done.
        self._initialising = threading.Lock()
        self._libcuda: ctypes.CDLL | None = None
        self._failure: int | None = None

    def lock(self, pid: int, timeout_s: float) -> int:
        """As `DriverLock.lock`; a time-out below 1 ms is 1 ms, since 0 means "for ever" to the driver."""
        libcuda = self._library()
        if libcuda is None:
            return self._failure or UNAVAILABLE
        arguments = _LockArguments(timeout_ms=max(1, min(round(timeout_s * 1000), 2**32 - 1)))
        return int(libcuda.cuCheckpointProcessLock(pid, ctypes.byref(arguments)))

    def unlock(self, pid: int) -> int:
        """As `DriverLock.unlock`."""
        libcuda = self._library()
        if libcuda is None:
            return self._failure or UNAVAILABLE
        arguments = _UnlockArguments()
        return int(libcuda.cuCheckpointProcessUnlock(pid, ctypes.byref(arguments)))

    def state(self, pid: int) -> tuple[int, int]:
        """As `DriverLock.state`."""
        libcuda = self._library()
        if libcuda is None:
            return self._failure or UNAVAILABLE, FAILED
        state = ctypes.c_int(FAILED)
        code = int(libcuda.cuCheckpointProcessGetState(pid, ctypes.byref(state)))
        return code, state.value

    def _library(self) -> ctypes.CDLL | None:
        with self._initialising:
            if self._libcuda is None and self._failure is None:
                try:
                    libcuda = _libcuda()
                    _declare(libcuda)
                except (OSError, AttributeError):
                    self._failure = UNAVAILABLE
                    return None
                code = int(libcuda.cuInit(0))
                if code == SUCCESS:
                    self._libcuda = libcuda
                else:
                    # Not the driver's code: 3 would read as "the target has no context".
                    self._failure = UNAVAILABLE
            return self._libcuda


def denied(driver_version: str) -> str:
    """Why the lock of this driver version is not used, or an empty string."""
    for pattern, reason in KNOWN_BAD_DRIVERS:
        if fnmatch.fnmatchcase(driver_version, pattern):
            return f"NVIDIA driver {driver_version} is not safe to lock with: {reason}. Install another."
    return ""


def probe(driver_version: str, cache_file: Path, *, timeout_s: float = _PROBE_TIMEOUT_S) -> str:
    """An empty string where the driver's lock works on this host, else the reason why it is not used.

    Tried once per driver version on a throw-away CUDA process of ours, never on a user's: lock, see it
    LOCKED, unlock, see it RUNNING and computing. The answer is kept in ``cache_file`` (delete it to try
    again; a failure is kept for a day). Blocks up to ``timeout_s`` and some 5 s for ending the two children,
    whatever hangs.
    """
    refusal = denied(driver_version)
    if refusal:
        return refusal
    known = _cached(driver_version, cache_file)
    if known is not None:
        return known
    reason = _probe_now(timeout_s)
    _remember(driver_version, reason, cache_file)
    return reason


def _probe_now(timeout_s: float) -> str:
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as cleanup:
        target = _start_child("target", [])
        cleanup.callback(_end_child, target)
        started = _read_line(target, deadline_s)
        if started != "ready":
            return f"A trial CUDA process could not be started: {started or _ending(target)}."
        # The locker is a process of its own, so that a call that never returns can be ended with it.
        # Registered after the target and so ended before it.
        locker = _start_child("locker", [str(target.pid)])
        cleanup.callback(_end_child, locker)
        result = _read_line(locker, deadline_s)
        if target.poll() is not None:
            return f"The driver's lock ended the trial process ({_ending(target)}), and might end a user's."
        if result != "works":
            return f"The driver's lock did not work on a trial process: {result or _ending(locker)}."
        _say(target, "compute")
        computed = _read_line(target, deadline_s)
        if computed != "computed":
            return f"The trial process could not compute after unlock: {computed or _ending(target)}."
    return ""


def _start_child(role: str, arguments: list[str]) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).resolve()), role, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
        # In a session of its own: a Ctrl-C meant for the coordinator's terminal is not the probe's answer.
        start_new_session=True,
    )


def _end_child(child: subprocess.Popen[str]) -> None:
    """Killed and reaped; one that the kernel cannot end at once (stuck inside the driver) is left to it."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_REAP_TIMEOUT_S)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _say(child: subprocess.Popen[str], line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        stdin = cast("IO[str]", child.stdin)
        stdin.write(line + "\n")
        stdin.flush()


def _read_line(child: subprocess.Popen[str], deadline_s: float) -> str:
    """One line of the child's, or an empty string where it ended or said nothing in time.

    Children write one short line with one write and then wait for us, so a readable pipe holds a whole line.
    """
    stdout = cast("IO[str]", child.stdout)
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline_s - time.monotonic())):
            return ""
    return stdout.readline().strip()


def _ending(child: subprocess.Popen[str]) -> str:
    """How a child that said nothing stands: hanging, or ended by what."""
    try:
        code = child.wait(_REAP_TIMEOUT_S / 2)
    except subprocess.TimeoutExpired:
        return "it hung"
    return f"it was killed by signal {-code}" if code < 0 else f"it exited with {code}"


def _cached(driver_version: str, cache_file: Path) -> str | None:
    try:
        stored = json.loads(cache_file.read_text(encoding="utf-8"))
        entry = stored["drivers"][driver_version]
        reason, at = str(entry["reason"]), float(entry["at"])
        current = stored["probe"] == _PROBE_VERSION
    except (OSError, ValueError, KeyError, TypeError):
        return None
    fresh = not reason or 0 <= time.time() - at < FAILURE_KEPT_S
    return reason if current and fresh else None


def _remember(driver_version: str, reason: str, cache_file: Path) -> None:
    """Best effort: without the file the next coordinator probes again."""
    entry = {"reason": reason, "at": time.time()}
    content = json.dumps({"probe": _PROBE_VERSION, "drivers": {driver_version: entry}})
    temporary = cache_file.with_name(f"{cache_file.name}.{os.getpid()}")
    try:
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(cache_file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _declare(libcuda: ctypes.CDLL) -> None:
    """Argument types of the lock's calls; AttributeError where the driver is too old to have them."""
    libcuda.cuInit.argtypes = (ctypes.c_uint,)
    libcuda.cuCheckpointProcessLock.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libcuda.cuCheckpointProcessUnlock.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libcuda.cuCheckpointProcessGetState.argtypes = (ctypes.c_int, ctypes.c_void_p)


# --- What the probe's two children do ---


class _TrialError(Exception):
    """A call of the trial failed; the text is the probe's reason."""


def _target() -> None:
    """A CUDA process with a context and some memory, until its standard input ends."""
    try:
        libcuda = _libcuda()
    except OSError as error:
        raise _TrialError(f"libcuda.so.1 cannot be loaded ({error})") from error
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    _check("cuInit", libcuda.cuInit(ctypes.c_uint(0)))
    _check("cuDeviceGet", libcuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(0)))
    _check("cuDevicePrimaryCtxRetain", libcuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check("cuCtxSetCurrent", libcuda.cuCtxSetCurrent(context))
    size = ctypes.c_size_t(1 << 16)
    _check("cuMemAlloc", libcuda.cuMemAlloc_v2(ctypes.byref(memory), size))
    _compute(libcuda, memory, size)
    _announce("ready")
    while sys.stdin.readline():
        _compute(libcuda, memory, size)
        _announce("computed")


def _compute(libcuda: ctypes.CDLL, memory: ctypes.c_uint64, size: ctypes.c_size_t) -> None:
    _check("cuMemsetD8", libcuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(1), size))
    _check("cuCtxSynchronize", libcuda.cuCtxSynchronize())


def _locker(pid: int) -> None:
    """Lock, look, unlock, look."""
    driver = LibcudaLock()
    _check("lock", driver.lock(pid, _PROBE_LOCK_TIMEOUT_S))
    _expect(driver, pid, LOCKED)
    _check("unlock", driver.unlock(pid))
    _expect(driver, pid, RUNNING)
    _announce("works")


def _expect(driver: DriverLock, pid: int, expected: int) -> None:
    code, state = driver.state(pid)
    _check("state", code)
    if state != expected:
        found = STATE_NAMES.get(state, str(state))
        raise _TrialError(f"its state was {found}, not {STATE_NAMES[expected]}")


def _check(call: str, code: int) -> None:
    if code != SUCCESS:
        raise _TrialError(f"{call} returned {code} ({meaning(code).rstrip('.')})")


def _announce(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _child_main(arguments: list[str]) -> None:
    try:
        if arguments[0] == "target":
            _target()
        else:
            _locker(int(arguments[1]))
    except _TrialError as error:
        _announce(str(error))
    # Without libcuda's exit handlers, which may wait for a driver that the trial has just upset.
    os._exit(0)


if __name__ == "__main__":
    _child_main(sys.argv[1:])
