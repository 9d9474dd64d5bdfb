"""The `krex` command (also `jupyter krex`): everything that people and scripts do without a notebook.

Parsing of a command to run stops at ``--`` or at its first word, so that its options stay its own. Exit codes:
2 usage, 3 no coordinator, 4 waited too long, 5 not exclusive; where `run` or `region` itself fails 125, 124 for
waiting too long, 123 for not exclusive, 126 and 127 as a shell has them, 128+n for signals, else the command's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from krex_jupyter.errors import CoordinatorUnavailable, KrexError, NotExclusive, WaitTimeout

USAGE, NO_COORDINATOR, WAITED_TOO_LONG, NOT_EXCLUSIVE = 2, 3, 4, 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if words and words[0] in ("run", "region"):
        from krex_jupyter.runtime import command

        return command.main(words[0], words[1:])
    arguments = parser.parse_args(words)
    try:
        code: int = arguments.run(arguments)
    except CoordinatorUnavailable as error:
        return _say(error, NO_COORDINATOR)
    except WaitTimeout as error:
        return _say(error, WAITED_TOO_LONG)
    except NotExclusive as error:
        return _say(error, NOT_EXCLUSIVE)
    except KrexError as error:
        return _say(error, 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of a pipe went away (krex history | head): nothing to report, and nothing to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    from krex_jupyter import __version__

    parser = argparse.ArgumentParser(
        prog="krex", description="Exclusive regions for trustworthy GPU timings on a shared machine."
    )
    parser.add_argument("--version", action="version", version=f"krex {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    devices = commands.add_parser("devices", help="list this host's devices and how each can be guarded")
    _add_json(devices)
    devices.set_defaults(run=_devices)

    status = commands.add_parser("status", help="who holds what, who waits, who takes part")
    _add_json(status)
    status.set_defaults(run=_status)

    history = commands.add_parser("history", help="reports of past regions, newest first")
    history.add_argument("-n", "--limit", type=int, default=20, help="how many (default: 20)")
    history.add_argument("-d", "--device", default="", help="only on the device whose UUID begins so")
    history.add_argument("-l", "--label", default="", help="only with this label")
    history.add_argument(
        "--verdict", default="", choices=["", "clean", "suspect", "contended", "revoked", "unknown"]
    )
    history.add_argument("--since", type=float, default=0.0, metavar="S", help="only of the last S seconds")
    _add_json(history)
    history.set_defaults(run=_history)

    for name, what in (
        ("run", "run a command whose code uses regions, or one region around the whole command"),
        ("region", "run a short command in one region and print the report"),
    ):
        commands.add_parser(name, help=what, add_help=False)

    serve = commands.add_parser("serve", help="run a coordinator (one is started by itself where needed)")
    from krex_jupyter.coordinator.__main__ import add_arguments as add_serve_arguments

    add_serve_arguments(serve)
    serve.add_argument(
        "--stop", action="store_true", help="end the coordinator that runs; its regions end with it"
    )
    serve.set_defaults(run=_serve)

    thaw = commands.add_parser("thaw", help="set free whatever a dead guardian left frozen or locked")
    thaw.set_defaults(run=_thaw)

    demo = commands.add_parser("demo", help="tuning agents in real notebooks, with and without regions")
    from krex_jupyter import bench as bench_module
    from krex_jupyter import demo as demo_module

    demo_module.add_arguments(demo)
    demo.set_defaults(run=demo_module.run)

    bench = commands.add_parser("bench", help="measure what regions cost and bring on this machine")
    bench_module.add_arguments(bench)
    bench.set_defaults(run=bench_module.run)
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _devices(arguments: argparse.Namespace) -> int:
    from krex_jupyter.display import DevicesView
    from krex_jupyter.runtime.queries import devices

    found = devices()
    _print(arguments, [_plain(info) for info in found], DevicesView(found))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from krex_jupyter.display import StatusView
    from krex_jupyter.runtime.queries import status

    found = status()
    _print(arguments, _plain(found), StatusView(found))
    return 0


def _history(arguments: argparse.Namespace) -> int:
    import time

    from krex_jupyter.display import HistoryView
    from krex_jupyter.runtime.queries import history

    found = history(
        limit=arguments.limit,
        device=arguments.device,
        label=arguments.label,
        verdict=arguments.verdict,
        since=time.time() - arguments.since if arguments.since else 0.0,
    )
    _print(arguments, [_plain(report) for report in found], HistoryView(found))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from krex_jupyter.coordinator.__main__ import run
    from krex_jupyter.locate import location

    if arguments.socket is None:
        arguments.socket = location().socket
    if arguments.stop:
        return _stop(arguments.state_dir or arguments.socket.parent)
    return run(arguments)


def _stop(state: Path) -> int:
    """End the coordinator of ``state`` politely: it sets everybody free before it goes."""
    from krex_jupyter.identity import has_ended

    pid = _pid_in(state / "coordinator.lock")
    if pid is None:
        print(f"no coordinator runs in {state}")
        return 0
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        print(f"no coordinator runs in {state}")
        return 0
    signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    if not has_ended(pidfd, within_s=5.0):
        print(
            f"krex: the coordinator (pid {pid}) did not end within 5 s; run: kill -9 {pid}", file=sys.stderr
        )
        return 1
    print(f"the coordinator (pid {pid}) has ended")
    return 0


def _pid_in(lock: Path) -> int | None:
    """Pid of the process that holds a coordinator's lock file; None where nobody holds it."""
    import fcntl

    try:
        with lock.open("rb") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(held.read().split()[1])
    except (FileNotFoundError, ValueError, IndexError):
        pass
    return None


def _thaw(_arguments: argparse.Namespace) -> int:
    from krex_jupyter.enforcement.driver_lock import load
    from krex_jupyter.enforcement.guardian import replay
    from krex_jupyter.enforcement.journal import Journal
    from krex_jupyter.locate import location

    where = location()
    path = where.directory / "journal"
    if not path.exists():
        print(f"nothing was left behind: there is no journal at {path}")
        return 0
    journal = Journal(path)
    if not journal.try_lock():
        print(
            f"A guardian is alive and keeps the journal at {path}; it sets everybody free by itself. To end it and "
            f"its coordinator, and with them every region: krex serve --stop",
            file=sys.stderr,
        )
        return 1
    count = replay(journal, load())
    print(f"{count} processes were set free" if count else "nothing was left frozen or locked")
    return 0


def _plain(value: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(value)


def _print(arguments: argparse.Namespace, plain: Any, view: Any) -> None:
    print(json.dumps(plain, indent=2) if arguments.json else repr(view))


def _say(error: KrexError, code: int) -> int:
    print(f"krex: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
