"""`krex bench`: what regions cost, and whether the statistics hold: the command line; each benchmark has its file."""

from __future__ import annotations

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks of `krex bench` and their options."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    overhead = benchmarks.add_parser(
        "overhead", help="entering and leaving a region, with idle and busy notebooks as siblings"
    )
    overhead.add_argument(
        "--siblings", type=_count, default=8, help="ipykernels beside the owner (default: 8)"
    )
    overhead.add_argument("-d", "--device", help="cpu or cuda:N (default: the first GPU, else cpu)")
    overhead.add_argument("--regions", type=_positive, default=200, help="regions per row (default: 200)")
    overhead.add_argument(
        "--json", action="store_true", help="print the results as JSON; progress goes to stderr"
    )
    statistics = benchmarks.add_parser(
        "statistics", help="does the stopping rule keep its word on simulated processes (no device is used)"
    )
    statistics.add_argument(
        "--seeds", type=_positive, default=2000, help="runs per process (default: 2000, about 5 minutes)"
    )
    statistics.add_argument(
        "--limits", action="store_true", help="show also what lies beyond the rule; not judged"
    )
    statistics.add_argument(
        "--json", action="store_true", help="print the results as JSON; progress goes to stderr"
    )


def run(args: argparse.Namespace) -> int:
    """Run a benchmark: 0 if it ran, 1 if it could not or failed, 3 without a coordinator, 130 on Ctrl-C."""
    from krex_jupyter.errors import CoordinatorUnavailable, KrexError

    from .overhead import measure_overhead
    from .statistics import measure_statistics

    progress = sys.stderr if args.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=progress, flush=True)

    try:
        if args.benchmark == "statistics":
            document = measure_statistics(seeds=args.seeds, limits=args.limits, say=say)
        else:
            document = measure_overhead(
                siblings=args.siblings, device=args.device, regions=args.regions, say=say
            )
    except KeyboardInterrupt:
        print("krex bench: interrupted; everything it started is ended", file=sys.stderr)
        return 130
    except CoordinatorUnavailable as error:
        print(f"krex bench: {error}", file=sys.stderr)
        return 3
    except KrexError as error:
        print(f"krex bench: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(document, indent=1))
    return 0 if document.get("passed", True) else 1


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
