"""Starting our own processes so that they depend on nobody who happens to start them.

A coordinator is started by whoever needs it first, often a notebook kernel. It must not die with that kernel, be
stopped with its process group, inherit its descriptors, its narrow CPU mask or its ``CUDA_VISIBLE_DEVICES``. So
it is started with an explicit module path and a short list of environment variables, and detaches itself
(`detach`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import CoordinatorUnavailable
from .locate import Location, connect, lock_directory

if sys.platform != "win32":
    # Not there on Windows, where importing the package works all the same.
    import fcntl
    import resource

_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); module = sys.argv[2]; "
    "sys.argv[1:3] = []; runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
_LOOK_AGAIN_S = 0.02
_ENVIRONMENT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH")
"""What a coordinator keeps of its starter's environment; nothing that changes what Python or a driver sees."""


def python_command(module: str, *arguments: str) -> list[str]:
    """A command line that runs a module of ours in a fresh interpreter, whatever the environment says.

    The module path is handed over explicitly: ``-I`` and ``-S`` keep ``PYTHON*`` variables, the user's site and
    start-up files out, and make the start fast.
    """
    path = [str(Path(entry).absolute()) for entry in sys.path if entry] + (
        [str(Path.cwd())] if "" in sys.path else []
    )
    return [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(path), module, *arguments]


def clean_environment() -> dict[str, str]:
    """The part of this process's environment that a coordinator or guardian may see."""
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}


def start_coordinator(location: Location, *, timeout_s: float = 5.0, options: tuple[str, ...] = ()) -> None:
    """Start a detached coordinator at ``location``; returns once its socket accepts.

    Somebody else may be starting one at the same moment: then theirs serves.

    Raises:
        CoordinatorUnavailable: none answers within ``timeout_s``, with what it said for a reason.
    """
    if not location.startable:
        raise CoordinatorUnavailable(
            f"The system's coordinator at {location.socket} does not answer. "
            f"Ask the administrator to look at: systemctl status krex"
        )
    directory = location.directory
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        give_up_s = time.monotonic() + timeout_s
        with FileLock(directory / "start.lock", timeout=timeout_s, mode=0o600):
            while not _answers(location):
                if not _another_runs(directory):
                    try:
                        _spawn(location, timeout_s, options)
                    except CoordinatorUnavailable:
                        # One whose starter is dead may have come first, though there was no sign of it yet.
                        if not _another_runs(directory):
                            raise
                    else:
                        return
                # It is about to listen, and who started it is dead; or it is about to end.
                if time.monotonic() > give_up_s:
                    raise CoordinatorUnavailable(
                        f"A coordinator runs in {directory} and does not listen at {location.socket} after "
                        f"{timeout_s:g} s. See {directory / 'coordinator.log'}; end it with: krex serve --stop"
                    )
                time.sleep(_LOOK_AGAIN_S)
    except Timeout as error:
        raise CoordinatorUnavailable(
            f"Somebody else has been starting a coordinator in {directory} for over {timeout_s:g} s. "
            f"See {directory / 'coordinator.log'}."
        ) from error
    except OSError as error:
        raise CoordinatorUnavailable(
            f"No coordinator can be started in {directory}: {error.strerror or error}. "
            f"Set KREX_SOCKET to a path in a directory that you may write."
        ) from error


def detach(serve: Callable[[Callable[[], None]], None], *, failure: int = 1) -> None:
    """Turn this process into a daemon that runs ``serve(ready)``; its starter is released by ``ready()``.

    The starter's exit code is 0 after ``ready()``, and ``failure`` where the daemon ended before that; what the daemon
    wrote to standard error is then the reason. Must be called while there is only one thread.
    """
    from_daemon, to_starter = os.pipe()
    if os.fork():
        os.close(to_starter)
        os._exit(0 if os.read(from_daemon, 1) else failure)
    os.close(from_daemon)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0o077)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))

    def ready() -> None:
        os.write(to_starter, b"1")
        os.close(to_starter)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)

    serve(ready)


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as this process may have: open `/proc` files are what makes entries fast."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _answers(location: Location) -> bool:
    try:
        connect(location.socket).close()
    except OSError:
        return False
    return True


def _another_runs(directory: Path) -> bool:
    """Whether a coordinator holds the lock of ``directory``, though it may not listen."""
    try:
        with (directory / "coordinator.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def _spawn(location: Location, timeout_s: float, options: tuple[str, ...]) -> None:
    arguments = ("--socket", str(location.socket), "--lock-dir", str(lock_directory()), *options)
    command = python_command("krex_jupyter.coordinator", *arguments)
    starter = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        start_new_session=True,
        cwd="/",
    )
    try:
        _, said = starter.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        # Not `communicate` again: a daemon that hangs keeps the pipe open.
        starter.kill()
        starter.wait()
        raise CoordinatorUnavailable(
            f"A coordinator was started in {location.directory} and was not ready after {timeout_s:g} s. "
            f"See {location.directory / 'coordinator.log'}."
        ) from error
    if starter.returncode != 0:
        last = said.decode(errors="replace").strip().splitlines()
        raise CoordinatorUnavailable(
            f"No coordinator could be started at {location.socket}: {last[-1] if last else 'it gave no reason'}"
        )
