"""The coordinator's process: arguments, the lock that makes it the only one, the log, and turning into a daemon."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import pwd
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from krex_jupyter.errors import CoordinatorUnavailable
from krex_jupyter.launch import detach, raise_descriptor_limit
from krex_jupyter.locate import file_system, is_local, lock_directory, user_directory

from .settings import Settings

NOT_SERVING = 3
"""Exit code where no coordinator could be run: that of the whole command line for "no coordinator"."""
_LOG_BYTES = 4 * 1024 * 1024
"""A log larger than this is begun anew."""


def parser() -> argparse.ArgumentParser:
    """The command line; `krex serve` uses it too."""
    found = argparse.ArgumentParser(prog="krex serve", description="Run a coordinator.")
    add_arguments(found)
    return found


def add_arguments(found: argparse.ArgumentParser) -> None:
    """Its options."""
    found.add_argument("--socket", type=Path, help="where to listen (default: this user's place)")
    found.add_argument(
        "--state-dir", type=Path, help="journal, log and probe results (default: beside the socket)"
    )
    found.add_argument(
        "--lock-dir", type=Path, help="lock files of held devices (default: this user's place)"
    )
    found.add_argument("--config", type=Path, help="settings, as TOML")
    found.add_argument(
        "--foreground", action="store_true", help="stay in the foreground, and do not end when idle"
    )
    found.add_argument(
        "--idle-exit", type=float, metavar="S", help="end after S seconds without participants; 0: never"
    )
    found.add_argument("--driver", default="", help=argparse.SUPPRESS)
    found.add_argument("--backend", action="append", default=[], help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Serve as ``arguments`` say; returns the exit code."""
    raise_descriptor_limit()
    for name in ("socket", "state_dir", "lock_dir", "config"):
        # A daemon's directory is another than that of whoever typed a relative path.
        path: Path | None = getattr(arguments, name)
        setattr(arguments, name, None if path is None else path.absolute())
    try:
        if arguments.foreground:
            _serve(arguments, lambda: print(f"listening at {arguments.socket}", flush=True))
        else:
            detach(lambda ready: _serve(arguments, ready), failure=NOT_SERVING)
    except (OSError, CoordinatorUnavailable, TimeoutError, ValueError) as error:
        print(f"krex: {error}", file=sys.stderr)
        return NOT_SERVING
    return 0


def _serve(arguments: argparse.Namespace, ready: Callable[[], None]) -> None:
    socket: Path = arguments.socket
    state: Path = arguments.state_dir or socket.parent
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as locks:
        # One coordinator per socket and one per journal, which may lie in different places.
        for directory in sorted({state.resolve(), socket.parent.resolve()}):
            locks.callback(os.close, _only_coordinator(directory, socket))
        _serve_alone(arguments, socket, state, ready)


def _serve_alone(arguments: argparse.Namespace, socket: Path, state: Path, ready: Callable[[], None]) -> None:
    from .service import serve

    log = _open_log(state / "coordinator.log")
    settings = _settings(arguments)

    def install_leave(leave: Callable[[], None]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: leave())

    try:
        serve(
            socket_path=socket,
            settings=settings,
            state_directory=state,
            lock_directory=arguments.lock_dir or lock_directory(),
            history_files=_history_files(arguments, state),
            driver=arguments.driver,
            backends=tuple(arguments.backend),
            log=log,
            ready=ready,
            install_leave=install_leave,
        )
    finally:
        socket.unlink(missing_ok=True)


def _only_coordinator(directory: Path, socket: Path) -> int:
    """The lock that makes this process the only coordinator there; raises where another has it."""
    fd = os.open(directory / "coordinator.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.read(fd, 4096).decode(errors="replace").strip() or "of unknown pid"
        os.close(fd)
        raise CoordinatorUnavailable(
            f"a coordinator ({other}) runs in {directory} already. Use it, or end it first: krex serve --stop"
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, f"pid {os.getpid()} at {socket}\n".encode())
    return fd


def _open_log(path: Path) -> IO[str]:
    fresh = path.exists() and path.stat().st_size > _LOG_BYTES
    log = path.open("w" if fresh else "a", encoding="utf-8", buffering=1)
    logging.basicConfig(
        stream=log, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )
    return log


def _settings(arguments: argparse.Namespace) -> Settings:
    import msgspec

    settings = Settings()
    if arguments.config is not None:
        import tomllib

        try:
            settings = msgspec.convert(tomllib.loads(arguments.config.read_text(encoding="utf-8")), Settings)
        except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{arguments.config}: {error}") from error
    if arguments.idle_exit is not None:
        return msgspec.structs.replace(settings, idle_exit_s=arguments.idle_exit)
    return msgspec.structs.replace(settings, idle_exit_s=0.0) if arguments.foreground else settings


def _history_files(arguments: argparse.Namespace, state: Path) -> list[Path]:
    """Where the record may lie: the user's home if it is on a local file system, else beside the socket."""
    beside = state / "history.sqlite"
    if arguments.state_dir is not None or os.getuid() == 0 or arguments.socket.parent != user_directory():
        return [beside]
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    if home.is_dir() and is_local(file_system(home)):
        return [home / ".local" / "state" / "krex" / "history.sqlite", beside]
    return [beside]


def main() -> None:
    """Entry point of the process."""
    arguments = parser().parse_args()
    if arguments.socket is None:
        from krex_jupyter.locate import location

        arguments.socket = location().socket
    sys.exit(run(arguments))


if __name__ == "__main__":
    main()
