"""The measuring process of `krex bench overhead`: a plain script that enters and leaves regions by the clock.

A process of its own, because the owner of a region must be neither the parent of the siblings nor busy with
their sockets. Reads one JSON object from standard input (`device`, `regions`, `spacing_s`), writes one to
standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any


def main() -> int:
    """Enter and leave ``regions`` regions."""
    asked = json.load(sys.stdin)
    device, regions, spacing_s = str(asked["device"]), int(asked["regions"]), float(asked["spacing_s"])
    if device.startswith("cuda"):
        _create_context(device)
    json.dump(measure(device, regions, spacing_s), sys.stdout)
    return 0


def measure(device: str, regions: int, spacing_s: float) -> dict[str, Any]:
    """Seconds for each region: by this process's clock, and the coordinator's own figures beside them."""
    from krex_jupyter.runtime.region import exclusive

    clock = time.perf_counter
    with exclusive(device, label="first"):
        pass  # connects, imports and joins: not what is measured
    enter_s, exit_s, reports = [], [], []
    for at in range(regions):
        if spacing_s:
            time.sleep(spacing_s)
        context = exclusive(device, label=f"overhead {at}")
        asked = clock()
        region = context.__enter__()
        entered = clock()
        context.__exit__(None, None, None)
        left = clock()
        enter_s.append(entered - asked)
        exit_s.append(left - entered)
        reports.append(region.report)
    known = [report for report in reports if report is not None]
    gates = Counter(sibling.gate for report in known for sibling in report.siblings)
    return {
        "enter_s": enter_s,
        "exit_s": exit_s,
        "wait_s": [report.wait_s for report in known],
        "coordinator_enter_s": [report.enter_s for report in known],
        "coordinator_exit_s": [report.exit_s for report in known],
        "gates": dict(gates),
        "frozen": sum(sibling.frozen for report in known for sibling in report.siblings),
        "siblings": max((len(report.siblings) for report in known), default=0),
        "errors": sorted({sibling.error for report in known for sibling in report.siblings if sibling.error}),
        "verdicts": dict(Counter(report.verdict for report in known)),
        "cpu_policy": known[0].cpu_policy if known else "",
    }


def _create_context(device: str) -> None:
    """A context on the GPU, so that entering and leaving synchronise something."""
    import cupy

    cupy.cuda.Device(int(device.partition(":")[2] or 0)).use()
    cupy.zeros(1)


if __name__ == "__main__":
    sys.exit(main())
