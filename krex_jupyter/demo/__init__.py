"""`krex demo`: tuning agents on one device under three policies, and what each does to pace and timings.

This module is the command line; `session.py` is the demo. Nothing heavy is imported before it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `krex demo`."""
    parser.add_argument(
        "--agents", type=_positive, default=4, help="notebooks that tune at once (default: 4)"
    )
    parser.add_argument(
        "--repetitions", type=_positive, default=3, help="times that every policy is run (default: 3)"
    )
    parser.add_argument(
        "--candidates",
        type=_positive,
        help="candidates per policy and repetition (default: what fits into the time)",
    )
    parser.add_argument(
        "-d", "--device", help="cpu or cuda:0 (default: KREX_DEVICE, else the first GPU, else cpu)"
    )
    parser.add_argument(
        "--max-time", type=float, default=170.0, metavar="S", help="seconds to plan for (default: 170)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order in which all is run (default: 0)")
    parser.add_argument(
        "--quick", action="store_true", help="8 candidates, 2 repetitions: shows it working, no more"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where krex-demo.json and .svg go (default: here)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the results as JSON; progress goes to stderr"
    )


def run(args: argparse.Namespace) -> int:
    """Run it: 0 if it ran (whatever it found), 1 if it could not, 3 without a coordinator, 130 on Ctrl-C."""
    from krex_jupyter.errors import CoordinatorUnavailable, KrexError

    from .session import Settings, run_demo, write_files
    from .table import render

    settings = Settings(
        agents=args.agents,
        repetitions=2 if args.quick else args.repetitions,
        device=args.device,
        candidates=8 if args.quick and args.candidates is None else args.candidates,
        alone_passes=3 if args.quick else 5,
        max_time_s=args.max_time,
        seed=args.seed,
    )
    progress = sys.stderr if args.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=progress, flush=True)

    if not args.output.is_dir():
        print(f"krex demo: {args.output} is not a directory", file=sys.stderr)
        return 2
    try:
        with _terminate_as_interrupt():
            outcome = run_demo(settings, say)
    except KeyboardInterrupt:
        print("krex demo: interrupted; everything it started is ended", file=sys.stderr)
        return 130
    except CoordinatorUnavailable as error:
        print(f"krex demo: {error}", file=sys.stderr)
        return 3
    except KrexError as error:
        print(f"krex demo: {error}", file=sys.stderr)
        return 1
    written = write_files(outcome, args.output)
    say("\n" + render(outcome.analysis))
    say("written: " + ", ".join(str(path) for path in written))
    if args.json:
        print(json.dumps(outcome.document))
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does: in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
