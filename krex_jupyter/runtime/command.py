"""`krex run` and `krex region`: a command beside regions, or inside one.

``krex run -- CMD`` runs a command whose code uses regions; it takes part from its first moment.
``krex run --exclusive --max-hold S -- CMD`` and ``krex region -- CMD`` hold one region around the whole command. A
region that the command's own code enters on the same devices is then inside that one: the child learns of it by
``KREX_INSIDE``, and does not queue behind its own parent for ever.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from krex_jupyter.errors import KrexError, NotExclusive, WaitTimeout
from krex_jupyter.protocol import Hello, Register

from .client import Connection, next_request_id
from .region import INSIDE, exclusive

FAILED, WAITED_TOO_LONG, NOT_EXCLUSIVE = 125, 124, 123
CANNOT_EXECUTE, NOT_FOUND = 126, 127

_VALUE_OPTIONS = frozenset(
    {"-d", "--device", "-t", "--timeout", "--max-hold", "--cpu", "--foreign", "-l", "--label"}
)


def main(name: str, words: Sequence[str]) -> int:
    """Run ``krex run`` or ``krex region`` with the words after it; returns the exit code."""
    options, command = split(words)
    arguments = _parser(name).parse_args(options)
    whole = name == "region" or arguments.exclusive
    if not command:
        _parser(name).error("a command is missing: krex " + name + " [options] -- COMMAND [ARGS]")
    if name == "run" and whole and arguments.max_hold is None:
        _parser(name).error("--exclusive needs --max-hold S: how long nobody else may use the device")
    try:
        return _in_region(name, arguments, command) if whole else _beside_regions(arguments, command)
    except WaitTimeout as error:
        return _say(error, WAITED_TOO_LONG)
    except NotExclusive as error:
        return _say(error, NOT_EXCLUSIVE)
    except (KrexError, ValueError) as error:
        return _say(error, FAILED)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(our options, the command with its own) of a command line: cut at ``--`` or at the first other word."""
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return list(words[:at]), list(words[at + 1 :])
        if not word.startswith("-"):
            break
        at += 2 if word in _VALUE_OPTIONS else 1
    return list(words[:at]), list(words[at:])


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"krex {name}", usage=f"krex {name} [options] -- COMMAND [ARGS]")
    parser.add_argument(
        "-d", "--device", help="cuda:N, hip:N, cpu or a UUID (default: KREX_DEVICE, else the first GPU)"
    )
    parser.add_argument(
        "-t", "--timeout", type=float, metavar="S", help="seconds to wait for the region (default: 600)"
    )
    parser.add_argument(
        "--max-hold", type=float, metavar="S", help="seconds it may hold the device; 0: no limit"
    )
    parser.add_argument("--cpu", choices=["auto", "freeze", "isolate", "share"], default="auto")
    parser.add_argument("--foreign", choices=["observe", "gate"], default="observe")
    parser.add_argument("-l", "--label", help="a name for status and history")
    parser.add_argument(
        "--strict", action="store_true", help=f"exit with {NOT_EXCLUSIVE} unless the verdict is clean"
    )
    if name == "run":
        parser.add_argument("--exclusive", action="store_true", help="one region around the whole command")
    else:
        parser.add_argument("--json", action="store_true", help="print the report as JSON, to standard error")
    return parser


def _beside_regions(arguments: argparse.Namespace, command: list[str]) -> int:
    environment = dict(os.environ)
    if arguments.device:
        environment["KREX_DEVICE"] = arguments.device
    started = _start(command, environment)
    if isinstance(started, int):
        return started
    with contextlib.ExitStack() as cleanup:
        connection = Connection.open(Hello(role="server", label="krex run"))
        cleanup.callback(connection.close)
        pidfd = os.pidfd_open(started.pid)
        cleanup.callback(os.close, pidfd)
        connection.send(Register(request_id=next_request_id(), label=arguments.label or command[0]), (pidfd,))
        return _wait(started)


def _in_region(name: str, arguments: argparse.Namespace, command: list[str]) -> int:
    region_of = exclusive(
        arguments.device,
        timeout=arguments.timeout,
        max_hold=arguments.max_hold,
        cpu=arguments.cpu,
        foreign=arguments.foreign,
        label=arguments.label or command[0],
        strict=arguments.strict,
    )
    with region_of as region:
        inside = json.dumps(
            {"region_id": region.region_id, "devices": [device.uuid for device in region.devices]}
        )
        started = _start(command, {**os.environ, INSIDE: inside})
        code = started if isinstance(started, int) else _wait(started)
    if name == "region" and region.report is not None:
        import msgspec

        from krex_jupyter.display import report_text

        text = msgspec.json.encode(region.report).decode() if arguments.json else report_text(region.report)
        print(text, file=sys.stderr)
    return code


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes] | int:
    """The started command, or the exit code that says why it could not be."""
    try:
        return subprocess.Popen(command, env=environment)
    except FileNotFoundError:
        return _say(f"{command[0]}: command not found", NOT_FOUND)
    except PermissionError:
        return _say(f"{command[0]}: permission denied", CANNOT_EXECUTE)


def _wait(started: subprocess.Popen[bytes]) -> int:
    """The command's exit code; signals that end this process are handed on to it."""
    with _signals_to(started):
        code = started.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _signals_to(started: subprocess.Popen[bytes]) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # A terminal sends Ctrl-C to the whole group: the command has it already, this process only waits for its end.
    before = {number: signal.signal(number, lambda got, _: _hand_on(started, got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if started.poll() is None:
            started.terminate()


def _hand_on(started: subprocess.Popen[bytes], number: int) -> None:
    if number != signal.SIGINT or not sys.stdin.isatty():
        with contextlib.suppress(ProcessLookupError):
            started.send_signal(number)


def _say(what: object, code: int) -> int:
    print(f"krex: {what}", file=sys.stderr)
    return code
